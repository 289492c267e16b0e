"""Kernels that copy values between host and device, between dtypes, into other tensors, and to Python numbers.

A copy to the device keeps the host values until an operation needs them on the device (see `_storage.Buffer`), so that a tensor
that `mark_sharding` lays out first is uploaded shard by shard. Every copy to the host is counted in `spmd.metrics`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from spmd.base import _counters
from spmd.base._convert import cast, exact_dtypes, host_array, host_tensor, to_numpy_dtype
from spmd.base._errors import TraceError, called_at, message, user_line
from spmd.base._jax import is_same_value, is_tracer, is_tracing, known_value
from spmd.device import _host_counters
from spmd.device._arrays import copied, fetched, moved
from spmd.device._checks import Check
from spmd.device._host_answers import host_answer
from spmd.device._host_copies import HostCopy, makes_host_copy, refuse_to_write
from spmd.device._layout import annotation_of, hand_over
from spmd.device._numbers import lifted, needs_value
from spmd.device._overlaps import check_in_place, check_overlap
from spmd.device._refusals import check_expands
from spmd.device._storage import (
    buffer_of,
    is_whole,
    load,
    once,
    recording,
    store,
    strided_alias,
    wrap,
    wrap_host,
    wrap_strided,
    wrap_unset,
)
from spmd.device._trace_lock import retried


def empty_memory_format(size: Any, **kwargs: Any) -> torch.Tensor:
    """`torch.empty`: zeros, because jax has no uninitialised memory. They are allocated at the first read."""
    return unset(tuple(size), to_numpy_dtype(kwargs.get("dtype") or torch.get_default_dtype()))


def unset(size: tuple[int, ...], dtype: Any) -> torch.Tensor:
    """A tensor without a value yet; in a trace a tensor of zeros, which XLA eliminates if nothing reads them.

    Raises:
        RuntimeError: torch's error for a negative size.
    """
    if (negative := next((n for n in size if type(n) is int and n < 0), None)) is not None:
        raise RuntimeError(f"Trying to create tensor with negative dimension {negative}: {list(size)}")
    if not is_tracing():
        return wrap_unset(size, dtype)
    with exact_dtypes():
        return wrap(jnp.zeros(size, dtype))


def empty_strided(size: Any, stride: Any, **kwargs: Any) -> torch.Tensor:
    """`torch.empty_strided`: the storage's shape is in memory order, and the tensor has the requested strides."""
    size, stride = tuple(size), tuple(stride)
    dtype = to_numpy_dtype(kwargs.get("dtype") or torch.get_default_dtype())
    order = sorted(range(len(size)), key=lambda dim: -stride[dim])
    if fills_block(size, stride):
        root = unset(tuple(size[dim] for dim in order), dtype)
    else:  # gaps or overlaps: a flat storage long enough for the last element
        root = unset((1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True)),), dtype)
    return strided_alias(root, size, stride, 0)


def new_empty_strided(self: torch.Tensor, size: Any, stride: Any, **kwargs: Any) -> torch.Tensor:
    """`tensor.new_empty_strided`."""
    return empty_strided(size, stride, dtype=kwargs.get("dtype") or self.dtype)


def clone(self: torch.Tensor, *, memory_format: Any = None) -> torch.Tensor:
    """`tensor.clone()`: a tensor with its own storage. Eagerly it also has its own memory: a compiled step may donate the original's."""
    _require_rank(self, memory_format)
    buffer = buffer_of(self)
    if buffer.value is None and buffer.host is not None and is_whole(self, buffer) and recording.get() is None:
        return wrap_host(buffer.host.copy() if buffer.host.flags.writeable else buffer.host)  # the copy stays on the host too
    with exact_dtypes():
        value = load(self)
        if not is_tracing():
            value = copied(value)
        return _wrapped_like(value, self, memory_format)


_RANKS = {torch.channels_last: (4, "channels_last"), torch.channels_last_3d: (5, "channels_last_3d")}


