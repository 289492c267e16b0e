"""The value of a device tensor's storage, and the only code that reads or writes it.

PyTorch sees a tensor of device 'jax' as sizes, strides and an offset on a storage without memory. C++ makes aliases that lose the
tensor's Python attributes but share its storage. The value is therefore an attribute of the storage, a `Buffer`, and every alias and
view sees a write. A buffer's value is a host array that is not yet uploaded, a `jax.Array`, or a tracer while a program is traced.
`load` and `store` apply the tensor's own strides (see `_views`).

    array = load(tensor)         # jax.Array with the tensor's shape and dtype
    store(tensor, array)         # visible to every alias and view

While a program is traced, the `Recorder` in `recording` records which buffers are read and written. This module does not depend on
operators or programs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, ClassVar

import jax
import numpy as np
import torch

import mesh
from spmd.base._convert import exact_dtypes, to_numpy_dtype, to_torch_dtype
from spmd.base._errors import DroppedValueError, SpmdError, UnsupportedOpError, called_at, message
from spmd.base._jax import ArrayImpl, current_trace, is_tracer
from spmd.base._open_sizes import are_sizes_open
from spmd.base._torch import DispatchKey, DispatchKeySet, create_empty_tensor
from spmd.device._arrays import cropped, digest_of, laid_out, padded, stored_shape, upload
from spmd.device._left_values import LeftValues, forget
from spmd.device._queue import Queue
from spmd.device._trace_lock import is_of_another_thread, reread, wait_for_trace
from spmd.device._trace_recorder import Recorder
from spmd.device._views import contiguous_stride, plan_window, reinterpreted

_create = create_empty_tensor  # pyright: ignore[reportAttributeAccessIssue]
_as_strided = torch.ops.aten.as_strided.default
# Key of C++'s own view kernels. The Meta key's kernels do not check bounds against the storage's bytes, which ours does not have.
META = DispatchKeySet(DispatchKey.Meta)


recording: ContextVar[Recorder | None] = ContextVar("recording", default=None)


class _Value:
    """The first slot of a buffer. It is next to the object's header, so that calls of programs touch one cache line of each buffer."""

    __slots__ = ("value",)
    value: Any


