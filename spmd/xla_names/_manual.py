"""Manual sharding: between `enable_manual_sharding` and `disable_manual_sharding` a tensor is one device's shard, different on each
device, and no communication happens unless the program asks for it.

    x = spmd.enable_manual_sharding(x, ("data", None), mesh=m)     # [batch / data, dim] on every device
    y = expert(x)                                                  # each device computes on its own shard
    y = spmd.disable_manual_sharding(y, ("data", None), full_shape, mesh=m)

To XLA a shard is a replicated value that differs between devices. That is safe while it is combined only with other shards and with
values that are equal on all devices; `ManualTensor` refuses everything else. `spmd.shard_map` does the same as a function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch
from jax.sharding import PartitionSpec

from mesh import Mesh, ShardingSpec, ShardingType, SpecLike
from spmd.base._convert import exact_dtypes
from spmd.base._errors import SpmdError, called_at, message
from spmd.base._jax import is_tracer
from spmd.base._torch import DisableTorchFunctionSubclass, pytree
from spmd.device._storage import buffer_of, load, wrap
from spmd.sharding._annotate import as_mesh, checked_spec
from spmd.sharding._tensor import XLAShardedTensor, become_sharded
from spmd.xla_names._global_mesh import mesh_or_global


class ManualTensor(XLAShardedTensor):
    """One device's shard of a tensor, different on each device. It has no global value, so reading it on the host is an error."""

    @property
    def sharding_type(self) -> ShardingType:
        return ShardingType.MANUAL

    @property
    def global_tensor(self) -> ManualTensor:
        """The tensor itself. It has no global value, and a plain tensor on its storage would look like one."""
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        mesh = _common_mesh([leaf for leaf in pytree.tree_leaves((args, kwargs or {})) if isinstance(leaf, torch.Tensor)], func)
        if func in _READS:
            raise _no_global_value(func)
        with DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if func in torch.overrides.get_default_nowrap_functions():
            return result
        return pytree.tree_map_only(torch.Tensor, lambda t: as_manual(t, mesh) if t.device.type == "jax" else t, result)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"ManualTensor({str(self.dtype).removeprefix('torch.')}{list(self.shape)}, mesh={self.manual_mesh})"

    manual_mesh: Mesh


_READS = (torch.Tensor.cpu, torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__bool__, torch.Tensor.__float__)


def as_manual(tensor: torch.Tensor, mesh: Mesh) -> ManualTensor:
    """Change the class of `tensor` in place to a manual tensor over `mesh`."""
    tensor.__class__ = ManualTensor
    tensor.manual_mesh = mesh  # pyright: ignore[reportAttributeAccessIssue]
    return tensor  # pyright: ignore[reportReturnType]


def enable_manual_sharding(t: torch.Tensor, partition_spec: SpecLike, *, mesh: Any = None) -> ManualTensor:
    """Each device's own shard of `t` under `partition_spec`, as a tensor of the shard's shape.

    Args:
        t: on device 'jax'; every split dim is a multiple of the size of its axes.
        partition_spec: how `t` is split; along axes that it does not name, devices have copies.
        mesh: the mesh, or None for the global one.

    Raises:
        SpecError, SpmdError: from `mark_sharding`. MeshError: there is no mesh.
    """
    mesh = as_mesh(mesh_or_global(mesh, "enable_manual_sharding"))
    return as_manual(_ToManual.apply(t, checked_spec(t, mesh, partition_spec)), mesh)  # pyright: ignore[reportArgumentType]


def disable_manual_sharding(t: torch.Tensor, partition_spec: SpecLike, full_shape: Sequence[int], *, mesh: Any = None) -> XLAShardedTensor:
    """The global tensor that consists of the devices' shards `t` under `partition_spec`.

    Args:
        t: the result of operations on manual tensors.
        partition_spec: how the global tensor is split; along axes that it does not name, all devices must have equal values.
        full_shape: shape of the global tensor.
        mesh: the mesh, or None for the global one.

    Raises:
        SpmdError: `t` is not a manual tensor, or its shape is not that of a shard of `full_shape`.
    """
    mesh = as_mesh(mesh_or_global(mesh, "disable_manual_sharding"))
    spec = ShardingSpec(mesh, partition_spec)
    if not isinstance(t, ManualTensor):
        raise SpmdError(
            message(
                "disable_manual_sharding was given a tensor that is not manual",
                fix="pass a tensor computed from enable_manual_sharding's result",
            )
        )
    if spec.shard_shape(tuple(full_shape)) != tuple(t.shape):
        raise SpmdError(
            message(
                f"shards of shape {tuple(t.shape)} do not make up {tuple(full_shape)} under {spec.partition_spec}",
                f"a shard would be {spec.shard_shape(tuple(full_shape))}",
                fix="pass the shape of the global tensor and the spec that splits it",
            )
        )
    return become_sharded(_ToGlobal.apply(_without_class(t), spec))  # pyright: ignore[reportArgumentType]


