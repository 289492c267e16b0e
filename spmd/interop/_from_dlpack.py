"""`from_dlpack`: shares memory of CPU or CUDA torch, numpy or any library with DLPack as tensors on device 'jax', without a copy.

x = spmd.from_dlpack(torch.randn(64, 64))                          # the same memory
x = spmd.from_dlpack(shards, m, ("data", None))                    # one shard per device of the mesh
y = torch.from_dlpack(spmd.to_jax(x))                              # back, by jax's own __dlpack__; also shard by shard
"""

from __future__ import annotations

from typing import Any

import jax
import torch

from mesh import ShardingSpec, SpecError, SpecLike
from mesh._devices import devices
from spmd.base._convert import exact_dtypes
from spmd.base._errors import SpmdError, called_at, message
from spmd.interop._to_jax import from_jax
from spmd.sharding._annotate import as_mesh


def from_dlpack(source: Any, mesh: Any = None, partition_spec: SpecLike | None = None) -> torch.Tensor:
    """A tensor on device 'jax' over memory that another library owns.

    The memory is shared: later writes to it by the owner change the tensor at an undefined time, so it must not be written while the
    tensor is alive (`x.to("jax")` copies, as in torch). A write to the tensor by torch gives the tensor its own memory, and no program
    donates the shared memory.

    Args:
        source: an array or tensor with `__dlpack__`; with a mesh, a sequence of them, one per device in the order of the mesh.
        mesh: the mesh of the shards, with `partition_spec`. Each shard must be on its device. A shard on a virtual CPU device other
            than the first is copied, because DLPack has only one CPU device.

    Raises:
        SpmdError: the source requires grad, or its memory is not contiguous or not aligned to 64 bytes, as jax needs.
        SpecError: there is not one shard per device, or their shapes differ.
    """
    with exact_dtypes():
        if mesh is None:
            return from_jax(_shared(source, None))
        shards, spec = list(source), ShardingSpec(as_mesh(mesh), partition_spec if partition_spec is not None else ())
        mesh_devices: list[Any] = list(spec.mesh.to_jax().devices.flat)
        shapes = {tuple(shard.shape) for shard in shards}
        if len(shards) != len(mesh_devices) or len(shapes) != 1:
            raise SpecError(
                message(
                    f"from_dlpack was given {len(shards)} shards of shapes {sorted(shapes)} for a mesh of {len(mesh_devices)} devices",
                    fix="pass one shard per device, all of one shape; pad them, or use mark_sharding(x.to('jax'), ...)",
                )
            )
        (shape,) = shapes
        global_shape = tuple(size * count for size, count in zip(shape, _shards_per_dim(spec, len(shape)), strict=True))
        arrays = [_shared(shard, device) for shard, device in zip(shards, mesh_devices, strict=True)]
        return from_jax(jax.make_array_from_single_device_arrays(global_shape, spec.to_jax(), arrays))


def _shards_per_dim(spec: ShardingSpec, rank: int) -> list[int]:
    ones = (1,) * rank
    spec.validate(ones)
    return list(spec.padded_shape(ones))


def _shared(source: Any, device: Any) -> Any:
    """The memory as an array. It is copied for virtual CPU devices other than the first."""
    if isinstance(source, torch.Tensor) and source.device.type == "jax":
        raise SpmdError(message("from_dlpack was given a tensor on device 'jax'", *called_at(), fix="use the tensor itself"))
    copies = device is not None and device.platform == "cpu" and device != devices()[0]
    try:
        return jax.dlpack.from_dlpack(source, device=device, copy=None if copies else False)
    except (BufferError, ValueError, TypeError, RuntimeError) as error:
        raise SpmdError(
            message(
                f"memory of shape {tuple(getattr(source, 'shape', ()))} cannot be shared with JAX",
                *called_at(),
                str(error).splitlines()[0],
                fix="copy it: torch.as_tensor(source).detach().to('jax')",
            )
        ) from error


__all__ = ["from_dlpack"]
