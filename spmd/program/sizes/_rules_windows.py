"""What convolutions and pooling make of padding."""

from __future__ import annotations

from typing import Any

from spmd.program.sizes._evaluate import Equation, Evaluation, rule
from spmd.program.sizes._formulas import Inexact
from spmd.program.sizes._padded import Dim, Dims, Padded, Room
from spmd.program.sizes._padding_rules import highest, lowest


def _single(room: Room, value: Padded, dims: Any) -> Padded:
    for d in dims:
        value = room.relaid(value, d, (room.product(value.dims[d]),))
    return value


def _require_fixed_start(eqn: Equation, padding: list[Any]) -> None:
    """Padding before the first element must be the same for all sizes: what is behind the last one counts as zeros anyway."""
    if any(len({low for low, _ in column}) > 1 for column in padding):
        raise Inexact(f"{eqn.name} that begins at a place that depends on a size")


@rule("conv_general_dilated")
def convolution(ev: Evaluation, eqn: Equation, operands: list[Padded]) -> list[Padded]:
    """Padding in what is summed counts as 0, as a convolution's own does."""
    room, (value, kernel) = ev.room, operands
    numbers = eqn.fixed("dimension_numbers")
    (batch, feature, *space), (out, own, *extents) = numbers.lhs_spec, numbers.rhs_spec
    _require_fixed_start(eqn, list(zip(*eqn.param("padding"), strict=True)))
    groups, batch_groups = eqn.param("feature_group_count"), eqn.param("batch_group_count")
    has_groups = set(groups) != {1} or set(batch_groups) != {1}
    if has_groups and any(room.is_padded(v.dims[d]) for v, d in ((value, feature), (kernel, own), (kernel, out))):
        raise Inexact("groups of a convolution whose features vary in number")
    if set(batch_groups) != {1} and room.is_padded(value.dims[batch]):
        raise Inexact("groups of a convolution over a batch that varies")
    value, kernel = _single(room, value, space), _single(room, kernel, extents)
    kernel = room.relaid(kernel, own, value.dims[feature]) if not has_groups else kernel
    arrays = room.masked(value, [feature, *space], 0), room.masked(kernel, [own, *extents], 0)
    (array,) = eqn.bind(*arrays)
    dims: list[Any] = list(room.plain(eqn.shapes()))
    dims = [(room.product(dim),) for dim in dims]
    if set(batch_groups) == {1}:
        dims[numbers.out_spec[0]] = value.dims[batch]
    if not has_groups:
        dims[numbers.out_spec[1]] = kernel.dims[out]
    found = tuple(dims)
    _require_shape(room, array, found)
    return [Padded(array, found)]


def _require_shape(room: Room, array: Any, dims: Dims) -> None:
    """The padded program's own extents are those that the formulas give, so that a real place is the same place in it."""
    if array.shape != room.shape(dims):
        raise Inexact("an extent that is no multiple of the size")


_NEUTRAL: dict[str, Any] = {
    "reduce_window_sum": lambda dtype: 0,
    "reduce_window_max": lowest,
    "reduce_window_min": highest,
    "select_and_scatter_add": None,
    "select_and_gather_add": None,
    "reduce_window": None,
}


@rule(*_NEUTRAL)
def pooling(ev: Evaluation, eqn: Equation, operands: list[Padded]) -> list[Padded]:
    """Padding inside a window counts as the neutral element."""
    room, windows = ev.room, eqn.columns("window_dimensions")
    strides, padding = eqn.columns("window_strides"), list(zip(*eqn.param("padding"), strict=True))
    arrays_in = [v for v in operands if v.dims]
    alone = [d for d, w in enumerate(windows) if set(w) == {1} and set(strides[d]) == {1} and set(padding[d]) == {(0, 0)}]
    inside = [d for d in range(len(windows)) if d not in alone and any(room.is_padded(v.dims[d]) for v in arrays_in)]
    neutral = _NEUTRAL[eqn.name]
    if inside and neutral is None:
        raise Inexact(f"{eqn.name} along a dim whose size varies")
    if any(set(w) != {w[0]} for w in windows):
        raise Inexact(f"{eqn.name} over a window whose size varies")
    _require_fixed_start(eqn, padding)
    arrays_in = [_single(room, v, inside) for v in arrays_in]
    for d in alone:
        arrays_in = [arrays_in[0], *(room.relaid(v, d, arrays_in[0].dims[d]) for v in arrays_in[1:])]
    masked = [room.masked(v, inside, neutral(v.array.dtype)) if inside else v.array for v in arrays_in]
    rest = [v.array for v in operands if not v.dims]
    found = list[Padded]()
    for number, array in enumerate(eqn.bind(*masked, *rest)):
        plain: list[Dim] = [(room.product(dim),) for dim in room.plain(eqn.shapes(number))]
        dims = tuple(arrays_in[-1].dims[d] if d in alone else dim for d, dim in enumerate(plain))
        _require_shape(room, array, dims)
        found.append(Padded(array, dims))
    return found


__all__ = ["convolution", "pooling"]
