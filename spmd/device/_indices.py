"""Checks for indices out of bounds. Indices that the host knows are always checked, others only on request.

    spmd.compile(step, check_indices=True)       # or spmd.configure(check_indices=True), for eager operations too

The host knows the values that it has sent to the devices (`_uploaded`). In a program these are arguments and views of them, which
are checked before every call. The device cannot raise: an out-of-bounds read is clipped, and an out-of-bounds write is dropped. A
check on the device computes the largest and the smallest index; a failure is raised like that of other checks, at the next read.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch

from spmd.base._convert import exact_dtypes, host_array
from spmd.base._errors import message, user_line
from spmd.base._jax import is_tracing
from spmd.base._settings import in_force
from spmd.base._torch import OpOverload
from spmd.device import _checks
from spmd.device._checks import Check
from spmd.device._refused_values import INTEGERS, REFUSED, Refused, values_of_mask
from spmd.device._storage import buffer_of, is_whole, load, recording
from spmd.device._uploaded import host_values, window

_is_asked: ContextVar[bool | None] = ContextVar("whether indices that only the device knows are checked; None: as configured", default=None)


_NO_INDEX = torch.empty(0, device="cpu")


@dataclass(frozen=True)
class Bound:
    """Valid range for the elements of one index tensor.

    Attributes:
        index: the index tensor.
        size: size of the indexed dim; valid elements are less than it.
        text: CPU torch's message, in which `{}` stands for the index.
        kind: class of CPU torch's exception.
        takes_negative: whether elements from -size on are valid; otherwise from 0 on.
        ignored: a value that is always valid.
        fix: fix that the error of a check on the device suggests.
    """

    index: torch.Tensor
    size: int
    text: str
    kind: type[Exception] = IndexError
    takes_negative: bool = False
    ignored: int | None = None
    fix: str = "clamp the index, or mask invalid elements, before this line"

    def found(self, lib: Any, index: Any) -> Any:
        """An index that is out of bounds, or 0 if there is none. `_checks.ZERO` stands for an index 0 that is out of bounds.

        Args:
            lib: numpy or jax.numpy.
            index: the elements of the index tensor.
        """
        index = lib.asarray(index, np.int64)
        if self.ignored is not None:
            index = lib.where(index == self.ignored, 0, index)
        largest, smallest = index.max(), index.min()
        lowest = -self.size if self.takes_negative else 0
        found = lib.where(largest >= self.size, largest, lib.where(smallest < lowest, smallest, 0))
        return lib.where((found == 0) & (largest >= self.size), _checks.ZERO, found)


@dataclass(frozen=True)
class BeforeCall:
    """The check of an index before each call of a program, where the host knows its values.

    Attributes:
        bound: the valid range, without the index.
        at: the user's line.
    """

    bound: Bound
    at: str

    def __call__(self, values: np.ndarray[Any, Any]) -> None:
        """Raise CPU torch's error if one of the values is out of bounds."""
        _require_inside(self.bound, values, self.at)


Bounds = Callable[[dict[str, Any]], Iterator[Bound | Refused]]


def are_checked() -> bool:
    """Whether operations check indices whose values only the device knows."""
    asked = _is_asked.get()
    return in_force.check_indices if asked is None else asked


@contextmanager
def checked(is_asked: bool | None) -> Generator[None]:
    """While active, operations check indices whose values only the device knows, or do not; None: the setting of `spmd.configure`."""
    token = _is_asked.set(is_asked)
    try:
        yield
    finally:
        _is_asked.reset(token)


def check(bounds: Bounds, op: str, named: dict[str, Any], *, of_host: bool = False) -> None:
    """Check the indices of a call of `op` with the arguments `named`.

    Args:
        of_host: check only indices whose values the host knows.

    Raises:
        IndexError, RuntimeError: an index that the host knows is out of bounds; class and message are CPU torch's.
    """
    for bound in bounds(named):
        index = bound.index
        if not index.numel():
            continue
        if isinstance(bound, Refused):
            _check_values(bound, op, of_host=of_host)
            continue
        if index.dtype not in INTEGERS:  # refused where the dtypes are compared
            continue
        values = _known(index)
        if values is not None:
            _require_inside(bound, values)
            continue
        may_be_of_host = _check_each_call(bound)
        if not of_host and (may_be_of_host or are_checked()):
            _check_on_device(bound, op)


