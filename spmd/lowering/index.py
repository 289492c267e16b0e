"""Looking elements up by index tensors, and writing through them (`x[i]`, `x[i] = v`, `index_*`, `gather`).

An index along one dim gathers whole slices of the others, so dims that are sharded keep their layout: no rule merges dims.
A position outside the tensor cannot raise without a host round trip: reads clip it, writes drop it. A bool mask becomes
positions only where that is unavoidable; writing through a mask is a `where`, in a trace too.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from spmd.base._jax import is_tracer
from spmd.lowering._registry import lower, scaled


def is_mask(index: Any) -> bool:
    """True if an index (array or tensor) selects by truth rather than by position."""
    return index is not None and str(index.dtype).removeprefix("torch.") in ("bool", "uint8")


def _has_mask(self: Any, indices: Any) -> bool:
    return any(is_mask(index) for index in indices)


def _places(indices: Any) -> tuple[Any, ...]:
    """The numpy-style index tuple of torch's list; a mask becomes its positions, for which its values are needed."""
    places: list[Any] = []
    for index in indices:
        if index is None:
            places.append(slice(None))
        elif is_mask(index):
            places.extend(positions(index))
        else:
            places.append(index)
    shapes = [place.shape for place in places if not isinstance(place, slice)]
    try:
        np.broadcast_shapes(*shapes)
    except ValueError:
        listed = ", ".join(str(list(shape)) for shape in shapes)
        raise IndexError(f"shape mismatch: indexing tensors could not be broadcast together with shapes {listed}") from None
    return tuple(places)


def positions(mask: Any) -> tuple[Any, ...]:
    """Where a mask is true, one array per dim. In a trace it is a numpy array if its values are known."""
    return np.nonzero(mask) if isinstance(mask, np.ndarray) else jnp.nonzero(mask)


def _masks_fit(self: Any, indices: Any, *_: Any, **__: Any) -> None:
    """A mask has the sizes of the dims that it selects from."""
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


@lower("index.Tensor", "_unsafe_index.Tensor", data_dependent=_has_mask, check=_masks_fit)
def index(self: Any, indices: Any) -> Any:
    return self.at[_places(indices)].get(mode="clip")


def _put_needs_values(self: Any, indices: Any, values: Any, accumulate: bool = False, unsafe: bool = False) -> bool:
    if not _has_mask(self, indices):
        return False
    alone = _mask_alone(indices)
    return alone is None or _along_mask(self, alone, indices[alone], values)[1] != 1


def _mask_alone(indices: Any) -> int | None:
    """Where the mask stands if it is the only index."""
    given = [i for i, index in enumerate(indices) if index is not None]
    return given[0] if len(given) == 1 and is_mask(indices[given[0]]) else None


def _along_mask(self: Any, at: int, mask: Any, values: Any) -> tuple[tuple[int, ...], int]:
    """Shape of `values` with the rank of `self[mask]`, and its extent along the masked elements."""
    rank = self.ndim - mask.ndim + 1
    shape = (1,) * (rank - values.ndim) + tuple(values.shape)
    return shape, shape[at] if len(shape) == rank else -1


@lower("index_put", "_unsafe_index_put", "_index_put_impl", data_dependent=_put_needs_values, check=_masks_fit)
def index_put(self: Any, indices: Any, values: Any, accumulate: bool = False, unsafe: bool = False) -> Any:
    values = values.astype(self.dtype)
    at = _mask_alone(indices)
    if at is not None and values.ndim <= self.ndim - indices[at].ndim + 1:
        return _put_masked(self, at, indices[at].astype(bool), values, accumulate)
    return combined_at(self.at[_places(indices)], "add" if accumulate else "set", values)


_OF_BOOL = {"add": "max", "multiply": "min"}


def combined_at(target: Any, method: str, values: Any) -> Any:
    """`target.method(values)` for a `target` of jax's `.at[...]`; a sum of bools is "or", a product "and"."""
    if target.array.dtype == jnp.bool_:
        method = _OF_BOOL.get(method, method)
    return getattr(target, method)(values, mode="drop")


def _put_masked(self: Any, at: int, mask: Any, values: Any, accumulate: bool) -> Any:
    """`self[:, ..., mask] = values` as a `where`: the n-th element that the mask selects takes the n-th value."""
    shape, extent = _along_mask(self, at, mask, values)
    values = values.reshape(shape)
    if extent == 1:
        values = values.reshape(*shape[:at], *(1,) * mask.ndim, *shape[at + 1 :])
    else:
        _check_count(mask, extent, shape)
        if extent == 0:
            return self
        values = jnp.take(values, nth_selected(mask), axis=at, mode="clip")
    mask = mask.reshape((1,) * at + mask.shape + (1,) * (self.ndim - at - mask.ndim))
    return jnp.where(mask, self + values if accumulate else values, self)