class Buffer(_Value):
    """The value of one storage. The row-major flattening of its root array is the storage's content.

    Attributes:
        value: a jax.Array or tracer of shape `stored`, or of `shape` if it was not computed here; None while the value is on the
            host, pending or dropped.
        host: values to upload on first use, or None. A numpy array that is private to this buffer, or a read-only one that repeats
            one value without memory (`torch.empty`).
        shape: shape of the root array.
        annotation: layout from `mark_sharding`, or None.
        stored: shape of the array in storage, in which uneven dims are padded. See Note [Uneven dims].
        state_annotation: layout of this parameter's gradient and optimizer state, if it differs from the parameter's.
        digest: checksum of the uploaded values in a job of several processes, which compare it when a program reads the buffer.
        dropped, dropped_dtype: why a value that a compiled program computed was not kept, and its element type; else None.
        queue: queue of deferred operations that use this buffer; without `value` and `host` the buffer is pending on it.
        place_in_queue: position among the queue's buffers.
        left_by: entries of programs that keep the value that they left here. See Note [Values that are left].
        reads: cached reads of this buffer's value, by window.
        marks: number of changes to the annotation of any buffer.
        restrided: number of in-place changes to the sizes or strides of any tensor.
    """

    marks: ClassVar[int] = 0
    restrided: ClassVar[int] = 0

    __slots__ = (
        *("__weakref__", "_annotation", "digest", "dropped", "dropped_dtype", "host", "left_by", "place_in_queue", "queue"),
        *("reads", "shape", "state_annotation", "stored"),
    )

    def __init__(
        self,
        value: Any,
        shape: tuple[int, ...],
        host: np.ndarray[Any, Any] | None = None,
        annotation: mesh.ShardingSpec | None = None,
    ) -> None:
        self.value = value
        self.host = host
        self.shape = shape
        self._annotation = annotation
        self.stored = shape if annotation is None else stored_shape(shape, annotation.to_jax())
        self.state_annotation: mesh.ShardingSpec | None = None
        self.dropped: str | None = None
        self.dropped_dtype: np.dtype[Any] | None = None
        self.digest: int | None = None
        self.queue: Queue | None = None
        self.place_in_queue = 0
        self.left_by: list[tuple[weakref.ref[LeftValues], int]] = []
        self.reads: dict[Any, Any] = {}
        recorder = recording.get()
        if recorder is not None:
            recorder.born(self)

    @property
    def annotation(self) -> mesh.ShardingSpec | None:
        """Layout from `mark_sharding`, or None."""
        return self._annotation

    @annotation.setter
    def annotation(self, spec: mesh.ShardingSpec | None) -> None:
        if spec is not self._annotation:
            Buffer.marks += 1
        self._annotation = spec
        self.stored = self.shape if spec is None else stored_shape(self.shape, spec.to_jax())

    def get(self) -> Any:
        """The root array, without padding; uploaded if it is still on the host."""
        value = self.raw()
        return value if value.shape == self.shape else self._cropped(value)

    def _cropped(self, value: Any) -> Any:
        whole = self.reads.get("whole")
        if whole is None:
            with exact_dtypes():
                whole = cropped(value, self.shape, None if self._annotation is None else self._annotation.to_jax())
            if recording.get() is not None:  # a program contains each read once; eagerly a cached read would be a second copy in memory
                self.reads["whole"] = whole
        return whole

    def raw(self) -> Any:
        """The array in storage, with the padding of uneven dims."""
        if self.value is None:
            self._materialise()
        recorder = recording.get()
        if recorder is not None:
            recorder.read(self)
        elif is_of_another_thread(self.value):
            wait_for_trace(self)
            return self.raw()
        return self.value

    def set(self, value: Any) -> None:
        """Replace the root array by one of the same shape and dtype, padded or not."""
        recorder = recording.get()
        if recorder is not None:
            recorder.will_write(self)
        elif is_of_another_thread(self.value):
            wait_for_trace()
        if self.stored != self.shape and value is not None and value.shape != self.stored:
            assert self._annotation is not None
            with exact_dtypes():
                value = padded(value, self._annotation.to_jax())
        self.value = value
        self.host = None
        self.dropped = None
        self.digest = None
        queue, self.queue = self.queue, None
        if queue is not None:
            queue.leave(self)
        if self.left_by:
            forget(self.left_by)
        if self.reads:
            self.reads.clear()

    def drop(self, why: str) -> None:
        """Drop the value; shape and element type stay known. `why` is the text of the error that later reads raise."""
        held = self.host if self.value is None else self.value
        self.dropped_dtype = self.dropped_dtype if held is None else held.dtype
        self.value, self.host, self.dropped = None, None, why

    def reshape(self, shape: tuple[int, ...]) -> None:
        """Change the root's shape, before a value of that shape is set. The annotation is removed."""
        self.shape = shape
        self.annotation = None

    def annotate(self, spec: mesh.ShardingSpec) -> None:
        """Set the annotation, and reshard the value unless it has no memory yet. Values on a topology never have memory."""
        if self.is_waiting:
            assert self.queue is not None
            self.queue.annotate(self, spec)
        elif spec.mesh.topology is None and not is_unset(self):
            self.place(spec.to_jax())
        self.annotation = spec

    def place(self, sharding: jax.sharding.Sharding | None) -> None:
        """Upload the value shard by shard, or reshard it between devices. None: upload to jax's default device."""
        if self.value is None and self.host is not None:
            self.digest = digest_of(self.host, sharding)
            self.value, self.host = upload(self.host, sharding), None
        elif sharding is not None:
            self.value = laid_out(self.raw(), self.shape, sharding)
        if self.left_by:
            forget(self.left_by)
        self.reads.clear()

    @property
    def is_waiting(self) -> bool:
        """Whether the value is pending: deferred operations will compute it."""
        return self.value is None and self.host is None and self.queue is not None and self.dropped is None

    def settle(self) -> None:
        """Run the operations that the buffer waits for, if any. Afterwards the value is not pending."""
        if self.is_waiting:
            assert self.queue is not None
            self.queue.run()

    def _materialise(self) -> None:
        self.settle()
        if self.value is not None:
            return
        if self.host is not None:
            if self.annotation is not None and self.annotation.mesh.topology is not None:
                raise _not_here(self.shape, self.annotation)
            self.place(None if self.annotation is None else self.annotation.to_jax())
            return
        raise DroppedValueError(self.dropped or "the tensor has no value")

    @property
    def dtype(self) -> np.dtype[Any]:
        """Element type of the root."""
        held = self.host if self.value is None else self.value
        if held is None and self.is_waiting:
            assert self.queue is not None
            return self.queue.dtype_of(self)
        found = self.dropped_dtype if held is None else held.dtype
        if found is None:
            raise DroppedValueError(self.dropped or "the tensor has no value")
        return found


