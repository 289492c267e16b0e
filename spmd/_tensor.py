"""`XLAShardedTensor`: an ordinary PyTorch tensor on device 'jax' that can say how it is laid out.

It adds properties and nothing else: every operation goes through PyTorch's own dispatch. The annotation lives on the
tensor's storage, so every alias of a marked tensor shares it. It knows no annotation rules (see `_annotate`).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jax.sharding import NamedSharding

import mesh as mesh_
from spmd import _counters
from spmd._convert import host_tensor
from spmd._jax import is_tracer
from spmd.device._layout import annotation_of, hand_over
from spmd.device._serialize import host_copy
from spmd.device._storage import buffer_of, is_whole, load


@dataclass(frozen=True)
class XLAShard:
    """One device's piece of a sharded tensor.

    Attributes:
        indices: the slice of the global tensor that it holds, one per dim.
        replica_id: 0 for the first copy of this piece, counting up over its copies.
        device: the jax device that holds it.
    """

    indices: tuple[slice, ...]
    replica_id: int
    device: Any
    _array: Any

    @property
    def data(self) -> torch.Tensor:
        """The piece as a CPU tensor (a copy; counted as a host read)."""
        _counters.count("host_reads")
        return host_tensor(np.asarray(self._array))

    def __repr__(self) -> str:
        at = ", ".join("full" if s == slice(None) else f"{s.start or 0}:{s.stop}" for s in self.indices)
        return f"XLAShard([{at}], replica_id={self.replica_id}, device={self.device})"


class XLAShardedTensor(torch.Tensor):
    """A tensor on device 'jax' with a layout over a mesh; made by `mark_sharding` and by operations on such tensors."""

    @property
    def sharding_spec(self) -> mesh_.ShardingSpec | None:
        """Mesh and PartitionSpec: the annotation, else what the value's own layout says, else None (one device)."""
        if self.device.type != "jax":
            return annotation_of(self)
        buffer = buffer_of(self)
        if buffer.annotation is not None and is_whole(self, buffer):
            return buffer.annotation
        value = load(self)
        if is_tracer(value) or not isinstance(value.sharding, NamedSharding):
            return None
        return mesh_.ShardingSpec.from_jax(value.sharding, self.dim())

    @property
    def mesh(self) -> mesh_.Mesh | None:
        """The mesh it is laid out over."""
        spec = self.sharding_spec
        return None if spec is None else spec.mesh

    @property
    def partition_spec(self) -> mesh_.PartitionSpec | None:
        """One entry per dim: the mesh axis or axes that split it, or None."""
        spec = self.sharding_spec
        return None if spec is None else spec.partition_spec

    @property
    def sharding_type(self) -> mesh_.ShardingType:
        """Replicated, tiled over all devices, tiled over some axes, ..."""
        spec = self.sharding_spec
        return mesh_.ShardingType.UNKNOWN if spec is None else spec.sharding_type

    @property
    def global_tensor(self) -> torch.Tensor:
        """The same tensor as a plain `torch.Tensor`: same storage, same place in autograd's graph."""
        return self.as_subclass(torch.Tensor)

    @property
    def local_shards(self) -> list[XLAShard]:
        """The pieces that this process's devices hold, in device order."""
        return [XLAShard(s.index, s.replica_id, s.device, s.data) for s in load(self).addressable_shards]

    @property
    def jax(self) -> Any:
        """The value as a `jax.Array` (a tracer inside a traced function). A compiled step that updates this tensor donates
        the array: keep a `jnp.copy` to use it afterwards."""
        return load(self)

    def __copy__(self) -> XLAShardedTensor:
        return become_sharded(copy.copy(self.global_tensor))

    def __deepcopy__(self, memo: dict[int, Any]) -> XLAShardedTensor:
        if id(self) not in memo:
            plain = copy.deepcopy(self.global_tensor if not self.is_leaf else self.global_tensor.detach(), memo)
            hand_over(self, plain)
            plain.requires_grad_(self.requires_grad)
            plain.grad = copy.deepcopy(self.grad, memo)
            memo[id(self)] = become_sharded(plain)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as a CPU tensor that remembers its layout in plain data (see `spmd.device._serialize`)."""
        return host_copy(self).__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        buffer = buffer_of(self) if self.device.type == "jax" else None
        spec = self.sharding_spec if buffer is None or buffer.dropped is None else None
        placed = "" if spec is None else f", spec={tuple(spec.partition_spec)}, mesh={spec.mesh}"
        shape = f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"
        grad = ", requires_grad=True" if self.requires_grad and self.is_leaf else ""
        if self.is_meta or self.numel() > 1000 or (buffer is not None and (is_tracer(buffer.value) or buffer.dropped is not None)):
            return f"{type(self).__name__}({shape}{placed}{grad})"
        values = repr(self.detach().as_subclass(torch.Tensor).cpu()).removeprefix("tensor(").removesuffix(")")
        return f"{type(self).__name__}({values}{placed}{grad})"


class XLAShardedParameter(XLAShardedTensor, torch.nn.Parameter):
    """A marked `nn.Parameter`: still a Parameter to modules and optimizers."""

    def __copy__(self) -> XLAShardedTensor:
        return become_sharded(torch.nn.Parameter(self.global_tensor.detach(), self.requires_grad))

    def __deepcopy__(self, memo: dict[int, Any]) -> XLAShardedTensor:
        if id(self) not in memo:
            twin = torch.nn.Parameter(copy.deepcopy(self.global_tensor.detach(), memo), self.requires_grad)
            hand_over(self, twin)
            memo[id(self)] = become_sharded(twin)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        host = host_copy(self)
        plain = torch.nn.Parameter(host.detach(), self.requires_grad)
        vars(plain).update(vars(host))
        return plain.__reduce_ex__(protocol)


def become_sharded(tensor: torch.Tensor) -> XLAShardedTensor:
    """Change the class of `tensor` in place so that it shows its layout; a Parameter stays one."""
    if not isinstance(tensor, XLAShardedTensor):
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        tensor.__class__ = XLAShardedParameter if is_parameter else XLAShardedTensor
    return tensor  # pyright: ignore[reportReturnType]