def _require_rank(self: torch.Tensor, memory_format: Any) -> None:
    rank, name = _RANKS.get(memory_format, (self.dim(), ""))
    if self.dim() != rank:
        raise RuntimeError(f"required rank {rank} tensor to use {name} format")


def _wrapped_like(value: Any, source: torch.Tensor, memory_format: Any) -> torch.Tensor:
    """A new device tensor of `value`, with the strides of `source` if they are dense and `memory_format` preserves them."""
    if not _keeps_strides(source, memory_format):
        return wrap(value)
    order = sorted(range(source.dim()), key=lambda dim: -source.stride(dim))
    return wrap_strided(jnp.transpose(value, order), tuple(source.shape), source.stride())


def _keeps_strides(source: torch.Tensor, memory_format: Any) -> bool:
    preserve = memory_format is None or memory_format == torch.preserve_format
    is_strided = not source.is_contiguous() or 0 in source.shape  # an empty tensor is contiguous with any strides
    return preserve and is_strided and fills_block(tuple(source.shape), source.stride())


def to_copy(self: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """`aten._to_copy`: a new tensor on another device or in another dtype."""
    device = kwargs.get("device")
    dtype = kwargs.get("dtype") or self.dtype
    _require_rank(self, kwargs.get("memory_format"))
    if device is not None and torch.device(device).type != "jax":
        if torch.device(device).type == "cpu" and makes_host_copy(self):
            return HostCopy(to_copy(self, dtype=dtype, memory_format=kwargs.get("memory_format")))
        host = to_host(self).to(device=device, dtype=dtype)
        if not _keeps_strides(self, kwargs.get("memory_format")):
            return host
        return torch.empty_strided(self.shape, self.stride(), dtype=dtype, device=device).copy_(host)
    if self.device.type != "jax":
        return from_host(self.to(dtype), self)
    if dtype == self.dtype:
        return clone(self, memory_format=kwargs.get("memory_format"))
    with exact_dtypes():
        return _wrapped_like(_converted(load(self), to_numpy_dtype(dtype)), self, kwargs.get("memory_format"))


def copy_from(src: torch.Tensor, dst: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """`aten._copy_from`: every copy from or to the device."""
    if dst.device.type != "jax":
        if recording.get() is not None and host_answer(load(src)) is None:
            refuse_to_write("a traced tensor", dst)
        dst.copy_(retried(to_host)(src))
        return dst
    if src.device.type != "jax":
        _note_host_read(src)
        host = host_array(src.to(dst.dtype))
        buffer = buffer_of(dst)
        if is_whole(dst, buffer) and host.shape == tuple(dst.shape) and not is_tracing():
            kept = buffer.annotation
            buffer.set(None)
            buffer.host = host
            if kept is not None:
                buffer.annotate(kept)
            return dst
        if _host_counters.overwritten(dst, lambda view: view.copy_(src)):
            return dst
        with exact_dtypes():
            store(dst, jnp.broadcast_to(jnp.asarray(host), tuple(dst.shape)))
        return dst
    if _host_counters.copied(dst, src):
        return dst
    with exact_dtypes():
        value = _converted(load(src), to_numpy_dtype(dst.dtype))
        if value.shape != tuple(dst.shape):
            value = jnp.broadcast_to(value, tuple(dst.shape))
        elif not is_tracing():
            value = copied(value)
        store(dst, like_placement(value, dst))
    return dst


@retried
def copy_(self: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """`dst.copy_(src)`."""
    if self is src:
        return self
    check_in_place("copy_", self)
    check_overlap("copy_", self, (src,))
    check_expands(self, src)
    return copy_from(src, self)


@retried
def local_scalar_dense(self: torch.Tensor) -> Any:
    """`tensor.item()`: a Python number in eager code, or if a traced value follows from constants; otherwise a lifted number."""
    value = load(self)
    recorder = recording.get()
    if is_tracer(value) or recorder is not None:
        with exact_dtypes():
            known = None if recorder is None else known_value(value, recorder.is_state)
            is_integer = not jnp.issubdtype(value.dtype, jnp.inexact)
            if known is None and is_integer and recorder is not None:
                known = recorder.known_count(value)
            if known is not None:
                return np.asarray(known).reshape(()).item()
            if value.dtype == np.uint64 or jnp.issubdtype(value.dtype, jnp.complexfloating):
                raise needs_value("complex" if value.dtype != np.uint64 else "unsigned int")
            number = once("item", (value,), lambda: value.reshape(()).astype(jnp.int64 if is_integer else jnp.float64))
            return lifted(number, integral=is_integer, truth=value.dtype == np.bool_)
    _counters.count("host_reads")
    return fetched(value).reshape(()).item()


def is_nonzero(self: torch.Tensor) -> bool:
    """`bool(tensor)`, and each branch on one."""
    if self.numel() != 1:
        number = "more than one value" if self.numel() else "no values"
        raise RuntimeError(f"Boolean value of Tensor with {number} is ambiguous")
    return bool((self != 0 if self.is_complex() else self).item())


def zero_(self: torch.Tensor) -> torch.Tensor:
    """`tensor.zero_()`. It reads no value, so it also works on a gradient whose value was dropped."""
    buffer = buffer_of(self)
    if _host_counters.overwritten(self, torch.Tensor.zero_):
        return self
    with exact_dtypes():
        placed = filled_sharding(self)
        zeros = jnp.zeros(tuple(self.shape) if placed is None else buffer.stored, to_numpy_dtype(self.dtype), device=placed)
        if buffer.dropped is not None and self.shape == buffer.shape and self.is_contiguous() and not self.storage_offset():
            buffer.set(zeros)
        else:
            store(self, like_placement(zeros, self))
    return self


@retried
def equal(self: torch.Tensor, other: torch.Tensor) -> bool:
    """`torch.equal`: whether both have the same shape and values, as a Python bool."""
    if self.shape != other.shape:
        return False
    with exact_dtypes():
        one, two = load(self), load(other)
        if is_tracer(one) and is_tracer(two) and is_same_value(one, two) and _holds_no_nan(one):
            return True
        same = wrap(jnp.array_equal(one, two))
    return bool(local_scalar_dense(same))


def _holds_no_nan(value: Any) -> bool:
    """True if a traced value may be assumed to equal itself. The program checks floats for NaN, which does not equal itself."""
    if not jnp.issubdtype(value.dtype, jnp.inexact):
        return True
    recorder = recording.get()
    what = "a program assumes that torch.equal(x, y) is True for tensors computed in the same way, but x contains NaN"
    made = Check(TraceError, what, user_line(), fix="check for NaN before this line", elsewhere="CPU torch returns False there")
    return recorder is not None and recorder.expect(jnp.isnan(value).any(), made)


def as_strided_scatter(self: torch.Tensor, src: torch.Tensor, size: Any, stride: Any, storage_offset: Any = None) -> torch.Tensor:
    """A copy of `self` and its whole storage, with `src` written to the window (size, stride, offset)."""
    with exact_dtypes():
        root = wrap(buffer_of(self).get())
        offset = int(self.storage_offset())
        store(strided_alias(root, tuple(size), tuple(stride), offset if storage_offset is None else storage_offset), load(src))
    return strided_alias(root, tuple(self.shape), self.stride(), offset)


def from_host(tensor: torch.Tensor, marked: torch.Tensor | None = None) -> torch.Tensor:
    """A device tensor with the values and the recorded layout of a CPU tensor. Nothing is uploaded yet.

    A layout applies to dims in row-major order, so a marked tensor with other strides (`W.t()`, channels last) does not keep them.

    Args:
        marked: the tensor whose layout was recorded, if `tensor` was derived from it; by default `tensor`.
    """
    marked = tensor if marked is None else marked
    moved = _from_host(tensor if annotation_of(marked) is None else tensor.contiguous())
    if vars(marked):
        hand_over(marked, moved)
    return moved


def _from_host(tensor: torch.Tensor) -> torch.Tensor:
    _note_host_read(tensor)
    if tensor.is_contiguous() or not fills_block(tuple(tensor.shape), tensor.stride()):
        return wrap_host(host_array(tensor))
    order = sorted(range(tensor.dim()), key=lambda dim: -tensor.stride(dim))
    return strided_alias(wrap_host(host_array(tensor.permute(order))), tuple(tensor.shape), tensor.stride(), 0)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor with the values of a device tensor.

    Raises:
        TraceError: a traced value that the host does not know.
    """
    buffer = buffer_of(tensor)
    if buffer.value is None and buffer.host is not None and recording.get() is None:
        if tensor.numel() == 0:
            return torch.empty(tuple(tensor.shape), dtype=tensor.dtype)
        whole = host_tensor(buffer.host)
        if is_whole(tensor, buffer):
            return whole
        return whole.reshape(-1).view(tensor.dtype).as_strided(tuple(tensor.shape), tensor.stride(), tensor.storage_offset()).clone()
    value = load(tensor)
    recorder = recording.get()
    if is_tracer(value) or recorder is not None:
        known = host_answer(value)
        if known is None:
            raise needs_host_value("a copy to the host")
        return host_tensor(np.array(known))
    return copied_to_host(value)


def copied_to_host(value: jax.Array) -> torch.Tensor:
    """A CPU tensor with the values of an array."""
    _counters.count("host_reads")
    _counters.count("download_bytes", value.nbytes)
    return host_tensor(fetched(value))


def needs_host_value(what: str) -> TraceError:
    """The error for values that the host needs during a trace."""
    return TraceError(
        message(
            f"{what} needs a value that only the compiled program will have",
            *called_at(),
            fix="return the tensor from the compiled function and read it outside",
        )
    )


def host_value(tensor: torch.Tensor) -> Any:
    """The values of a CPU tensor that an op uses directly."""
    _note_host_read(tensor)
    return host_array(tensor)


def _note_host_read(tensor: torch.Tensor) -> None:
    recorder = recording.get()
    if recorder is not None:
        recorder.host_read(tensor)


def _converted(value: Any, dtype: Any) -> Any:
    """`value` in another dtype by torch's rules: complex to real drops the imaginary part, float to integer truncates."""
    if value.dtype == dtype:
        return value
    if jnp.issubdtype(value.dtype, jnp.complexfloating) and not jnp.issubdtype(dtype, jnp.complexfloating):
        value = (value != 0) if dtype == np.bool_ else jnp.real(value)
    return cast(value, dtype)


def like_placement(value: Any, dst: torch.Tensor) -> Any:
    """Eagerly, reshard a value that is written over an annotated tensor to that tensor's sharding: `a.copy_(b)` keeps a's layout.

    A parameter without annotation stays replicated, as in a compiled step. Otherwise an update by a sharded gradient would give
    a bias another layout after the first step.
    """
    buffer = buffer_of(dst)
    if is_tracer(value) or not is_whole(dst, buffer):
        return value
    if buffer.stored != buffer.shape:  # `padded` lays it out
        return value
    if buffer.annotation is not None:
        return moved(value, buffer.annotation.to_jax())
    placed = value.sharding
    if isinstance(dst, torch.nn.Parameter) and isinstance(placed, jax.sharding.NamedSharding) and not placed.is_fully_replicated:
        return moved(value, jax.sharding.NamedSharding(placed.mesh, jax.sharding.PartitionSpec()))
    return value


def filled_sharding(self: torch.Tensor) -> Any:
    """Sharding for the result of an eager operation that overwrites all of `self`, so that each device fills only its shard.

    None if `self` is not annotated, its storage is only partly overwritten, or a program is traced.
    """
    buffer = buffer_of(self)
    annotation = buffer.annotation
    if annotation is None or annotation.mesh.topology is not None or recording.get() is not None or is_tracer(buffer.value):
        return None
    return annotation.to_jax() if buffer.dropped is None and is_whole(self, buffer) else None


def fills_block(size: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """True if the elements fill one block of memory without gaps or overlaps, in some order of the dims."""
    below = 1
    for step, extent in sorted((s, n) for n, s in zip(size, stride, strict=True) if n != 1):
        if step != below and 0 not in size:
            return False
        below *= extent
    return True
