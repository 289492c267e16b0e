"""Padding rules of primitives that address elements by position: slices, concatenations, gathers, scatters."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from spmd.program.sizes._evaluate import Equation, Evaluation, rule
from spmd.program.sizes._formulas import Inexact, Values
from spmd.program.sizes._padded import Dim, Padded, Room


def _minus(one: Any, other: Any) -> Values:
    return tuple(a - b for a, b in zip(one, other, strict=True))


@rule("slice")
def part(ev: Evaluation, eqn: Equation, operands: list[Padded]) -> list[Padded]:
    """Slice of the padded array that begins at the start index of the current call."""
    room, value, array = ev.room, operands[0], operands[0].array
    starts, limits = eqn.columns("start_indices"), eqn.columns("limit_indices")
    strides = eqn.columns("strides") if eqn.first.params["strides"] is not None else [None] * len(starts)
    outs, dims = [tuple(c) for c in zip(*eqn.shapes(), strict=True)], list[Dim]()
    for d, (start, limit, stride, out) in enumerate(zip(starts, limits, strides, outs, strict=True)):
        dim, extent = value.dims[d], room.product(value.dims[d])
        if set(start) == {0} and limit == extent and (stride is None or set(stride) == {1}):
            dims.append(dim)
            continue
        if len(dim) > 1:
            value = Padded(array, (*dims, *value.dims[d:]))
            value = room.relaid(value, d, (extent,))
            array = value.array
        room.need(start, 0)
        room.need(_minus(extent, limit), 0)
        if stride is not None and set(stride) != {1}:
            array = _strided(room, array, d, extent, start, limit, stride, out)
        else:
            array = room.window(array, d, start, out)
        dims.append((out,))
    return [Padded(array, tuple(dims))]


def _strided(room: Room, array: Any, dim: int, extent: Values, start: Values, limit: Values, stride: Any, out: Values) -> Any:
    if len(set(stride)) > 1:
        raise Inexact("the step of the slice depends on a size")
    places = jnp.asarray(room.real(start), np.int64) + jnp.arange(room.size(out), dtype=np.int64) * stride[0]
    return jnp.take(array, places, axis=dim, mode="clip")


@rule("split")
def split(ev: Evaluation, eqn: Equation, operands: list[Padded]) -> list[Padded]:
    """Consecutive parts along a dim."""
    value, axis, found = operands[0], eqn.fixed("axis"), list[Padded]()
    extent = ev.room.product(value.dims[axis])
    sizes: list[Values] = list(zip(*eqn.param("sizes"), strict=True))
    if not any(len(set(size)) > 1 for size in sizes):
        arrays = eqn.bind(value.array)
        return [Padded(a, (*value.dims[:axis], (s,), *value.dims[axis + 1 :])) for a, s in zip(arrays, sizes, strict=True)]
    value = ev.room.relaid(value, axis, (extent,))
    start: Values = (0,) * len(extent)
    for size in sizes:
        own = ev.room.window(value.array, axis, start, size)
        found.append(Padded(own, (*value.dims[:axis], (size,), *value.dims[axis + 1 :])))
        start = tuple(a + b for a, b in zip(start, size, strict=True))
    return found


@rule("concatenate")
def concatenate(ev: Evaluation, eqn: Equation, operands: list[Padded]) -> list[Padded]:
    """Write each part after the real elements of the previous parts, over their padding."""
    room, along = ev.room, eqn.fixed("dimension")
    first = operands[0].dims
    operands = [room.like(v, tuple(v.dims[d] if d == along else dim for d, dim in enumerate(first))) for v in operands]
    if not any(room.is_padded(v.dims[along]) for v in operands):
        beside = (sum_of(operands, along, room),)
        return [Padded(eqn.bind(*(v.array for v in operands))[0], (*first[:along], beside, *first[along + 1 :]))]
    operands = [room.relaid(v, along, (room.product(v.dims[along]),)) for v in operands]
    extent = sum_of(operands, along, room)
    shape = tuple(sum(v.array.shape[d] for v in operands) if d == along else n for d, n in enumerate(operands[0].array.shape))
    array, start = jnp.zeros(shape, operands[0].array.dtype), (0,) * len(extent)
    for value in operands:
        array = lax.dynamic_update_slice_in_dim(array, value.array, jnp.asarray(room.real(start), np.int64), along)
        start = tuple(a + b for a, b in zip(start, room.product(value.dims[along]), strict=True))
    array = lax.slice_in_dim(array, 0, room.size(extent), axis=along)
    return [Padded(array, (*first[:along], (extent,), *first[along + 1 :]))]


def sum_of(operands: list[Padded], along: int, room: Room) -> Values:
    """Extent of the concatenated operands at each point."""
    return tuple(map(sum, zip(*(room.product(v.dims[along]) for v in operands), strict=True)))


@rule("pad")
def pad(ev: Evaluation, eqn: Equation, operands: list[Padded]) -> list[Padded]:
    """Pad after the last real element."""
    room, (value, filling) = ev.room, operands
    configs, outs = list(zip(*eqn.param("padding_config"), strict=True)), [tuple(c) for c in zip(*eqn.shapes(), strict=True)]
    array, dims = value.array, list[Dim]()
    for d, (config, out) in enumerate(zip(configs, outs, strict=True)):
        dim = value.dims[d]
        if not room.is_padded(dim) and out == room.product(dim) and all(c == (0, 0, 0) for c in config):
            dims.append(dim)
            continue
        if all(c == (0, 0, 0) for c in config):
            dims.append(dim)
            continue
        current = room.relaid(Padded(array, (*dims, *value.dims[d:])), d, (room.product(dim),))
        mask = room.mask(current, [d])
        array = current.array if mask is None else jnp.where(mask, current.array, filling.array)
        low, high, inner = (tuple(c[i] for c in config) for i in range(3))
        if len(set(inner)) > 1:
            raise Inexact("the interior padding depends on a size")
        if len(set(low)) > 1:
            array = _padded_low(room, array, filling.array, d, low, inner[0], out)
        else:
            padding = [(0, 0, 0)] * array.ndim
            own = array.shape[d] + max(array.shape[d] - 1, 0) * inner[0] + low[0]
            padding[d] = (low[0], room.size(out) - own, inner[0])
            array = lax.pad(array, filling.array, padding)
        room.need(tuple(n + min(h, 0) for n, h in zip(room.product(dim), high, strict=True)), 0)
        room.need(tuple(n + min(p, 0) for n, p in zip(room.product(dim), low, strict=True)), 0)
        dims.append((out,))
    return [Padded(array, tuple(dims))]


def _padded_low(room: Room, array: Any, filling: Any, dim: int, low: Values, inner: int, out: Values) -> Any:
    """Pad before the first element by the amount of the current call, as a slice of an array with the largest amount."""
    if min(low) < 0:
        raise Inexact("the number of elements cut at the beginning depends on a size")
    most = room.size(low)
    padding = [(0, 0, 0)] * array.ndim
    padding[dim] = (most, most + room.size(out), inner)
    wide = lax.pad(array, filling, padding)
    return lax.dynamic_slice_in_dim(wide, most - jnp.asarray(room.real(low), np.int64), room.size(out), dim)


@rule("dynamic_slice")
def window(ev: Evaluation, eqn: Equation, operands: list[Padded]) -> list[Padded]:
    """Slice whose start is clamped to the real elements."""
    room, value, starts = ev.room, operands[0], [v.array for v in operands[1:]]
    dims, sizes = list[Dim](), eqn.columns("slice_sizes")
    for d, size in enumerate(sizes):
        extent = room.product(value.dims[d])
        if size == extent:
            starts[d] = jnp.zeros_like(starts[d])
            dims.append(value.dims[d])
            continue
        value = room.relaid(value, d, (extent,))
        most = jnp.asarray(room.real(_minus(extent, size))).astype(starts[d].dtype)
        room.need(_minus(extent, size), 0)
        starts[d] = jnp.clip(starts[d], 0, most)
        dims.append((size,))
    shape = room.shape(tuple(dims))
    lacks = [n if len(set(size)) > 1 and dim == (size,) else 0 for n, size, dim in zip(shape, sizes, dims, strict=True)]
    array = lax.pad(value.array, jnp.zeros((), value.array.dtype), [(0, lack, 0) for lack in lacks])
    return [Padded(lax.dynamic_slice(array, starts, shape), tuple(dims))]


@rule("dynamic_update_slice")
def write_window(ev: Evaluation, eqn: Equation, operands: list[Padded]) -> list[Padded]:
    """Write a window whose start is clamped to the real elements. Only the real elements of the update are written."""
    room, value, update, starts = ev.room, operands[0], operands[1], [v.array for v in operands[2:]]
    varying = list[int]()
    for d in range(len(value.dims)):
        extent, own = room.product(value.dims[d]), room.product(update.dims[d])
        if own == extent:
            update = room.relaid(update, d, value.dims[d])
            starts[d] = jnp.zeros_like(starts[d])
            continue
        update, value = room.relaid(update, d, (own,)), room.relaid(value, d, (extent,))
        room.need(_minus(extent, own), 0)
        starts[d] = jnp.clip(starts[d], 0, jnp.asarray(room.real(_minus(extent, own))).astype(starts[d].dtype))
        if len(set(own)) > 1:
            varying.append(d)
    array = update.array
    if not varying:
        return [Padded(lax.dynamic_update_slice(value.array, array, starts), value.dims)]
    inside: Any = None
    for d, start in enumerate(starts):
        places = jnp.arange(value.array.shape[d], dtype=np.int64) - start.astype(np.int64)
        own = jnp.asarray(room.real(room.product(update.dims[d])), np.int64)
        mark = lax.broadcast_in_dim((places >= 0) & (places < own), value.array.shape, (d,))
        if room.product(update.dims[d]) != room.product(value.dims[d]):
            inside = mark if inside is None else inside & mark
            array = jnp.take(array, places, axis=d, mode="clip")
    return [Padded(jnp.where(inside, array, value.array), value.dims)]


def _within(room: Room, index: Any, column: int, dim: Dim, size: Values, mode: Any) -> Any:
    """One column of an index array as positions in the padded array. Out-of-bounds indices stay so for FILL_OR_DROP, else are clamped."""
    own = index[..., column].astype(np.int64)
    most = jnp.asarray(room.real(_minus(room.product(dim), size)), np.int64)
    outside = (own < 0) | (own > most)
    own = jnp.clip(own, 0, most)
    if len(dim) > 1:
        own = room.position(own, dim)
    if mode.name == "FILL_OR_DROP":
        own = jnp.where(outside, room.shape((dim,))[0], own)
    return own


@rule("gather")
def gather(ev: Evaluation, eqn: Equation, operands: list[Padded]) -> list[Padded]:
    """Gather by indices into the unpadded array; out-of-bounds indices follow the mode."""
    room, (value, index) = ev.room, operands
    numbers, mode, sizes = eqn.fixed("dimension_numbers"), eqn.fixed("mode"), eqn.columns("slice_sizes")
    if room.is_padded(index.dims[-1]):
        raise Inexact("the length of the index vectors depends on a size")
    for d, b in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True):
        index = room.relaid(index, b, value.dims[d])
    hidden, windows = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}, list[Dim]()
    for d, size in enumerate(sizes):
        extent = room.product(value.dims[d])
        if d in hidden:
            continue
        if size == extent:
            windows.append(value.dims[d])
        elif len(set(size)) > 1:
            raise Inexact("the size of the gathered slices varies, at indices that the host does not know")
        else:
            value = room.relaid(value, d, (extent,))
            room.need(_minus(extent, size), 0)
            windows.append((size,))
    columns = [_within(room, index.array, c, value.dims[d], sizes[d], mode) for c, d in enumerate(numbers.start_index_map)]
    taken = tuple(n if size == room.product(dim) else size[0] for n, size, dim in zip(value.array.shape, sizes, value.dims, strict=True))
    places = _stacked(columns, index.array)
    array = eqn.bind(value.array, places, slice_sizes=taken, indices_are_sorted=False, unique_indices=False)[0]
    offsets, rest = iter(windows), iter(index.dims[:-1])
    dims = tuple(next(offsets) if d in numbers.offset_dims else next(rest) for d in range(array.ndim))
    return [Padded(array, dims)]


def _stacked(columns: list[Any], like: Any) -> Any:
    return jnp.stack(columns, axis=-1) if columns else like.astype(np.int64)


@rule("scatter", *(f"scatter{sign}{name}" for sign in "-_" for name in ("add", "sub", "mul", "min", "max")))
def scatter(ev: Evaluation, eqn: Equation, operands: list[Padded]) -> list[Padded]:
    """Scatter the real updates. Padded updates get out-of-bounds indices, so they are dropped."""
    room, (value, index, update) = ev.room, operands
    numbers, mode = eqn.fixed("dimension_numbers"), eqn.fixed("mode")
    if room.is_padded(index.dims[-1]):
        raise Inexact("the length of the index vectors depends on a size")
    for d, b in zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True):
        index = room.relaid(index, b, value.dims[d])
    hidden = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    kept = [d for d in range(len(value.dims)) if d not in hidden]
    sizes: list[Values] = [(1,) * len(room.points.at)] * len(value.dims)
    for d, w in zip(kept, numbers.update_window_dims, strict=True):
        sizes[d] = room.product(update.dims[w])
        if sizes[d] == room.product(value.dims[d]):
            update = room.relaid(update, w, value.dims[d])
        elif len(set(sizes[d])) > 1:
            raise Inexact("the size of the scattered slices varies")
        else:
            value = room.relaid(value, d, (room.product(value.dims[d]),))
    outer = [d for d in range(len(update.dims)) if d not in numbers.update_window_dims]
    for d, dim in zip(outer, index.dims[:-1], strict=True):
        update = room.relaid(update, d, dim)
    columns = [_within(room, index.array, c, value.dims[d], sizes[d], mode) for c, d in enumerate(numbers.scatter_dims_to_operand_dims)]
    batch = range(len(index.dims) - 1)
    if not columns and any(room.is_padded(index.dims[d]) for d in batch):
        raise Inexact("the number of updates to one position varies")
    mask = room.mask(index, batch)
    if mask is not None:
        first = numbers.scatter_dims_to_operand_dims[0]
        columns[0] = jnp.where(mask[..., 0], columns[0], value.array.shape[first])
    places = _stacked(columns, index.array)
    array = eqn.bind(
        *(value.array, places, update.array),
        indices_are_sorted=False,
        unique_indices=False,
        mode=lax.GatherScatterMode.FILL_OR_DROP,
    )[0]
    return [Padded(array, value.dims)]
