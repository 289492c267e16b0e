"""DTensor's view of `XLAShardedTensor` (`_spec`, `placements`, `mesh_shape`), and wrapping by the shape of a mesh.

The layout is never cached, so it cannot go stale. `_cached_spec` is the spec that was last requested, while the layout is unchanged.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from spmd.base._errors import SpmdError, message
from spmd.base._torch_late import dtensor_spec
from spmd.compat.torch_xla._caller import is_user
from spmd.compat.torch_xla._tensor_views import layout
from spmd.sharding._dtensor_placements import placements_of
from spmd.sharding._tensor import XLAShardedTensor


class NoLayoutError(SpmdError, ValueError):
    """A tensor's layout was requested, but it is not marked."""


def enter(stack: ExitStack) -> None:
    """Give the class these properties until `stack` closes."""
    ours: Any = XLAShardedTensor.__dict__["placements"]
    added: dict[str, Any] = {
        "_spec": property(spec_of),
        "_cached_spec": property(lambda self: self.__dict__.get("_dtensor_spec", (None, None))[1]),
        "mesh_shape": property(_mesh_shape),
        "invalidate_spec_cache": lambda self: self.__dict__.pop("_dtensor_spec", None) and None,
    }
    for name, value in added.items():
        setattr(XLAShardedTensor, name, value)
        stack.callback(delattr, XLAShardedTensor, name)
    XLAShardedTensor.placements = property(lambda self: placements(self) if is_user(1) else ours.fget(self))
    stack.callback(setattr, XLAShardedTensor, "placements", ours)


def spec_of(t: Any) -> Any:
    """A `DTensorSpec`: mesh of type "xla", placements, shape, strides and dtype.

    Raises:
        NoLayoutError: the tensor is not marked (a ValueError).
    """
    from torch.distributed.device_mesh import DeviceMesh

    found = _marked_as(t)
    if found is None:
        raise NoLayoutError(
            message(
                "mesh_shape and partition_spec must be specified to create DTensorSpec: the tensor is not marked",
                fix="xs.mark_sharding(t, mesh, spec), or wrap_as_sharded_tensor(t, mesh_shape=, partition_spec=)",
            )
        )
    known, made = t.__dict__.get("_dtensor_spec", (None, None))
    if known != found:
        ids = torch.tensor(found.mesh.get_logical_mesh().tolist())
        names = found.mesh.axis_names
        is_named = names != tuple(map(str, range(len(names))))
        mesh = DeviceMesh("xla", ids, mesh_dim_names=names if is_named else None, _init_backend=False, _rank=0)
        specs = dtensor_spec()
        made = specs.DTensorSpec(mesh, placements_of(found), tensor_meta=specs.TensorMeta(t.shape, t.stride(), t.dtype))
        t.__dict__["_dtensor_spec"] = (found, made)
    return made


def placements(t: Any) -> Any:
    """One placement per mesh axis.

    Raises:
        NoLayoutError: the tensor is not marked; with torch_xla's text, because programs compare it.
    """
    if _marked_as(t) is None:
        raise NoLayoutError(
            "Placements not available: XLAShardedTensor requires mesh_shape and "
            "partition_spec to be set. Use mark_sharding() to properly initialize sharding information."
        )
    return spec_of(t).placements


def wrap_as_sharded_tensor(t: torch.Tensor, mesh_shape: Any = None, partition_spec: Any = None) -> XLAShardedTensor:
    """`t` as an `XLAShardedTensor` on the same storage. With a mesh shape or a spec it is marked, over all devices."""
    wrapped = t if isinstance(t, XLAShardedTensor) else t.as_subclass(XLAShardedTensor)
    if mesh_shape is not None or partition_spec is not None:
        shape = mesh_shape if mesh_shape is not None else _mesh_shape(wrapped)
        spec = partition_spec if partition_spec is not None else wrapped.partition_spec
        XLAShardedTensor._lay_out(wrapped, shape, spec)
    return wrapped


def _marked_as(t: Any) -> Any:
    from spmd.device._storage import buffer_of, is_whole

    if t.as_subclass(torch.Tensor).device.type != "jax":
        return None
    buffer = buffer_of(t)
    return buffer.annotation if buffer.annotation is not None and is_whole(t, buffer) else None


def _mesh_shape(t: Any) -> tuple[int, ...] | None:
    spec = layout(t)
    return None if spec is None else spec.mesh.mesh_shape
