"""`from_dlpack`: memory of torch on the CPU or on CUDA, of numpy, of any library with DLPack, as tensors on device 'jax'; not copied.

x = spmd.from_dlpack(torch.randn(64, 64))                          # the same memory
x = spmd.from_dlpack(pieces, m, ("data", None))                    # one piece for each device of the mesh
y = torch.from_dlpack(spmd.to_jax(x))                              # and back: jax's own, also shard by shard
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
    """A tensor on device 'jax' over memory that somebody else owns.

    The memory is shared: whoever writes to it afterwards writes to the tensor, at a time of his own, so nobody should while it lives.
    (`x.to("jax")` copies, as torch promises.) What torch does to the tensor gives it memory of its own, and no program takes this.

    Args:
        source: an array or tensor with `__dlpack__`; with a mesh a sequence of them, one per device in the mesh's order.
        mesh: where the pieces lie, with `partition_spec`. Each must be on its device or, for virtual CPU devices but the first, is
            copied there: DLPack has one CPU.

    Raises:
        SpmdError: the source requires grad, or its memory cannot be jax's: not contiguous, not aligned to 64 bytes.
        SpecError: there is not one piece per device, or their shapes are not alike.
    """
    with exact_dtypes():
        if mesh is None:
            return from_jax(_shared(source, None))
        pieces, spec = list(source), ShardingSpec(as_mesh(mesh), partition_spec if partition_spec is not None else ())
        places: list[Any] = list(spec.mesh.to_jax().devices.flat)
        shapes = {tuple(piece.shape) for piece in pieces}
        if len(pieces) != len(places) or len(shapes) != 1:
            raise SpecError(
                message(
                    f"from_dlpack was given {len(pieces)} pieces of shapes {sorted(shapes)} for a mesh of {len(places)} devices",
                    fix="pass one piece per device, all of one shape; pad them, or use mark_sharding(x.to('jax'), ...)",
                )
            )
        (shape,) = shapes
        whole = tuple(size * shards for size, shards in zip(shape, _shards_per_dim(spec, len(shape)), strict=True))
        arrays = [_shared(piece, device) for piece, device in zip(pieces, places, strict=True)]
        return from_jax(jax.make_array_from_single_device_arrays(whole, spec.to_jax(), arrays))


def _shards_per_dim(spec: ShardingSpec, rank: int) -> list[int]:
    ones = (1,) * rank
    spec.validate(ones)
    return list(spec.padded_shape(ones))


def _shared(source: Any, device: Any) -> Any:
    """The memory as an array; on another virtual CPU device than the first, a copy of it."""
    if isinstance(source, torch.Tensor) and source.device.type == "jax":
        raise SpmdError(message("from_dlpack was given a tensor on device 'jax'", *called_at(), fix="it is one already"))
    copies = device is not None and device.platform == "cpu" and device != devices()[0]
    try:
        return jax.dlpack.from_dlpack(source, device=device, copy=None if copies else False)
    except (BufferError, ValueError, TypeError, RuntimeError) as error:
        raise SpmdError(
            message(
                f"memory of shape {tuple(getattr(source, 'shape', ()))} cannot be shared with JAX",
                *called_at(),
                str(error).splitlines()[0],
                fix="let it be copied: torch.as_tensor(source).detach().to('jax')",
            )
        ) from error


__all__ = ["from_dlpack"]
