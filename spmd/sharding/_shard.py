"""`XLAShard`: one device's piece of a sharded tensor, as torch_xla's class of that name: data, indices, device, replica.

The data is fetched when it is first asked for, into a CPU tensor of the shard's own, which the program may change and hand to
`XLAShardedTensor.load_local_shards_`. It knows no mesh.
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
    """One device's piece of a sharded tensor.

    Attributes:
        indices: the part of the global tensor that it holds: a slice per dim, or `...` for all of it.
        shard_device: the device that holds it, as text ("TPU:0", "CPU:3").
        replica_id: 0 for the first copy of this piece, counting up over its copies.
        device: the jax device that holds it; None for a shard that the program made itself.
    """

    def __init__(self, data: torch.Tensor, indices: Indices, shard_device: str, replica_id: int) -> None:
        """A piece made by the program, with torch_xla's order of arguments."""
        self._data: torch.Tensor | None = data
        self._array: Any = None
        self.indices = indices
        self.shard_device = shard_device
        self.replica_id = replica_id
        self.device: Any = None

    @classmethod
    def of_array(cls, array: Any, indices: Indices, replica_id: int, device: Any) -> XLAShard:
        """The piece `array` on `device`; fetched when somebody asks for `data`."""
        shard = cls(torch.empty(0), indices, f"{device.platform.upper()}:{device.id}", replica_id)
        shard._data, shard._array, shard.device = None, array, device
        return shard

    @property
    def data(self) -> torch.Tensor:
        """The piece as a CPU tensor: a copy from the time of the first look, counted as a host read."""
        if self._data is None:
            _counters.count("host_reads")
            self._data = host_tensor(np.asarray(self._array))
        return self._data

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        self._data = value

    @property
    def unpadded_data(self) -> torch.Tensor:
        """The part of `data` that is part of the global tensor: without what was added to make the pieces equal."""
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
