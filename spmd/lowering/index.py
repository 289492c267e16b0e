"""Reads and writes of elements by index tensors (`x[i]`, `x[i] = v`, `index_*`, `gather`).

An index along one dim gathers whole slices of the other dims, so sharded dims keep their layout: no rule merges dims.
A position outside the tensor cannot raise without a round trip to the host: reads clip it, writes drop it. A bool mask is converted
to positions only if that is unavoidable. A write through a mask is a `where`, also in a trace.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd.base._convert import scalar_type
from spmd.base._jax import is_tracer
from spmd.lowering._registry import lower, rounded_factor, scaled, size_if_traced


def is_mask(index: Any) -> bool:
    """Whether an index (array or tensor) selects by truth value rather than by position."""
    return index is not None and str(index.dtype).removeprefix("torch.") in ("bool", "uint8")


def _has_mask(self: Any, indices: Any) -> bool:
    return any(is_mask(index) for index in indices)


def _index_tuple(indices: Any) -> tuple[Any, ...]:
    """The numpy-style index tuple for torch's list of indices. A mask becomes its positions, for which its values are needed."""
    entries: list[Any] = []
    for index in indices:
        if index is None:
            entries.append(slice(None))
        elif is_mask(index):
            entries.extend(positions(index))
        else:
            entries.append(index)
    _broadcast_shape([entry.shape for entry in entries if not isinstance(entry, slice)])
    return tuple(entries)


