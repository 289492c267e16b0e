"""`xm.all_reduce` and similar functions: they communicate for manual tensors, whose values differ by device; global tensors are refused.

Under SPMD, torch_xla's functions silently did nothing. A global tensor is a single value, so there is nothing to reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from mesh import Mesh
from spmd.base._errors import SpmdError, called_at, message
from spmd.base._torch import DisableTorchFunctionSubclass
from spmd.compat.torch_xla._caller import is_package
from spmd.device._call_jax import call_jax
from spmd.xla_names._manual import ManualTensor, as_manual

REDUCE_SUM, REDUCE_MUL, REDUCE_AND, REDUCE_OR, REDUCE_MIN, REDUCE_MAX = "sum", "mul", "and", "or", "min", "max"
Groups = Sequence[Sequence[int]] | None


class CollectiveError(SpmdError, NotImplementedError):
    """A collective that has no meaning here, or is not supported."""


def all_reduce(reduce_type: str, inputs: Any, scale: float = 1.0, groups: Groups = None, pin_layout: bool = True) -> Any:
    """Reduce a manual tensor over devices; tensors in a list are reduced in place."""
    if isinstance(inputs, list | tuple):
        for t in inputs:
            t.copy_(all_reduce(reduce_type, t, scale, groups))
        return inputs
    reduce_fn = _reduction(reduce_type)
    return _on_pieces(
        "all_reduce", inputs, groups, lambda x, axes: reduce_fn(x, axes) * jnp.asarray(scale, x.dtype) if scale != 1 else reduce_fn(x, axes)
    )


def all_gather(value: Any, dim: int = 0, groups: Groups = None, output: Any = None, pin_layout: bool = True) -> Any:
    """Concatenate the shards of all devices along `dim`, into `output` if given.

    Accelerate gathers from its processes, of which there is one, so it gets the tensor itself.
    """
    if not isinstance(value, ManualTensor) and is_package("accelerate", 1):
        return value
    gathered = _on_pieces("all_gather", value, groups, lambda x, axes: jax.lax.all_gather(x, axes, axis=dim % x.ndim, tiled=True))
    return _into("all_gather", output, gathered)


def reduce_scatter(
    reduce_type: str,
    input: Any,
    scale: float,
    scatter_dim: int,
    shard_count: int,
    groups: Groups = None,
    output: Any = None,
    pin_layout: bool = True,
) -> Any:
    """Sum over devices; each device keeps its own shard along `scatter_dim`, in `output` if given."""
    if reduce_type != REDUCE_SUM:
        raise CollectiveError(message(f"reduce_scatter by {reduce_type!r} is not available", fix="use xm.REDUCE_SUM"))

    def run(x: Any, axes: Any) -> Any:
        out = jax.lax.psum_scatter(x, axes, scatter_dimension=scatter_dim % x.ndim, tiled=True)
        return out * jnp.asarray(scale, x.dtype) if scale != 1 else out

    return _into("reduce_scatter", output, _on_pieces("reduce_scatter", input, groups, run))


def all_to_all(
    value: Any, split_dimension: int, concat_dimension: int, split_count: int, groups: Groups = None, pin_layout: bool = True
) -> Any:
    """Split each device's shard along one dim, exchange the parts, and concatenate them along another dim."""
    return _on_pieces(
        "all_to_all", value, groups, lambda x, axes: jax.lax.all_to_all(x, axes, split_dimension, concat_dimension, tiled=True)
    )


def collective_permute(value: Any, pairs: Sequence[Sequence[int]]) -> Any:
    """Send each device's shard to another device, by ids. A device that receives nothing gets zeros."""

    def run(x: Any, axes: Any) -> Any:
        position = {int(device): place for place, device in enumerate(value.manual_mesh.device_ids)}
        return jax.lax.ppermute(x, axes, [(position[int(a)], position[int(b)]) for a, b in pairs])

    return _on_pieces("collective_permute", value, None, run)


def _reduction(reduce_type: str) -> Callable[[Any, Any], Any]:
    found: dict[str, Callable[[Any, Any], Any]] = {
        REDUCE_SUM: jax.lax.psum,
        REDUCE_MIN: jax.lax.pmin,
        REDUCE_MAX: jax.lax.pmax,
        REDUCE_AND: lambda x, axes: jax.lax.reduce_and(jax.lax.all_gather(x, axes), axes=(0,)),  # bit by bit
        REDUCE_OR: lambda x, axes: jax.lax.reduce_or(jax.lax.all_gather(x, axes), axes=(0,)),
    }
    if reduce_type not in found:
        raise CollectiveError(message(f"all_reduce by {reduce_type!r} is not available", fix=f"use one of {', '.join(found)}"))
    return found[reduce_type]


def _on_pieces(name: str, t: Any, groups: Groups, run: Callable[[Any, Any], Any]) -> torch.Tensor:
    if not isinstance(t, ManualTensor):
        raise CollectiveError(
            message(
                f"xm.{name} of a global tensor: one process drives all devices, so there is a single value and nothing to combine",
                *called_at(),
                fix="remove the call, or use it inside xs.enable_manual_sharding, where each device has its own value",
            )
        )
    mesh = t.manual_mesh
    axes = _axes_of(name, mesh, groups)
    spec = jax.sharding.PartitionSpec()
    fn = jax.shard_map(lambda x: run(x, axes), mesh=mesh.to_jax(), in_specs=spec, out_specs=spec, check_vma=False)
    with DisableTorchFunctionSubclass():
        plain = t.as_subclass(torch.Tensor)
        if plain.requires_grad and torch.is_grad_enabled():
            raise CollectiveError(
                message(f"xm.{name} has no gradient", *called_at(), fix="use it under torch.no_grad(), or spmd.shard_map for one that has")
            )
        return as_manual(call_jax(fn, (plain,)), mesh)


def _into(name: str, output: Any, result: torch.Tensor) -> torch.Tensor:
    """`result`, or `output` after `result` was copied into it."""
    if output is None:
        return result
    if not isinstance(output, ManualTensor):
        what = f"output= of xm.{name} is a global tensor, which cannot have a different value on each device"
        raise CollectiveError(message(what, *called_at(), fix="use its result"))
    return output.copy_(result)


def _axes_of(name: str, mesh: Mesh, groups: Groups) -> tuple[str, ...]:
    """The mesh axes along which the groups run; all axes if there are no groups."""
    names = mesh.axis_names
    if not groups:
        return names
    wanted = {frozenset(int(device) for device in group) for group in groups}
    for mask in range(1, 2 ** len(names)):
        chosen = tuple(axis for i, axis in enumerate(names) if mask >> i & 1)
        ids = mesh.device_ids
        if {frozenset(int(ids[position]) for position in group) for group in mesh.axis_groups(chosen)} == wanted:
            return chosen
    raise CollectiveError(message(f"xm.{name}: the groups {groups} do not run along axes of {mesh}", fix="build the mesh so that they do"))
