"""Annotations that return a new tensor and leave their argument unchanged. `mark_sharding` works in place.

h = spmd.mark_sharding_with_gradients(h, m, ("data", None))    # constrains h and its gradient
a, b = spmd.shard_as(a, b)                                       # both get the same layout
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from jax.experimental.shard_alike import shard_alike

from mesh import SpecLike
from spmd.base._errors import SpmdError, called_at, message, shown
from spmd.base._torch import pytree
from spmd.device._call_jax import call_jax
from spmd.sharding._annotate import as_mesh, checked_spec
from spmd.sharding._constraint import constrain
from spmd.sharding._tensor import XLAShardedTensor, become_sharded

A = TypeVar("A")
B = TypeVar("B")


def mark_sharding_with_gradients(t: torch.Tensor, mesh: Any, partition_spec: SpecLike) -> XLAShardedTensor:
    """A new tensor with the values of `t`, laid out over `mesh`. Its gradient gets the same layout in the backward pass.

    Args:
        t: on device 'jax', usually an activation; unchanged.
        mesh: as for `mark_sharding`.
        partition_spec: as for `mark_sharding`.

    Raises:
        SpecError, SpmdError: from `mark_sharding`.
    """
    spec = checked_spec(t, as_mesh(mesh), partition_spec)
    return constrain(t, spec, spec)


def annotate_custom_sharding(t: torch.Tensor, mesh: Any, partition_spec: SpecLike) -> XLAShardedTensor:
    """A new tensor with the values of `t` and another layout for the operations that follow. The layout of `t` does not change.

    For example, a parameter that is stored in one layout can be gathered or split differently for one kernel. The layout of
    the gradient is not constrained.

    Args:
        t: on device 'jax', marked or not.
        mesh: as for `mark_sharding`.
        partition_spec: as for `mark_sharding`.

    Raises:
        SpecError, SpmdError: from `mark_sharding`.
    """
    return constrain(t, checked_spec(t, as_mesh(mesh), partition_spec), None)


def shard_as(a: A, b: B) -> tuple[A, B]:
    """Give two pytrees of tensors the same layout, pair by pair. The compiler chooses one that suits both.

    Args:
        a: a pytree of tensors on device 'jax'; None where both have None.
        b: the same structure and shapes.

    Returns:
        New pytrees like `a` and `b`. The tensors of each pair have the same layout, and gradients pass through.

    Raises:
        SpmdError: the structures or the shapes differ.
    """
    flat_a, tree_a = pytree.tree_flatten(a)
    flat_b, tree_b = pytree.tree_flatten(b)
    if tree_a != tree_b or any((x is None) != (y is None) for x, y in zip(flat_a, flat_b, strict=False)):
        what = "shard_as needs two pytrees of the same structure"
        got = f"got {tree_a.num_leaves} and {tree_b.num_leaves} leaves, in {type(a).__name__} and {type(b).__name__}"
        raise SpmdError(message(what, got, *called_at(), fix="pair the tensors up: spmd.shard_as([w, b], [w_grad, b_grad])"))
    for x, y in zip(flat_a, flat_b, strict=True):
        shapes = [tuple(t.shape) if isinstance(t, torch.Tensor) else None for t in (x, y)]
        if x is not None and (None in shapes or shapes[0] != shapes[1]):
            what = "shard_as needs pairs of tensors of the same shape"
            got = " and ".join(shown(t) if shape is None else f"a tensor of shape {shape}" for t, shape in zip((x, y), shapes, strict=True))
            raise SpmdError(message(what, f"got {got}", *called_at(), fix="pair each tensor with one of its shape"))
    pairs = [(x, y) if x is None else call_jax(shard_alike, (x, y)) for x, y in zip(flat_a, flat_b, strict=True)]
    sharded = [tuple(become_sharded(t) if isinstance(t, torch.Tensor) else t for t in pair) for pair in pairs]
    return pytree.tree_unflatten([x for x, _ in sharded], tree_a), pytree.tree_unflatten([y for _, y in sharded], tree_b)
