"""Padding rules of convolutions and pooling."""

from __future__ import annotations

from typing import Any

from spmd.program.sizes._evaluate import Equation, Evaluation, rule
from spmd.program.sizes._formulas import Inexact
from spmd.program.sizes._padded import Dim, Dims, Padded, Room
from spmd.program.sizes._rules_elements import highest, lowest
from spmd.program.sizes._window_extents import WINDOWED, window_padding


def _single(room: Room, value: Padded, dims: Any) -> Padded:
    for d in dims:
        value = room.relaid(value, d, (room.product(value.dims[d]),))
    return value


def _require_fixed_start(eqn: Equation, padding: list[Any]) -> None:
    """Require the same window padding before the first element for all sizes. Elements after the last one are neutral anyway.

    Raises:
        Inexact: it depends on a size.
    """
    if any(len({low for low, _ in column}) > 1 for column in padding):
        raise Inexact(f"the padding of {eqn.name} before the first element depends on a size")


@rule("conv_general_dilated")
def convolution(ev: Evaluation, eqn: Equation, operands: list[Padded]) -> list[Padded]:
    """Replace padding in summed dims by 0, like a convolution's own padding."""
    room, (value, kernel) = ev.room, operands
    numbers = eqn.fixed("dimension_numbers")
    (batch, feature, *space), (out, own, *extents) = numbers.lhs_spec, numbers.rhs_spec
    _require_fixed_start(eqn, list(zip(*eqn.param("padding"), strict=True)))
    groups, batch_groups = eqn.param("feature_group_count"), eqn.param("batch_group_count")
    has_groups = set(groups) != {1} or set(batch_groups) != {1}
    if has_groups and any(room.is_padded(v.dims[d]) for v, d in ((value, feature), (kernel, own), (kernel, out))):
        raise Inexact("the convolution is grouped, and its number of features varies")
    if set(batch_groups) != {1} and room.is_padded(value.dims[batch]):
        raise Inexact("the convolution is grouped by batch, and its batch size varies")
    value, kernel = _single(room, value, space), _single(room, kernel, extents)
    kernel = room.relaid(kernel, own, value.dims[feature]) if not has_groups else kernel
    arrays = room.masked(value, [feature, *space], 0), room.masked(kernel, [own, *extents], 0)
    (array,) = eqn.bind(*arrays, padding=window_padding(eqn.each, room.size))
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
    """Require that the padded shape is the one from the formulas, so that real elements have the same positions in it.

    Raises:
        Inexact: it is not.
    """
    if array.shape != room.shape(dims):
        raise Inexact("an extent of the padded result differs from its formula")


_NEUTRAL: dict[str, Any] = {
    "reduce_window_sum": [lambda dtype: 0],
    "reduce_window_max": [lowest],
    "reduce_window_min": [highest],
    "reduce_window": None,  # neutral is the initial value, as for a window's own padding
    "select_and_scatter_add": [lambda dtype: 0, lowest],  # the scattered array, and the compared one
    "select_and_gather_add": [lambda dtype: 0, lowest],
}
_COMPARED = {"ge": lowest, "le": highest}


@rule(*_NEUTRAL)
def pooling(ev: Evaluation, eqn: Equation, operands: list[Padded]) -> list[Padded]:
    """Replace padding inside windows by the neutral element."""
    room, windows = ev.room, eqn.columns("window_dimensions")
    strides, padding = eqn.columns("window_strides"), list(zip(*eqn.param("padding"), strict=True))
    given = [v for v in operands if v.dims]
    alone = [d for d, w in enumerate(windows) if set(w) == {1} and set(strides[d]) == {1} and set(padding[d]) == {(0, 0)}]
    inside = [d for d in range(len(windows)) if d not in alone and any(room.is_padded(v.dims[d]) for v in given)]
    if any(set(w) != {w[0]} for w in windows):
        raise Inexact(f"the window of {eqn.name} has a size that varies")
    _require_fixed_start(eqn, padding)
    given = [_single(room, v, inside) for v in given]
    for d in alone:
        given = [given[0], *(room.relaid(v, d, given[0].dims[d]) for v in given[1:])]
    starts = [v.array for v in operands if not v.dims]
    pairs = zip(given, _neutrals(eqn, given, starts), strict=True)
    masked = [room.masked(v, inside, neutral) if inside else v.array for v, neutral in pairs]
    changed = {"padding": window_padding(eqn.each, room.size)} if eqn.name in WINDOWED else {}
    found = list[Padded]()
    for number, array in enumerate(eqn.bind(*masked, *starts, **changed)):
        plain: list[Dim] = [(room.product(dim),) for dim in room.plain(eqn.shapes(number))]
        dims = tuple(given[-1].dims[d] if d in alone else dim for d, dim in enumerate(plain))
        _require_shape(room, array, dims)
        found.append(Padded(array, dims))
    return found


def _neutrals(eqn: Equation, given: list[Padded], starts: list[Any]) -> list[Any]:
    """Neutral element of each array."""
    if eqn.name == "reduce_window":
        return starts
    kinds = list(_NEUTRAL[eqn.name])
    if eqn.name.startswith("select_"):
        kinds[1] = _COMPARED[eqn.fixed("select_prim").name]
    return [kind(v.array.dtype) for kind, v in zip(kinds, given, strict=True)]


__all__ = ["convolution", "pooling"]
