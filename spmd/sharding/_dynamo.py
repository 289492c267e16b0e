"""`mark_sharding` in a graph that Dynamo captures (`torch.compile`): one operator, so the graph does not break.

    compiled = torch.compile(model, fullgraph=True, backend="eager")     # model.forward marks its activations

On tensors of device 'jax' the operator is `mark_sharding` itself. AOTAutograd traces it as a function of values, forward and
on the gradient: `spmd::laid_out`. Meshes and specs are constants of the graph, guarded by their values.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from mesh import Mesh, PartitionSpec, ShardingSpec
from spmd.base._torch import FakeTensor, FunctionalTensor, register_constant_type
from spmd.sharding._annotate import IN_GRAPHS, checked_spec, mark_sharding
from spmd.sharding._constraint import constrain

_NAMES = {kind.__name__: kind for kind in (Mesh, PartitionSpec, ShardingSpec)}


@cache
def register() -> torch.library.Library | None:
    """Define the operators, once. They live as long as the library.

    Under torch 2.11 nothing is defined and `mark_sharding` breaks the graph.
    """
    if not IN_GRAPHS:
        return None
    for kind, text in _TEXTS.items():
        kind.__fx_repr__ = _as_code(text)
        register_constant_type(kind)
    library = torch.library.Library("spmd", "DEF")
    spec = f"{ShardingSpec.__module__}.{ShardingSpec.__qualname__}"
    library.define(f"mark_sharding_(Tensor(a!) tensor, {spec} spec, str uneven) -> Tensor(a!)")
    library.impl("mark_sharding_", _mark_sharding, "CompositeImplicitAutograd")
    library.define(f"laid_out(Tensor tensor, {spec} spec) -> Tensor")
    library.impl("laid_out", lambda tensor, spec: constrain(tensor.detach(), spec, None).global_tensor, "PrivateUse1")
    library.impl("laid_out", lambda tensor, spec: torch.empty_like(tensor, memory_format=torch.contiguous_format), "Meta")
    return library


def _mark_sharding(tensor: torch.Tensor, spec: ShardingSpec, uneven: Any) -> torch.Tensor:
    """The operator in each of its three uses: captured by Dynamo, run on the device, traced by AOTAutograd."""
    if isinstance(tensor, FakeTensor):
        checked_spec(tensor, spec.mesh, spec.partition_spec, uneven, devices=("jax", "cpu", "meta"))
    elif not isinstance(tensor, FunctionalTensor):
        mark_sharding(tensor, spec.mesh, spec.partition_spec, uneven=uneven)
    elif tensor.device.type == "jax":  # a traced value on the host never moves to the device, so no layout is recorded
        # As in a program of spmd.compile: the same tensor gets a new value, and autograd sees no mutation.
        with torch.no_grad():
            laid = torch.ops.spmd.laid_out(tensor, spec)
        tensor.replace_(laid.from_functional())
        if tensor.requires_grad and not tensor.is_leaf:
            tensor.register_hook(lambda gradient: torch.ops.spmd.laid_out(gradient, spec))
    return tensor


# The source text of a constant in a graph's code.
_TEXTS: dict[Any, Callable[[Any], str]] = {
    Mesh: lambda mesh: f"Mesh.from_string({mesh.to_string()!r})",
    PartitionSpec: repr,
    ShardingSpec: lambda spec: f"ShardingSpec(Mesh.from_string({spec.mesh.to_string()!r}), {spec.partition_spec!r})",
}


def _as_code(text: Callable[[Any], str]) -> Callable[[Any], tuple[str, dict[str, type]]]:
    return lambda value: (text(value), _NAMES)