def _check_count(mask: Any, extent: int, shape: tuple[int, ...]) -> None:
    if not is_tracer(mask) and int(mask.sum()) != extent:
        raise RuntimeError(f"shape mismatch: value tensor of shape {list(shape)} for a mask that selects {int(mask.sum())} elements")


def nth_selected(mask: Any) -> Any:
    """For each element how many the mask has selected before it, in row-major order; same shape as the mask."""
    return (jnp.cumsum(mask.reshape(-1)) - mask.reshape(-1)).reshape(mask.shape)


@lower("masked_select", data_dependent=True)
def masked_select(self: Any, mask: Any) -> Any:
    shape: Any = jnp.broadcast_shapes(jnp.atleast_1d(self).shape, mask.shape)
    mask = (np if isinstance(mask, np.ndarray) else jnp).broadcast_to(mask, shape)
    return jnp.broadcast_to(self, shape)[positions(mask)]


def _has_boolean_mask(self: Any, mask: Any, source: Any) -> None:
    if mask.dtype != jnp.bool_:
        raise RuntimeError(f"masked_scatter_ only supports boolean masks, but got mask with dtype {mask.dtype}")


@lower("masked_scatter", check=_has_boolean_mask)
def masked_scatter(self: Any, mask: Any, source: Any) -> Any:
    shape = jnp.broadcast_shapes(self.shape, mask.shape)
    if math.prod(shape) == 0 or source.size == 0:
        return jnp.broadcast_to(self, shape)
    mask = jnp.broadcast_to(mask, shape)
    return jnp.where(mask, jnp.take(source.reshape(-1), nth_selected(mask), mode="clip"), self)


@lower("masked_scatter_backward")
def masked_scatter_backward(grad_output: Any, mask: Any, sizes: Any) -> Any:
    count = math.prod(sizes)
    mask = jnp.broadcast_to(mask, grad_output.shape)
    places = jnp.where(mask, nth_selected(mask), count).reshape(-1)
    return jnp.zeros((count,), grad_output.dtype).at[places].set(grad_output.reshape(-1), mode="drop").reshape(sizes)


@lower("index_select")
def index_select(self: Any, dim: int, index: Any) -> Any:
    return self if self.ndim == 0 else jnp.take(self, index.reshape(-1), axis=dim, mode="clip")


def slices(self: Any, dim: int, index: Any) -> Any:
    """`self.at[...]` at the slices that `index` names along `dim`; a 0-dim tensor counts as one slice."""
    self = self.reshape(1) if self.ndim == 0 else self
    return self.at[(slice(None),) * (dim % self.ndim) + (index.reshape(-1),)]


def _as_slices(self: Any, dim: int, index: Any, source: Any) -> Any:
    """`source` with a dim for the slices that `index` names, where torch lets it go without."""
    if self.ndim == 0 or (source.ndim == 0 and self.ndim == 1):
        return source.reshape(-1)
    return source if source.ndim == self.ndim else jnp.expand_dims(source, dim % self.ndim)


def _fits(self: Any, dim: int, index: Any, source: Any, *, alpha: Any = 1) -> None:
    if self.ndim == 0 or source.ndim == 0:
        return
    others = [shape[: dim % self.ndim] + shape[dim % self.ndim + 1 :] for shape in (self.shape, source.shape)]
    if source.ndim != self.ndim or others[0] != others[1]:
        raise RuntimeError(
            "source tensor shape must match self tensor shape, excluding the specified dimension. "
            f"Got self.shape = {list(self.shape)} source.shape = {list(source.shape)}"
        )


@lower("index_add", check=_fits)
def index_add(self: Any, dim: int, index: Any, source: Any, *, alpha: Any = 1) -> Any:
    added = scaled(_as_slices(self, dim, index, source), alpha).astype(self.dtype)
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
    places = index.reshape(1) if index.ndim == 0 else index
    window = tuple(slice(0, n) if i != dim % self.ndim else slice(None) for i, n in enumerate(places.shape))
    return jnp.take_along_axis(self[window], places, dim, mode="clip").reshape(index.shape)


@lower("take")
def take(self: Any, index: Any) -> Any:
    return self.reshape(-1).at[index].get(mode="clip") if index.size else jnp.zeros(index.shape, self.dtype)


@lower("put")
def put(self: Any, index: Any, source: Any, accumulate: bool = False) -> Any:
    target, values = self.reshape(-1).at[index.reshape(-1)], source.reshape(-1)
    return combined_at(target, "add" if accumulate else "set", values).reshape(self.shape)