class _ToManual(torch.autograd.Function):
    """From the global tensor to shards. Backward sums the gradients of copies and joins the shards' gradients."""

    @staticmethod
    def forward(ctx: Any, t: torch.Tensor, spec: ShardingSpec) -> torch.Tensor:
        ctx.spec = spec
        return per_device(lambda piece: piece, t, spec, None)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        gradient = _without_class(grads[0])
        return (_Summed.apply(gradient, ctx.spec) if torch.is_grad_enabled() else _summed(gradient, ctx.spec)), None


class _Summed(torch.autograd.Function):
    """The gradient of `_ToManual` as a node, for second derivatives. Each gradient is the other's."""

    @staticmethod
    def forward(ctx: Any, t: torch.Tensor, spec: ShardingSpec) -> torch.Tensor:
        ctx.spec = spec
        return _summed(t, spec)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _ToManual.apply(grads[0], ctx.spec), None


class _ToGlobal(torch.autograd.Function):
    """From shards to the global tensor. Backward splits the gradient, and divides it among copies."""

    @staticmethod
    def forward(ctx: Any, t: torch.Tensor, spec: ShardingSpec) -> torch.Tensor:
        ctx.spec = spec
        return per_device(lambda piece: piece, t, None, spec)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        copies = math.prod(ctx.spec.mesh.axis_size(axis) for axis in _unnamed_axes(ctx.spec))
        if torch.is_grad_enabled():  # a backward pass with create_graph=True
            return _ToManual.apply(grads[0] / copies, ctx.spec), None
        return per_device(lambda g: g / copies if copies > 1 else g, grads[0], ctx.spec, None), None


def _summed(t: torch.Tensor, spec: ShardingSpec) -> torch.Tensor:
    """The global tensor of the shards `t`, summed over their copies."""
    copied = _unnamed_axes(spec)
    return per_device(lambda g: jax.lax.psum(g, copied) if copied else g, t, None, spec)


def per_device(
    fn: Callable[[Any], Any],
    t: torch.Tensor,
    cut: ShardingSpec | None,
    join: ShardingSpec | None,
    mesh: Mesh | None = None,
) -> torch.Tensor:
    """Run `fn` on every device's shard. `cut`, `join`: layout of the global tensor before and after; None: a shard on that side."""
    spec = cut or join
    mesh = spec.mesh if spec is not None else mesh
    assert mesh is not None
    specs = [PartitionSpec() if s is None else s.partition_spec.to_jax() for s in (cut, join)]
    run = jax.shard_map(fn, mesh=mesh.to_jax(), in_specs=specs[0], out_specs=specs[1], check_vma=False)
    with exact_dtypes():
        value = jax.jit(run)(load(t))
    out = wrap(value)
    if join is not None and not is_tracer(value):
        buffer_of(out).annotation = join
    return out


def _unnamed_axes(spec: ShardingSpec) -> tuple[str, ...]:
    named = {axis for entry in spec.partition_spec for axis in (entry if isinstance(entry, tuple) else (entry,))}
    return tuple(axis for axis in spec.mesh.axis_names if axis not in named)


def _without_class(t: torch.Tensor) -> torch.Tensor:
    """The plain tensor, at the same node of autograd's graph."""
    with DisableTorchFunctionSubclass():
        return t.as_subclass(torch.Tensor)


def _common_mesh(tensors: Sequence[torch.Tensor], func: Any) -> Mesh:
    """The mesh of the manual tensors among the operands. SpmdError if their meshes differ, or another operand is split over devices."""
    meshes = [t.manual_mesh for t in tensors if isinstance(t, ManualTensor)]
    for t in tensors:
        if isinstance(t, ManualTensor) or t.device.type != "jax":
            continue
        buffer_of(t).settle()
        value = buffer_of(t).value
        split = value is not None and not is_tracer(value) and not value.sharding.is_fully_replicated
        marked = buffer_of(t).annotation
        if split or (marked is not None and not marked.is_replicated):
            raise SpmdError(
                message(
                    f"{getattr(func, '__name__', func)} combines a manual tensor with a tensor that is split over the devices",
                    *called_at(),
                    f"shapes {[tuple(x.shape) for x in tensors]}",
                    fix="pass the other tensor through enable_manual_sharding too",
                )
            )
    if any(mesh != meshes[0] for mesh in meshes):
        raise SpmdError(message("two manual tensors are over different meshes", *map(str, meshes), fix="enable both over one mesh"))
    return meshes[0]


def _no_global_value(func: Any) -> SpmdError:
    return SpmdError(
        message(
            f"{getattr(func, '__name__', func)}: a manual tensor has a different value on each device",
            *called_at(),
            fix="spmd.disable_manual_sharding(t, partition_spec, full_shape) makes it a global tensor",
        )
    )
