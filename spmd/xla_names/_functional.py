"""Annotations that return a new tensor and leave the one they were given as it is; `mark_sharding` works in place.

h = spmd.mark_sharding_with_gradients(h, m, ("data", None))    # constrains h and its gradient
a, b = spmd.shard_as(a, b)                                       # laid out alike, whichever way
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from jax.experimental.shard_alike import shard_alike

from mesh import SpecLike
from spmd.base._errors import SpmdError, message
from spmd.base._torch import pytree
from spmd.device._call_jax import call_jax
from spmd.sharding._annotate import as_mesh, checked_spec
from spmd.sharding._constraint import constrain
from spmd.sharding._tensor import XLAShardedTensor, become_sharded

A = TypeVar("A")
B = TypeVar("B")


def mark_sharding_with_gradients(t: torch.Tensor, mesh: Any, partition_spec: SpecLike) -> XLAShardedTensor:
    """`t` laid out over `mesh` as a new tensor, whose gradient is laid out alike in the backward pass.

    Args:
        t: on device 'jax', usually an activation; it stays as it is.
        mesh: as for `mark_sharding`.
        partition_spec: as for `mark_sharding`.

    Raises:
        SpecError, SpmdError: as `mark_sharding`.
    """
    spec = checked_spec(t, as_mesh(mesh), partition_spec)
    return constrain(t, spec, spec)


def annotate_custom_sharding(t: torch.Tensor, mesh: Any, partition_spec: SpecLike) -> XLAShardedTensor:
    """`t` for the operations that follow, constrained to another layout; where `t` itself lies does not change.

    Use what it returns: a parameter marked for storage is gathered or split in another way for one kernel. Gradients come back
    in whatever layout they have.

    Args:
        t: on device 'jax', marked or not.
        mesh: as for `mark_sharding`.
        partition_spec: as for `mark_sharding`.

    Raises:
        SpecError, SpmdError: as `mark_sharding`.
    """
    return constrain(t, checked_spec(t, as_mesh(mesh), partition_spec), None)


def shard_as(a: A, b: B) -> tuple[A, B]:
    """Lay two containers of tensors out alike, whichever layout that is; the compiler chooses one that both can have.

    Args:
        a: tensors on device 'jax' in any container; None where both have none.
        b: the same structure and shapes.

    Returns:
        New containers like `a` and `b`, whose tensors are laid out alike in pairs. Gradients pass through.

    Raises:
        SpmdError: the structures differ.
    """
    flat_a, tree_a = pytree.tree_flatten(a)
    flat_b, tree_b = pytree.tree_flatten(b)
    if tree_a != tree_b or any((x is None) != (y is None) for x, y in zip(flat_a, flat_b, strict=False)):
        raise SpmdError(message("shard_as needs two containers of one structure", f"got {tree_a} and {tree_b}", fix="pair the tensors up"))
    pairs = [(x, y) if x is None else call_jax(shard_alike, (x, y)) for x, y in zip(flat_a, flat_b, strict=True)]
    shown = [tuple(become_sharded(t) if isinstance(t, torch.Tensor) else t for t in pair) for pair in pairs]
    return pytree.tree_unflatten([x for x, _ in shown], tree_a), pytree.tree_unflatten([y for _, y in shown], tree_b)