def _check_values(refused: Refused, op: str, *, of_host: bool) -> None:
    values = _known(refused.index)
    if values is not None:
        refused.require(values)
    elif not of_host:
        _check_on_device(refused, op)


def _known(index: torch.Tensor) -> Any:
    """The values of an index if they are known on the host and are not an input of a traced program; else None."""
    if index.device.type != "jax":
        return host_array(index)
    buffer = buffer_of(index)
    if buffer.value is None and buffer.host is not None:
        return _host_view(index, buffer.host)
    if is_tracing():
        return None
    return known_values(index)


def known_values(tensor: torch.Tensor) -> np.ndarray[Any, Any] | None:
    """The values of a tensor that the host has sent to the devices; None if it does not know them."""
    buffer = buffer_of(tensor)
    host = host_values(buffer)
    if host is None or is_whole(tensor, buffer):
        return host
    return window(host, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


def _require_inside(bound: Bound, values: np.ndarray[Any, Any], *details: str) -> None:
    if values.max() < bound.size and values.min() >= (-bound.size if bound.takes_negative else 0):
        return
    outside = bound.found(np, values)
    if outside:
        what = bound.text.format(_shown(outside))
        fix = "compare the index with the size before the call"
        raise bound.kind(message(what, *details, fix=fix) if details else what)


def _check_each_call(bound: Bound) -> bool:
    """Check an index that is an argument before each call. Returns whether the program has to check it (`Recorder.each_call`)."""
    recorder = recording.get()
    alone = replace(bound, index=_NO_INDEX)  # the program must not keep the argument alive
    return recorder is not None and recorder.each_call(bound.index, BeforeCall(alone, f"called at {user_line()}"))


def _host_view(tensor: torch.Tensor, host: Any) -> Any:
    """The values of a tensor whose storage is still on the host, perhaps as one repeated number."""
    if host.shape == tuple(tensor.shape) and tensor.is_contiguous():
        return host
    host = np.ascontiguousarray(host)
    strides = tuple(step * host.itemsize for step in tensor.stride())
    return np.lib.stride_tricks.as_strided(host.reshape(-1)[tensor.storage_offset() :], tuple(tensor.shape), strides)


def _check_on_device(bound: Bound | Refused, op: str) -> None:
    made = Check(bound.kind, f"{op}: {bound.text}", user_line(), fix=bound.fix)
    recorder = recording.get()
    if recorder is None and is_tracing():
        return
    with exact_dtypes():
        outside = bound.found(jnp, load(bound.index))
    if recorder is not None:
        recorder.expect(outside, made)
    else:
        _checks.raise_known()
        _checks.note(outside, [made])


def _shown(outside: Any) -> int:
    return 0 if int(outside) == _checks.ZERO else int(outside)


def _along(text: str, kind: type[Exception], takes_negative: bool = False) -> Callable[[dict[str, Any]], Iterator[Bound]]:
    """Bounds of an op with the arguments `self`, `dim` and `index`."""

    def bounds(named: dict[str, Any]) -> Iterator[Bound]:
        self, dim = named["self"], named["dim"]
        if self.dim():
            size = self.shape[dim]
            what = text.replace("{dim}", str(dim % self.dim())).replace("{size}", str(size))
            yield Bound(named["index"], size, what, kind, takes_negative)

    return bounds


def _by_list(named: dict[str, Any]) -> Iterator[Bound]:
    """Bounds of `x[i, j]`, where `indices` is a list of index tensors, None for a whole dim."""
    dim = 0
    for index in named["indices"]:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            dim += index.dim()
            continue
        if index is not None:
            size = named["self"].shape[dim]
            yield Bound(index, size, f"index {{}} is out of bounds for dimension {dim} with size {size}", takes_negative=True)
        dim += 1


def _by_list_for_values(named: dict[str, Any]) -> Iterator[Bound | Refused]:
    """The same for `x[i, j] = values`; in a trace the program counts what a mask selects. Eager code has its values anyway."""
    yield from _by_list(named)
    if is_tracing():
        yield from values_of_mask(named)


def _of_rows(named: dict[str, Any]) -> Iterator[Bound]:
    yield Bound(named["indices"], named["weight"].shape[0], "index out of range in self: {}")


def _of_elements(named: dict[str, Any]) -> Iterator[Bound]:
    size = named["self"].numel()
    yield Bound(named["index"], size, f"out of range: tried to access index {{}} on a tensor of {size} elements.", takes_negative=True)


def _of_classes(named: dict[str, Any]) -> Iterator[Bound]:
    self, target = named["self"], named["target"]
    if self.dim() and not target.is_floating_point():
        yield Bound(target, self.shape[1 if self.dim() > 1 else 0], "Target {} is out of bounds.", ignored=named.get("ignore_index", -100))


def _of_bags(named: dict[str, Any]) -> Iterator[Bound]:
    rows, offsets, count = named["weight"].shape[0], named["offsets"], named["indices"].numel()
    yield Bound(named["indices"], rows, f"an index of input takes value {{}} which is not in the valid range [0, {rows})", RuntimeError)
    first = "offsets[0] has to be 0, i.e., the first sequence in the mini-batch has to start from position 0. However, got {}"
    last = f"offsets[-1] can not be greater than input's length {count} but got offsets[-1] of {{}}"
    yield Bound(offsets[:1], 1, first, RuntimeError)
    yield Bound(offsets[-1:], count + 1, last, RuntimeError)


def _of_margins(text: str, ignored: int | None = None) -> Callable[[dict[str, Any]], Iterator[Bound]]:
    def bounds(named: dict[str, Any]) -> Iterator[Bound]:
        self = named["self"]
        yield Bound(named["target"], self.shape[-1] if self.dim() else 1, text, RuntimeError, ignored=ignored)

    return bounds


def _of_sums(named: dict[str, Any]) -> Iterator[Bound]:
    """Bounds of `index_add`, which the CPU computes by `scatter_add` if the index can be expanded to the shape of `source`."""
    self, index = named["self"], named["index"]
    is_expanded = index.dtype == torch.int64 and self.dim() > 1 and (self.dim() == 2 or named["dim"] % self.dim() == 0)
    yield from (_along(_GATHERED, RuntimeError) if is_expanded else _along(_SELECTED, IndexError))(named)


_GATHERED = "index {} is out of bounds for dimension {dim} with size {size}"
_SELECTED = "index out of range in self: {}"
BOUNDS: dict[str, Bounds] = {
    **dict.fromkeys(("index", "_unsafe_index"), _by_list),
    **dict.fromkeys(("index_put", "_unsafe_index_put", "_index_put_impl"), _by_list_for_values),
    "embedding": _of_rows,
    **dict.fromkeys(("_embedding_bag", "_embedding_bag_forward_only"), _of_bags),
    "multi_margin_loss": _of_margins("target out of range: {}"),
    "multilabel_margin_loss_forward": _of_margins("argument #2 'target' is out of range: {}", ignored=-1),
    **dict.fromkeys(("gather", "scatter", "scatter_add", "scatter_reduce"), _along(_GATHERED, RuntimeError)),
    "index_select": _along(_SELECTED, IndexError),
    "index_fill": _along(_SELECTED, IndexError, takes_negative=True),
    "index_copy": _along(f"index_copy_(): {_GATHERED}", IndexError),
    "index_add": _of_sums,
    "index_reduce": _along(_SELECTED, IndexError),
    **dict.fromkeys(("take", "put"), _of_elements),
    **dict.fromkeys(("cross_entropy_loss", "nll_loss_nd", "nll_loss", "nll_loss2d", "nll_loss_forward", "nll_loss2d_forward"), _of_classes),
}


def bounds_of(op: OpOverload) -> Bounds | None:
    """The requirements of an op on the values of its arguments; None if there are none."""
    name = op.name().partition("::")[2]
    return REFUSED.get(name) or BOUNDS.get(name.partition(".")[0])


def checked_composite(op: OpOverload) -> Callable[..., Any]:
    """A kernel of a composite that checks values, which torch's own does only on the CPU, and then decomposes."""
    bounds, names = bounds_of(op), [argument.name for argument in op._schema.arguments]
    assert bounds is not None

    def kernel(*args: Any, **kwargs: Any) -> Any:
        named = {**dict(zip(names, args, strict=False)), **kwargs}
        if not any(type(value).__name__ in ("FakeTensor", "FunctionalTensor") for value in named.values()):
            check(bounds, op._schema.name.partition("::")[2], named)
        return op.decompose(*args, **kwargs)

    return kernel


__all__ = ["BOUNDS", "Bound", "are_checked", "bounds_of", "check", "checked", "checked_composite"]
