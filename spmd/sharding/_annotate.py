"""`mark_sharding`: the one annotation, on parameters, buffers, inputs and activations. It names the mesh axes that split each
dim of a tensor.

    mark_sharding(model.up.weight, m, ("model", None))    # eager: the value is laid out now
    h = mark_sharding(h, m, ("data", None, "model"))       # in a compiled function: a constraint on the value
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import torch

from mesh import Mesh, PartitionSpec, ShardingSpec, SpecError, SpecLike
from spmd.base._convert import exact_dtypes
from spmd.base._errors import SpmdError, called_at, message, shown
from spmd.base._jax import is_tracer
from spmd.base._torch import disable_dynamo, graph_break, is_functorch_wrapped_tensor, torch_at_least
from spmd.base._wrong_arguments import wrong_argument
from spmd.device._layout import forget, remember
from spmd.device._storage import Buffer, buffer_of, load, recording, store
from spmd.sharding._constraint import constrain
from spmd.sharding._device_mesh import is_of_devices, mesh_axes
from spmd.sharding._names import name_of
from spmd.sharding._tensor import XLAShardedTensor, become_plain, become_sharded

IN_GRAPHS = torch_at_least("2.12")
"""Whether Dynamo accepts meshes and specs as constants of its graphs (see `spmd.sharding._dynamo`). Dynamo of torch 2.11 does not."""


def mark_sharding(
    tensor: torch.Tensor, mesh: Any, partition_spec: SpecLike, *, uneven: Literal["pad", "error"] = "pad"
) -> XLAShardedTensor:
    """Shard `tensor` over `mesh` in place, and return it.

    A tensor on the host is uploaded shard by shard; one that is already on devices is moved between them directly. Inside a
    compiled function the call constrains the value at this point and its gradient, like `jax.lax.with_sharding_constraint`.
    A tensor of a class of your own keeps its class; `wrap_if_sharded` shows its layout.

    Args:
        tensor: a parameter, buffer, input or activation of any dtype, on device 'jax'. On the host or on 'meta' the layout is
            recorded and applied when the tensor moves to the device.
        mesh: a `mesh.Mesh`, a `jax.sharding.Mesh` or a torch `DeviceMesh`.
        partition_spec: one entry per dim: an axis name, an axis index, a tuple of them, or None (not split).
        uneven: what to do with a dim whose size the axes do not divide. "pad" pads it in device memory only: values, shapes and
            files never show the padding. "error" refuses it.

    Raises:
        SpecError: wrong rank, unknown axis, an axis used twice, or `uneven="error"` and a dim whose size its axes do not divide.
        SpmdError: `tensor` is not a tensor, is on another device, is a view that does not cover its whole storage, or is one of a
            transform of torch.func (`grad`, `vmap`, `jvp`).
    """
    require_tensor(tensor, "mark_sharding", "mark_sharding(torch.as_tensor(value), mesh, spec)")
    if torch.compiler.is_dynamo_compiling():
        return _in_graph(tensor, mesh, partition_spec, uneven)
    if is_functorch_wrapped_tensor(tensor):
        raise SpmdError(
            message(
                f"mark_sharding was given a tensor of torch.func, of shape {tuple(tensor.shape)}",
                "inside grad, vmap, jvp and functions made of them a tensor has no memory that could be laid out",
                fix="x = spmd.call_jax(lambda v: jax.lax.with_sharding_constraint(v, sharding), (x,)), with a jax NamedSharding",
            )
        )
    spec = checked_spec(tensor, as_mesh(mesh), partition_spec, uneven, devices=("jax", "cpu", "meta"))
    if tensor.device.type != "jax":
        remember(tensor, spec)
        return become_sharded(tensor)
    buffer = buffer_of(tensor)
    recorder = recording.get()
    if recorder is not None or is_tracer(buffer.value):
        if recorder is not None:
            recorder.laid_out(spec)
        with exact_dtypes():
            store(tensor, jax.lax.with_sharding_constraint(load(tensor), spec.to_jax()))
        if tensor.requires_grad and not tensor.is_leaf:
            tensor.register_hook(lambda gradient: constrain(gradient, spec, None))
        return become_sharded(tensor)
    if tensor.shape != buffer.shape or not tensor.is_contiguous() or tensor.storage_offset():
        raise _view_error(tensor, buffer)
    buffer.annotate(spec)
    return become_sharded(tensor)


def _view_error(tensor: torch.Tensor, buffer: Buffer) -> SpmdError:
    """The error for a tensor that is not all of its memory."""
    of_copy = (
        "mark the tensor that it views (instead of x.t(), x with the entries in reverse), or a copy, which no longer shares "
        "its memory: mark_sharding(t.clone(memory_format=torch.contiguous_format), ...)"
    )
    of_parameter = "give the parameter a storage of its own first: p.data = p.data.clone(memory_format=torch.contiguous_format)"
    return SpmdError(
        message(
            f"{name_of(tensor)} is a view into a tensor of shape {buffer.shape}, and only a whole tensor can be laid out",
            f"the view has shape {tuple(tensor.shape)}, strides {tensor.stride()}, offset {tensor.storage_offset()}",
            fix=of_parameter if isinstance(tensor, torch.nn.Parameter) else of_copy,
        )
    )


def require_tensor(value: object, taker: str, fix: str) -> None:
    """Refuse anything but a tensor. `taker` is the name of the function.

    Raises:
        SpmdError: `value` is not a tensor.
    """
    if isinstance(value, torch.Tensor):
        return
    if isinstance(value, torch.nn.Module):
        fix = (
            "spmd.shard_module(module, mesh, rules)"
            if taker != "clear_sharding"
            else "for p in module.parameters(): spmd.clear_sharding(p)"
        )
    if isinstance(value, Mesh):
        raise wrong_argument(f"{taker} takes the tensor first, got a Mesh", "spmd.mark_sharding(x, mesh, spec)")
    raise wrong_argument(f"{taker} takes a tensor, got {shown(value)}", fix)


def _in_graph(tensor: torch.Tensor, mesh: Any, partition_spec: Any, uneven: Literal["pad", "error"]) -> XLAShardedTensor:
    """The branch that Dynamo traces: one operator in the graph (see `spmd.sharding._dynamo`)."""
    if not IN_GRAPHS:
        graph_break(msg="spmd.mark_sharding: torch 2.11 cannot put a mesh into a graph; fix: pip install 'torch>=2.12'")
        return _outside_graph(tensor, mesh, partition_spec, uneven=uneven)
    if isinstance(mesh, Mesh) and isinstance(partition_spec, PartitionSpec | tuple | list):
        return torch.ops.spmd.mark_sharding_(tensor, ShardingSpec(mesh, partition_spec), uneven)
    graph_break(
        msg="spmd.mark_sharding: a graph cannot contain a jax or DTensor mesh or spec; "
        "fix: before the compiled function, m = mesh.Mesh.from_jax(jax_mesh); specs are tuples"
    )
    return _outside_graph(tensor, mesh, partition_spec, uneven=uneven)


@disable_dynamo  # pyright: ignore[reportPrivateImportUsage]  (torch.compiler.disable imports Dynamo, which takes seconds)
def _outside_graph(tensor: torch.Tensor, mesh: Any, partition_spec: Any, uneven: Literal["pad", "error"]) -> XLAShardedTensor:
    return mark_sharding(tensor, mesh, partition_spec, uneven=uneven)


def clear_sharding(t: torch.Tensor) -> torch.Tensor:
    """Remove the annotation of `t`, in place: it is a plain tensor or Parameter again, replicated over its mesh.

    Args:
        t: marked or not, also a `torch.nn.Parameter`.

    Returns:
        `t` itself.

    Raises:
        SpmdError: `t` is not a tensor.
    """
    require_tensor(t, "clear_sharding", "spmd.clear_sharding(x), one call per tensor")
    if t.device.type != "jax":
        forget(t)
        return become_plain(t)
    buffer = buffer_of(t)
    buffer.settle()
    spec = buffer.annotation
    if spec is not None and recording.get() is None and not is_tracer(buffer.value):
        buffer.annotation = None
        if buffer.value is not None:
            buffer.place(ShardingSpec(spec.mesh, (None,) * len(buffer.shape)).to_jax())
    return become_plain(t)


def wrap_if_sharded(x: Any) -> Any:
    """`x` as an `XLAShardedTensor` on the same storage if it is a tensor split over a mesh; else `x` itself."""
    if not isinstance(x, torch.Tensor) or isinstance(x, XLAShardedTensor) or x.device.type != "jax":
        return x
    buffer = buffer_of(x)
    buffer.settle()
    placed = None if buffer.value is None or is_tracer(buffer.value) else buffer.value.sharding
    in_pieces = isinstance(placed, jax.sharding.NamedSharding) and not placed.is_fully_replicated
    return x.as_subclass(XLAShardedTensor) if buffer.annotation is not None or in_pieces else x


def as_mesh(mesh: Any) -> Mesh:
    """Convert a `mesh.Mesh`, a `jax.sharding.Mesh` or a torch `DeviceMesh` to a `mesh.Mesh`.

    Ranks of a DeviceMesh are device positions. A submesh of device type "jax" becomes the whole mesh of its root.

    Raises:
        SpmdError: `mesh` is none of these.
    """
    if isinstance(mesh, Mesh):
        return mesh
    if isinstance(mesh, jax.sharding.Mesh):
        return Mesh.from_jax(mesh)
    if is_of_devices(mesh):
        return mesh_axes(mesh).mesh
    if type(mesh).__name__ == "DeviceMesh":
        names = mesh.mesh_dim_names
        return Mesh(mesh.mesh.flatten().tolist(), tuple(mesh.mesh.shape), tuple(names) if names else None)
    raise SpmdError(
        message(
            f"a mesh was expected, got a {type(mesh).__name__}",
            fix='make one: m = mesh.Mesh(range(8), (4, 2), ("data", "model"))',
        )
    )


def checked_spec(
    tensor: torch.Tensor,
    mesh: Mesh,
    partition_spec: SpecLike,
    uneven: Literal["pad", "error"] = "pad",
    devices: tuple[str, ...] = ("jax",),
) -> ShardingSpec:
    """The layout that `partition_spec` describes for `tensor`.

    Raises:
        SpecError: the spec does not fit the tensor; the message contains the tensor's name.
        SpmdError: `tensor` is not a tensor, or is on none of `devices`.
    """
    require_tensor(tensor, "a sharding", "pass a tensor on device 'jax': torch.as_tensor(value).to('jax')")
    if tensor.layout is not torch.strided:
        kind = str(tensor.layout).removeprefix("torch.")
        what = f"{name_of(tensor)} cannot be marked: its layout is {kind}, and only dense tensors are sharded"
        raise SpmdError(message(what, *called_at(), fix="mark_sharding(x.to_dense(), mesh, spec)"))
    if tensor.device.type not in devices:
        raise SpmdError(
            message(
                f"{name_of(tensor)} cannot be marked: it is on device '{tensor.device}'",
                "a sharding needs device 'jax'",
                fix="move it first: model.to('jax'), or x = x.to('jax')",
            )
        )
    try:
        spec = ShardingSpec(mesh, partition_spec)
        spec.validate(tuple(tensor.shape), uneven=uneven)
        return spec
    except SpecError as error:
        name = name_of(tensor)
        try:
            ShardingSpec(mesh, partition_spec).validate(tuple(tensor.shape), name, uneven)
        except SpecError as named:
            text = str(named) if name in str(named) else f"{name} cannot be sharded by {partition_spec!r}: {named}"
            raise SpecError(text) from error
        raise


__all__ = ["as_mesh", "checked_spec", "clear_sharding", "mark_sharding", "wrap_if_sharded"]
