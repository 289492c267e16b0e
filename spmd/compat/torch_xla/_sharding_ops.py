"""`torch.ops.xla`'s sharding operators, and `MarkShardingFunction`, which uses one, for graphs that AOTAutograd traces.

Mesh and spec are text arguments: torch_xla's `str(mesh)` or `mesh.to_string()`, and the tuple's repr.
"""

from __future__ import annotations

import ast
from functools import cache
from typing import Any

import torch

from mesh import ShardingSpec
from spmd.base._errors import SpmdError, message
from spmd.compat.torch_xla import _spmd
from spmd.compat.torch_xla._meshes import Mesh, mesh_of_text
from spmd.sharding._annotate import as_mesh
from spmd.sharding._constraint import constrain


@cache
def register() -> torch.library.Library:
    """Define the operators, once per process. They live as long as the library."""
    library = torch.library.Library("xla", "FRAGMENT")
    library.define("aot_mark_sharding(Tensor t, str mesh, str partition_spec) -> Tensor")
    library.impl("aot_mark_sharding", _laid_out, "PrivateUse1")
    library.impl("aot_mark_sharding", lambda t, mesh, partition_spec: torch.empty_like(t), "Meta")
    schema = "(Tensor input, int[] device_ids, int[] mesh_shape, str axis_names, str partition_spec) -> Tensor"
    library.define("dynamo_mark_sharding" + schema)
    library.impl("dynamo_mark_sharding", _marked, "PrivateUse1")
    library.impl("dynamo_mark_sharding", lambda input, *layout: torch.empty_like(input), "Meta")
    library.define("dynamo_set_buffer_donor_(Tensor t, bool should_donoate) -> Tensor")
    library.impl("dynamo_set_buffer_donor_", lambda t, should_donoate: t.clone(), "PrivateUse1")
    library.impl("dynamo_set_buffer_donor_", lambda t, should_donoate: torch.empty_like(t), "Meta")
    return library


def _laid_out(t: torch.Tensor, mesh: str, partition_spec: str) -> torch.Tensor:
    spec = ShardingSpec(_mesh_of(mesh), ast.literal_eval(partition_spec))
    return constrain(t.detach(), spec, None).as_subclass(torch.Tensor)


def _marked(input: torch.Tensor, device_ids: list[int], mesh_shape: list[int], axis_names: str, partition_spec: str) -> torch.Tensor:
    """`mark_sharding` in place; returns a new tensor, as an operator must."""
    mesh = Mesh(device_ids, mesh_shape, ast.literal_eval(axis_names))
    _spmd.mark_sharding(input, mesh, ast.literal_eval(partition_spec))
    return input.detach().as_subclass(torch.Tensor).clone()


def _mesh_of(text: str) -> Mesh:
    found = mesh_of_text(text)
    if found is None:
        raise SpmdError(message(f"{text!r} is not a mesh", fix="pass mesh.to_string()"))
    return found


class MarkShardingFunction(torch.autograd.Function):
    """`MarkShardingFunction.apply(t, mesh, spec)`: a new tensor with this layout, which its gradient gets too."""

    @staticmethod
    def forward(ctx: Any, torch_tensor: torch.Tensor, mesh: Any, partition_spec: Any) -> torch.Tensor:
        ctx.given, ctx.layout = (mesh, partition_spec), (as_mesh(mesh).to_string(), repr(tuple(partition_spec)))
        return torch.ops.xla.aot_mark_sharding(torch_tensor, *ctx.layout)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        if torch.is_grad_enabled():  # a backward pass with create_graph=True: the operator alone has no gradient
            return MarkShardingFunction.apply(grads[0], *ctx.given), None, None
        return torch.ops.xla.aot_mark_sharding(grads[0], *ctx.layout), None, None