def _broadcast_shape(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape of index tensors together."""
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError:
        listed = ", ".join(str(list(shape)) for shape in shapes)
        raise IndexError(f"shape mismatch: indexing tensors could not be broadcast together with shapes {listed}") from None


def positions(mask: Any) -> tuple[Any, ...]:
    """The positions at which a mask is True, one array per dim. In a trace, `mask` is a numpy array if its values are known."""
    if isinstance(mask, np.ndarray):
        return np.nonzero(mask)
    return jnp.nonzero(mask, size=size_if_traced(mask, lambda: jnp.count_nonzero(mask)))


def _require_mask_shapes(self: Any, indices: Any, *_: Any, **__: Any) -> None:
    """Raise torch's error for a mask whose sizes differ from those of the dims that it selects from."""
    dim = 0
    for index in indices:
        if index is not None and is_mask(index):
            for at, size in enumerate(index.shape):
                if dim + at >= self.ndim or size != self.shape[dim + at]:
                    raise IndexError(
                        f"The shape of the mask {list(index.shape)} at index {at} does not match the shape of the indexed tensor "
                        f"{list(self.shape)} at index {dim + at}"
                    )
        dim += index.ndim if index is not None and is_mask(index) else 1


@lower("index.Tensor", "_unsafe_index.Tensor", data_dependent=_has_mask, check=_require_mask_shapes)
def index(self: Any, indices: Any) -> Any:
    return jnp.asarray(self).at[_index_tuple(indices)].get(mode="clip")  # numpy if the host knows it


def _put_needs_values(self: Any, indices: Any, values: Any, accumulate: bool = False, unsafe: bool = False) -> bool:
    return _has_mask(self, indices) and (_mask_alone(indices) is None or masked_count(self, indices, values) is not None)


def masked_count(self: Any, indices: Any, values: Any) -> int | None:
    """How many elements the mask must select if it is the only index and there is one value for each of them; else None."""
    at = _mask_alone(indices)
    extent = 1 if at is None else _along_mask(self, at, indices[at], values)[1]
    return None if extent in (1, -1) else extent  # -1: a number, or values that do not fit whatever the mask selects


def _mask_alone(indices: Any) -> int | None:
    """The dim of the mask if it is the only index, else None."""
    given = [i for i, index in enumerate(indices) if index is not None]
    return given[0] if len(given) == 1 and is_mask(indices[given[0]]) else None


def _along_mask(self: Any, at: int, mask: Any, values: Any) -> tuple[tuple[int, ...], int]:
    """Shape of `values` with the rank of `self[mask]`, and its size along the masked elements (-1 if its rank is larger)."""
    rank = self.ndim - mask.ndim + 1
    shape = (1,) * (rank - values.ndim) + tuple(values.shape)
    return shape, shape[at] if len(shape) == rank else -1


def _require_put(self: Any, indices: Any, values: Any, accumulate: bool = False, unsafe: bool = False) -> None:
    """Raise torch's errors for masks, values and dtypes of `self[indices] = values`."""
    _require_mask_shapes(self, indices)
    if _is_fill(indices, values, accumulate):
        return
    if _mask_alone(indices) is not None or not _has_mask(self, indices):  # else the rule has the values of the masks
        _require_expandable(values, selected_shape(self, indices))
    if values.dtype != self.dtype:
        raise RuntimeError(
            f"Index put requires the source and destination dtypes match, got {scalar_type(self.dtype)} for the destination and "
            f"{scalar_type(values.dtype)} for the source."
        )


def _is_fill(indices: Any, values: Any, accumulate: bool) -> bool:
    """Whether torch fills the elements of a mask with a number, which may have any dtype and rank."""
    return values.size == 1 and not accumulate and _mask_alone(indices) is not None


def _require_expandable(values: Any, shape: tuple[int | None, ...]) -> None:
    """Raise torch's error if the values cannot be broadcast to the shape that is selected."""
    dims = zip(reversed(values.shape), reversed(shape), strict=False)
    if values.ndim > len(shape) or any(n not in (1, size) for n, size in dims if size is not None):
        raise RuntimeError(shape_mismatch(values, shape))


def shape_mismatch(values: Any, shape: Sequence[int | None]) -> str:
    """Torch's error for values that do not fit the shape of what they are written to."""
    listed = ", ".join("?" if size is None else str(size) for size in shape)
    return f"shape mismatch: value tensor of shape {list(values.shape)} cannot be broadcast to indexing result of shape [{listed}]"


def selected_shape(self: Any, indices: Any) -> tuple[int | None, ...]:
    """The shape of `self[indices]`. None is the number of elements that masks select."""
    shapes: list[tuple[int, ...]] = []
    places: list[int] = []  # dims that are indexed
    dim = 0
    for index in indices:
        count = index.ndim if index is not None and is_mask(index) else 1
        if index is not None:
            places.extend(range(dim, dim + count))
            shapes.append((1,) if is_mask(index) else tuple(index.shape))
        dim += count
    if dim > self.ndim:
        raise IndexError(f"too many indices for tensor of dimension {self.ndim} (got {dim})")
    selected: tuple[int | None, ...] = _broadcast_shape(shapes)
    if selected[-1:] == (1,) and any(index is not None and is_mask(index) for index in indices):
        selected = (*selected[:-1], None)
    rest = [size for at, size in enumerate(self.shape) if at not in places]
    first = places[0] if places and places == list(range(places[0], places[-1] + 1)) else 0  # apart, they come first
    return (*rest[:first], *selected, *rest[first:])


@lower("index_put", "_unsafe_index_put", "_index_put_impl", data_dependent=_put_needs_values, check=_require_put)
def index_put(self: Any, indices: Any, values: Any, accumulate: bool = False, unsafe: bool = False) -> Any:
    values = (values.reshape(()) if _is_fill(indices, values, accumulate) else values).astype(self.dtype)
    at = _mask_alone(indices)
    if at is not None:
        return _put_masked(self, at, indices[at].astype(bool), values, accumulate)
    target = jnp.asarray(self).at[_index_tuple(indices)]
    if _has_mask(self, indices):
        _require_expandable(values, jax.eval_shape(target.get).shape)
    return combined_at(target, "add" if accumulate else "set", values)


_OF_BOOL = {"add": "max", "multiply": "min"}


def combined_at(target: Any, method: str, values: Any) -> Any:
    """`target.method(values)` for jax's `target = x.at[...]`. A sum of bools is "or", a product is "and"."""
    if target.array.dtype == jnp.bool_:
        method = _OF_BOOL.get(method, method)
    return getattr(target, method)(values, mode="drop")


def _put_masked(self: Any, at: int, mask: Any, values: Any, accumulate: bool) -> Any:
    """`self[:, ..., mask] = values` as a `where`: the n-th selected element takes the n-th value."""
    shape, extent = _along_mask(self, at, mask, values)
    given, values = values, values.reshape(shape)
    if extent == 1:
        values = values.reshape(*shape[:at], *(1,) * mask.ndim, *shape[at + 1 :])
    else:
        _require_count(self, at, mask, given, extent)
        if extent == 0:
            return self
        values = jnp.take(values, nth_selected(mask), axis=at, mode="clip")
    mask = mask.reshape((1,) * at + mask.shape + (1,) * (self.ndim - at - mask.ndim))
    return jnp.where(mask, self + values if accumulate else values, self)


def _require_count(self: Any, at: int, mask: Any, values: Any, extent: int) -> None:
    """Raise torch's error if the mask does not select as many elements as there are values. In a trace the device checks it."""
    if not is_tracer(mask) and (count := int(mask.sum())) != extent:
        raise RuntimeError(shape_mismatch(values, (*self.shape[:at], count, *self.shape[at + mask.ndim :])))


def nth_selected(mask: Any) -> Any:
    """For each element, the number of elements that the mask selects before it in row-major order; same shape as the mask."""
    return (jnp.cumsum(mask.reshape(-1)) - mask.reshape(-1)).reshape(mask.shape)


@lower("masked_select", data_dependent=True)
def masked_select(self: Any, mask: Any) -> Any:
    shape: Any = jnp.broadcast_shapes(jnp.atleast_1d(self).shape, mask.shape)
    mask = (np if isinstance(mask, np.ndarray) else jnp).broadcast_to(mask, shape)
    return jnp.broadcast_to(self, shape)[positions(mask)]


def _require_bool_mask(self: Any, mask: Any, source: Any) -> None:
    if mask.dtype != jnp.bool_:
        raise RuntimeError(f"masked_scatter_ only supports boolean masks, but got mask with dtype {mask.dtype}")


@lower("masked_scatter", check=_require_bool_mask)
def masked_scatter(self: Any, mask: Any, source: Any) -> Any:
    shape = jnp.broadcast_shapes(self.shape, mask.shape)
    if math.prod(shape) == 0 or source.size == 0:  # nothing is selected, or a check raises (see `spmd.device._refused_values`)
        return jnp.broadcast_to(self, shape)
    mask = jnp.broadcast_to(mask, shape)
    return jnp.where(mask, jnp.take(source.reshape(-1), nth_selected(mask), mode="clip"), self)


@lower("masked_scatter_backward")
def masked_scatter_backward(grad_output: Any, mask: Any, sizes: Any) -> Any:
    count = math.prod(sizes)
    mask = jnp.broadcast_to(mask, grad_output.shape)
    targets = jnp.where(mask, nth_selected(mask), count).reshape(-1)
    return jnp.zeros((count,), grad_output.dtype).at[targets].set(grad_output.reshape(-1), mode="drop").reshape(sizes)


@lower("index_select")
def index_select(self: Any, dim: int, index: Any) -> Any:
    return self if self.ndim == 0 else jnp.take(self, index.reshape(-1), axis=dim, mode="clip")


def slices(self: Any, dim: int, index: Any) -> Any:
    """`self.at[...]` at the slices of `index` along `dim`. A 0-dim tensor counts as one slice."""
    self = self.reshape(1) if self.ndim == 0 else self
    return self.at[(slice(None),) * (dim % self.ndim) + (index.reshape(-1),)]


def _as_slices(self: Any, dim: int, index: Any, source: Any) -> Any:
    """`source` with a dim for the slices of `index`, which torch lets it omit."""
    if self.ndim == 0 or (source.ndim == 0 and self.ndim == 1):
        return source.reshape(-1)
    return source if source.ndim == self.ndim else jnp.expand_dims(source, dim % self.ndim)


def require_source_shape(self: Any, dim: int, index: Any, source: Any, *, alpha: Any = 1) -> None:
    """Raise torch's error if the slices of `source` along `dim` have another shape than those of `self`."""
    if self.ndim == 0 or source.ndim == 0:
        return
    others = [shape[: dim % self.ndim] + shape[dim % self.ndim + 1 :] for shape in (self.shape, source.shape)]
    if source.ndim != self.ndim or others[0] != others[1]:
        raise RuntimeError(
            "source tensor shape must match self tensor shape, excluding the specified dimension. "
            f"Got self.shape = {list(self.shape)} source.shape = {list(source.shape)}"
        )


@lower("index_add", check=require_source_shape)
def index_add(self: Any, dim: int, index: Any, source: Any, *, alpha: Any = 1) -> Any:
    added = scaled(_as_slices(self, dim, index, source), rounded_factor(alpha, self.dtype)).astype(self.dtype)
    return combined_at(slices(self, dim, index), "add", added).reshape(self.shape)


@lower("index_copy")
def index_copy(self: Any, dim: int, index: Any, source: Any) -> Any:
    return slices(self, dim, index).set(_as_slices(self, dim, index, source), mode="drop").reshape(self.shape)


@lower("index_fill.int_Scalar", "index_fill.int_Tensor")
def index_fill(self: Any, dim: int, index: Any, value: Any) -> Any:
    return slices(self, dim, index).set(jnp.asarray(value).astype(self.dtype), mode="drop").reshape(self.shape)


@lower("gather")
def gather(self: Any, dim: int, index: Any, *, sparse_grad: bool = False) -> Any:
    if self.ndim == 0:
        return jnp.broadcast_to(self, index.shape)
    if index.size == 0:
        return jnp.zeros(index.shape, self.dtype)
    indices = index.reshape(1) if index.ndim == 0 else index
    window = tuple(slice(0, n) if i != dim % self.ndim else slice(None) for i, n in enumerate(indices.shape))
    return jnp.take_along_axis(self[window], indices, dim, mode="clip").reshape(index.shape)


@lower("take")
def take(self: Any, index: Any) -> Any:
    return self.reshape(-1).at[index].get(mode="clip") if index.size else jnp.zeros(index.shape, self.dtype)


@lower("put")
def put(self: Any, index: Any, source: Any, accumulate: bool = False) -> Any:
    target, values = self.reshape(-1).at[index.reshape(-1)], source.reshape(-1)
    return combined_at(target, "add" if accumulate else "set", values).reshape(self.shape)
