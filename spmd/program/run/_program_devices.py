"""The devices that a program runs on, and its values brought there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from mesh import Mesh, ShardingSpec
from spmd.device._arrays import moved
from spmd.device._storage import Buffer
from spmd.program.xla._executable import on_all_devices
from spmd.program.xla._target import lies_on, platform_of, program_mesh


@dataclass(frozen=True)
class ProgramDevices:
    """Attributes:
    mesh: None: one device.
    platform: "cpu", "gpu" or "tpu".
    """

    mesh: Mesh | None
    platform: str

    @staticmethod
    def of(buffers: Sequence[Buffer], layouts: Iterable[ShardingSpec]) -> ProgramDevices:
        """Those of a program with these buffers, which constrains values to these layouts."""
        mesh = program_mesh(buffers, layouts)
        return ProgramDevices(mesh, platform_of(mesh))

    @property
    def is_ahead(self) -> bool:
        """Whether they are of a topology that is not here."""
        return self.mesh is not None and self.mesh.topology is not None

    @cached_property
    def replicated(self) -> NamedSharding | None:
        """The layout of a value that each of them holds whole; None for one device."""
        return None if self.mesh is None else NamedSharding(self.mesh.to_jax(), jax.sharding.PartitionSpec())

    @property
    def is_on_cpu(self) -> bool:
        """Whether they are CPU devices."""
        return self.platform == "cpu"

    @property
    def are_paced(self) -> bool:
        """Whether Python must not get far ahead of them. See Note [Pacing]."""
        return self.replicated is not None and self.replicated.num_devices > 1 and self.is_on_cpu

    def settle(self, buffer: Buffer) -> None:
        """Bring the buffer's value to where a program wants it: unmarked values on a mesh are replicated."""
        buffer.settle()
        if buffer.value is None:
            buffer.place(buffer.annotation.to_jax() if buffer.annotation is not None else self.replicated)
        elif buffer.annotation is not None and buffer.value.shape != buffer.stored:
            buffer.place(buffer.annotation.to_jax())
        elif self.mesh is not None and not lies_on(buffer.value, self.mesh):
            assert self.replicated is not None
            buffer.value = moved(buffer.value, self.replicated)

    def example(self, buffer: Buffer) -> Any:
        """The buffer's array, or its shape, dtype and sharding for a program that is only compiled."""
        if not self.is_ahead:
            return buffer.value
        sharding = self.replicated if buffer.annotation is None else buffer.annotation.to_jax()
        return jax.ShapeDtypeStruct(buffer.stored, buffer.dtype, sharding=sharding)

    def array_of(self, host: np.ndarray[Any, Any]) -> Any:
        """Host values on each of them, or what stands for that in a program that is only compiled."""
        if self.is_ahead:
            return jax.ShapeDtypeStruct(host.shape, host.dtype, sharding=self.replicated)
        return on_all_devices(host, self.replicated)


__all__ = ["ProgramDevices"]