def _not_here(shape: tuple[int, ...], annotation: mesh.ShardingSpec) -> SpmdError:
    return SpmdError(
        message(
            f"a tensor of shape {shape} has no value: it is on topology {annotation.mesh.topology!r}",
            "programs for a topology are only compiled, not run",
            fix="compile with step.program(...), or mark the tensor over a mesh of this machine's devices",
        )
    )


def trace_setting(what: str) -> Any:
    """A setting of the program being traced (see `Lowering.told`), "platform" or "reduce_dtype"; None outside a trace."""
    recorder = recording.get()
    return None if recorder is None else getattr(recorder, what)


def once(what: Any, operands: Sequence[Any], compute: Callable[[], Any]) -> Any:
    """`compute()`, or its earlier result in this trace for the same `what` and operands (0-dim arrays and numbers).

    A hundred parameters can thus share one bias correction, which saves operations in the program and time to trace it.
    """
    recorder = recording.get()
    if recorder is None:
        return compute()
    key = (what, current_trace(), *(id(o) if isinstance(o, jax.Array) else (type(o), repr(o)) for o in operands))
    found = recorder.scalars.get(key)
    if found is None:  # keep the operands alive too: an id is only unique among live objects
        found = recorder.scalars[key] = (compute(), operands)
    return found[0]


def on_other_device(tensor: torch.Tensor) -> RuntimeError:
    """The error for a tensor of another device beside one on device 'jax'."""
    what = f"expected all tensors on device 'jax', found one of shape {tuple(tensor.shape)} on {tensor.device}"
    return RuntimeError(message(what, *called_at(), fix="move it with .to('jax')"))


def buffer_of(tensor: torch.Tensor) -> Buffer:
    """The buffer of a device tensor's storage.

    Raises:
        SpmdError: the tensor has no value.
        UnsupportedOpError: it is sparse.
        RuntimeError: it is on another device.
    """
    try:
        return tensor.untyped_storage().spmd_buffer  # pyright: ignore[reportAttributeAccessIssue]
    except NotImplementedError:
        if tensor.layout == torch.strided:
            raise
        what = f"a tensor of layout {tensor.layout} on device 'jax', which has only dense tensors"
        raise UnsupportedOpError(message(what, *called_at(), fix="x.to_dense() before the tensor is moved to 'jax'")) from None
    except AttributeError:
        if not is_device_tensor(tensor):
            raise on_other_device(tensor) from None
        raise SpmdError(
            message(
                f"a tensor of shape {tuple(tensor.shape)} on device 'jax' has no value",
                fix="create it with torch's factory functions or with .to('jax')",
            )
        ) from None


def is_device_tensor(value: Any) -> bool:
    """Whether `value` is a tensor on device 'jax'."""
    return isinstance(value, torch.Tensor) and value.device.type == "jax"


