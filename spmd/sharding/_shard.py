"""`XLAShard`: one device's shard of a sharded tensor, with the attributes of torch_xla's class: data, indices, device, replica.

The data is fetched on first access, into a CPU tensor that the shard owns. The program may change it and pass it to
`XLAShardedTensor.load_local_shards_`. A shard does not know its mesh.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import EllipsisType
from typing import Any

import numpy as np
import torch

from spmd.base import _counters
from spmd.base._convert import host_tensor

Indices = tuple[slice, ...] | list[slice] | EllipsisType


class XLAShard:
    """One device's shard of a sharded tensor.

    Attributes:
        indices: the part of the global tensor in this shard: a slice per dim, or `...` for all of it.
        shard_device: name of its device ("TPU:0", "CPU:3").
        replica_id: 0 for the first copy of this shard, then counting up.
        device: its jax device; None for a shard that the program made itself.
    """

    def __init__(self, data: torch.Tensor, indices: Indices, shard_device: str, replica_id: int) -> None:
        """A shard made by the program; argument order of torch_xla."""
        self._data: torch.Tensor | None = data
        self._array: Any = None
        self.indices = indices
        self.shard_device = shard_device
        self.replica_id = replica_id
        self.device: Any = None

    @classmethod
    def of_array(cls, array: Any, indices: Indices, replica_id: int, device: Any) -> XLAShard:
        """The shard `array` on `device`, fetched when `data` is first read."""
        shard = cls(torch.empty(0), indices, f"{device.platform.upper()}:{device.id}", replica_id)
        shard._data, shard._array, shard.device = None, array, device
        return shard

    @property
    def data(self) -> torch.Tensor:
        """The shard as a CPU tensor: a copy made on first access, counted as a host read."""
        if self._data is None:
            _counters.count("host_reads")
            self._data = host_tensor(np.asarray(self._array))
        return self._data

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        self._data = value

    @property
    def unpadded_data(self) -> torch.Tensor:
        """`data` without the padding that makes all shards equal in size."""
        return self.data[self._inside()]

    @unpadded_data.setter
    def unpadded_data(self, value: torch.Tensor) -> None:
        self.data[self._inside()] = value

    def _inside(self) -> Any:
        if isinstance(self.indices, EllipsisType):
            return ...
        return tuple(slice(None) if s.stop is None else slice(0, s.stop - (s.start or 0)) for s in self.indices)

    def __repr__(self) -> str:
        listed: Sequence[slice] = () if isinstance(self.indices, EllipsisType) else self.indices
        at = ", ".join("full" if s == slice(None) else f"{s.start or 0}:{s.stop}" for s in listed) if listed else "all"
        return f"XLAShard([{at}], replica_id={self.replica_id}, device={self.device or self.shard_device})"
