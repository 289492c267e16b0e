"""Arguments of other sizes: placeholders for a trace, and a call's arguments with padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch

from spmd.base._convert import exact_dtypes
from spmd.device._arrays import fetched
from spmd.device._layout import annotation_of
from spmd.device._storage import buffer_of, is_device_tensor, load, wrap, wrap_host
from spmd.program.find._objects import flatten, unflatten
from spmd.program.sizes._dims import Named


def replaced(args: Any, kwargs: Any, others: Mapping[int, torch.Tensor], holders: frozenset[type]) -> tuple[Any, Any]:
    """Arguments with some tensors replaced.

    Args:
        others: replacements, by id of the original tensor.
        holders: classes whose instances are searched for tensors too.
    """
    flat = flatten((args, kwargs), classes=holders)
    leaves = [others.get(id(leaf), leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in flat.leaves]
    return unflatten(leaves, flat.tree)[0]


def stand_in(named: Named, sizes: Mapping[str, int]) -> torch.Tensor:
    """A tensor of zeros with these sizes, placed like the call's tensor. Its values are unknown to the host."""
    tensor = named.tensor
    shape = tuple(sizes.get(named.dims.get(d, ""), n) for d, n in enumerate(tensor.shape))
    if not is_device_tensor(tensor):
        return torch.zeros(shape, dtype=tensor.dtype)
    with exact_dtypes():
        made = wrap(jnp.zeros(shape, buffer_of(tensor).dtype if tensor.dtype != torch.bool else np.bool_))
    return _like(made, tensor)


def padded(named: Named, sizes: Mapping[str, int], fill: float = 0) -> torch.Tensor:
    """The contiguous tensor padded with `fill` at the ends of its dims; the tensor itself if it is that already."""
    tensor = named.tensor
    shape = tuple(sizes.get(named.dims.get(d, ""), n) for d, n in enumerate(tensor.shape))
    if shape == tuple(tensor.shape) and tensor.is_contiguous():
        return tensor
    widths = [(0, m - n) for n, m in zip(tensor.shape, shape, strict=True)]
    if not is_device_tensor(tensor):
        flat = [w for pair in reversed(widths) for w in pair]
        return torch.nn.functional.pad(tensor.detach(), flat, value=fill).requires_grad_(tensor.requires_grad)
    with exact_dtypes(), torch.no_grad():
        value = load(tensor)
        if value.sharding.is_fully_addressable and next(iter(value.sharding.device_set)).platform == "cpu":
            made = wrap_host(np.pad(fetched(value), widths, constant_values=np.asarray(fill).astype(value.dtype)))
        else:
            made = wrap(jnp.pad(value, widths, constant_values=fill))
    return _like(made, tensor)


def _like(made: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    spec = annotation_of(tensor)
    if spec is not None:
        buffer_of(made).annotate(spec)
        made.__class__ = type(tensor)
    return made.requires_grad_(tensor.requires_grad)


def parts_of(named: Sequence[Named]) -> list[dict[int, int]]:
    """For each tensor, the number of shards of each dim."""
    found: list[dict[int, int]] = []
    for one in named:
        spec: Any = annotation_of(one.tensor) if is_device_tensor(one.tensor) else None
        shape = (1,) * one.tensor.ndim if spec is None else spec.padded_shape((1,) * one.tensor.ndim)
        found.append(dict(enumerate(shape)))
    return found


__all__ = ["padded", "parts_of", "replaced", "stand_in"]