def is_whole(tensor: torch.Tensor, buffer: Buffer) -> bool:
    """Whether the tensor is the whole root: same shape and dtype, contiguous, no pending conjugation or negation."""
    held = buffer.value
    return (
        tensor.shape == buffer.shape
        and tensor.storage_offset() == 0
        and tensor.is_contiguous()
        and to_numpy_dtype(tensor.dtype) == (buffer.dtype if held is None else held.dtype)
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def load(tensor: torch.Tensor) -> Any:
    """The value of a device tensor: a jax.Array (a tracer while tracing) of its shape and dtype."""
    buffer = buffer_of(tensor)
    root, shape = buffer.value, buffer.shape
    # otherwise `get` would return `buffer.value` unchanged
    if root is None or buffer.stored is not shape or type(root) is not ArrayImpl or recording.get() is not None:
        root = buffer.get()
    is_root = tensor.shape == shape and tensor.is_contiguous() and tensor.storage_offset() == 0
    value = root if is_root and to_numpy_dtype(tensor.dtype) == root.dtype else _read_window(buffer, root, tensor)
    if tensor.is_conj():
        value = value.conj()
    return -value if tensor.is_neg() else value


def store(tensor: torch.Tensor, value: Any) -> None:
    """Write `value` (of the tensor's shape; cast to its dtype) through the tensor to its storage."""
    buffer = buffer_of(tensor)
    dtype = to_numpy_dtype(tensor.dtype)
    value = value if value.dtype == dtype else value.astype(dtype)
    if tensor.is_conj():
        value = value.conj()
    if tensor.is_neg():
        value = -value
    if is_whole(tensor, buffer):
        buffer.set(value)
        return
    root = buffer.get()
    with exact_dtypes():
        size, stride, offset = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
        if dtype == np.bool_ and root.dtype != dtype:  # as a root of bools, bytes that are not written would become 0 or 1
            value, dtype = value.astype(np.uint8), np.dtype(np.uint8)
        flat = reinterpreted(root, dtype)
        new = plan_window(flat.shape, size, stride, offset).write(flat, value)
        new = reinterpreted(new, root.dtype).reshape(buffer.shape)
        annotation = buffer.annotation if buffer.stored == buffer.shape else None
        if annotation is not None and not is_tracer(new):  # a write to a part keeps the layout
            new = jax.device_put(new, annotation.to_jax())
        buffer.set(new)


def wrap(array: Any) -> torch.Tensor:
    """A new device tensor that holds `array` (a jax.Array or tracer)."""
    shape = array.shape
    tensor = _create(shape, to_torch_dtype(array.dtype))
    tensor.untyped_storage().spmd_buffer = Buffer(array, shape)  # pyright: ignore[reportAttributeAccessIssue]
    return _with_strides(tensor) if 0 in shape else tensor


def wrap_stored(array: Any, shape: tuple[int, ...], annotation: mesh.ShardingSpec) -> torch.Tensor:
    """A new device tensor of `shape` with layout `annotation`, stored in `array`, whose uneven dims are padded."""
    tensor = _create(shape, to_torch_dtype(array.dtype))
    tensor.untyped_storage().spmd_buffer = Buffer(array, shape, annotation=annotation)  # pyright: ignore[reportAttributeAccessIssue]
    return _with_strides(tensor) if 0 in shape else tensor


def wrap_host(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """A new device tensor that takes ownership of `array`, and uploads it at the first use or `mark_sharding`."""
    tensor = _create(tuple(array.shape), to_torch_dtype(array.dtype))
    tensor.untyped_storage().spmd_buffer = Buffer(None, tuple(array.shape), host=array)  # pyright: ignore[reportAttributeAccessIssue]
    return _with_strides(tensor) if 0 in array.shape else tensor


def _with_strides(empty: torch.Tensor) -> torch.Tensor:
    """An empty tensor with torch's strides. Those that C++ gives it are 0."""
    return strided_alias(empty, tuple(empty.shape), contiguous_stride(tuple(empty.shape)), 0)


def is_unset(buffer: Buffer) -> bool:
    """Whether the value is one repeated number that has no memory yet."""
    return buffer.value is None and buffer.host is not None and not buffer.host.flags.writeable


def wrap_unset(shape: tuple[int, ...], dtype: np.dtype[Any]) -> torch.Tensor:
    """A new device tensor of zeros that takes no memory until the first use."""
    return wrap_host(np.broadcast_to(np.zeros((), dtype), shape))


def wrap_strided(array: Any, size: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
    """A new device tensor whose storage is the flattened `array`, with dense strides in any order (elements)."""
    tensor = wrap(array)
    return strided_alias(tensor, size, stride, 0)


def strided_alias(tensor: torch.Tensor, size: tuple[int, ...], stride: tuple[int, ...], offset: int) -> torch.Tensor:
    """An alias of the tensor's storage with other sizes, strides and offset (elements)."""
    return _as_strided.redispatch(META, tensor, size, stride, offset)


def _read_window(buffer: Buffer, root: Any, tensor: torch.Tensor) -> Any:
    key = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype)
    value = buffer.reads.get(key)
    if value is None:
        root = reread(buffer) if type(root) is ArrayImpl and root.is_deleted() else root
        with exact_dtypes():
            flat = reinterpreted(root, to_numpy_dtype(tensor.dtype))
            value = plan_window(flat.shape, key[0], key[1], key[2]).read(flat)
        # A program contains each read once; eagerly a cached read would be a second copy in memory. With open sizes reads are not
        # cached: windows that coincide for the sizes of this trace may differ for other sizes.
        if recording.get() is not None and not are_sizes_open():
            buffer.reads[key] = value
    return value


__all__ = [
    "META",
    "Buffer",
    "Queue",
    "Recorder",
    "buffer_of",
    "is_device_tensor",
    "contiguous_stride",
    "is_unset",
    "is_whole",
    "load",
    "on_other_device",
    "once",
    "recording",
    "store",
    "strided_alias",
    "trace_setting",
    "wrap",
    "wrap_host",
    "wrap_stored",
    "wrap_strided",
    "wrap_unset",
]
