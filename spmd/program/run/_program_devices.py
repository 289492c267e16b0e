"""The devices that a program runs on, and placement of its values there."""

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
from spmd.device._buffer_stack import BufferStack
from spmd.device._storage import Buffer
from spmd.program.xla._executable import on_all_devices
from spmd.program.xla._target import lies_on, platform_of, program_mesh


@dataclass(frozen=True)
class ProgramDevices:
    """The devices of a program.

    Attributes:
        mesh: the mesh that the program runs on; None for one device.
        platform: "cpu", "gpu" or "tpu".
    """

    mesh: Mesh | None
    platform: str

    @staticmethod
    def of(buffers: Sequence[Buffer], layouts: Iterable[ShardingSpec]) -> ProgramDevices:
        """The devices of a program that uses `buffers` and constrains values to `layouts` (see `program_mesh`)."""
        mesh = program_mesh([b.annotation for b in buffers], layouts, [b.value for b in buffers])
        return ProgramDevices(mesh, platform_of(mesh))

    @property
    def is_ahead(self) -> bool:
        """Whether they belong to a topology that is not attached, so the program is compiled ahead of time."""
        return self.mesh is not None and self.mesh.topology is not None

    @cached_property
    def replicated(self) -> NamedSharding | None:
        """The sharding of a replicated value; None for one device."""
        return None if self.mesh is None else NamedSharding(self.mesh.to_jax(), jax.sharding.PartitionSpec())

    @property
    def is_on_cpu(self) -> bool:
        """Whether they are CPU devices."""
        return self.platform == "cpu"

    @property
    def are_paced(self) -> bool:
        """Whether Python must not run far ahead of the devices. See Note [Pacing]."""
        return self.replicated is not None and self.replicated.num_devices > 1 and self.is_on_cpu

    def place(self, buffer: Buffer) -> None:
        """Move the buffer's value to the devices, with the sharding of its annotation. An unmarked value is replicated over the mesh."""
        buffer.settle()
        if buffer.value is None:
            buffer.place(buffer.annotation.to_jax() if buffer.annotation is not None else self.replicated)
        elif buffer.annotation is not None and buffer.value.shape != buffer.stored:
            buffer.place(buffer.annotation.to_jax())
        elif self.mesh is not None and not lies_on(buffer.value, self.mesh):
            assert self.replicated is not None
            buffer.value = moved(buffer.value, self.replicated)

    def example(self, buffer: Buffer) -> Any:
        """The buffer's array or, for a program that is compiled ahead of time, its shape, dtype and sharding."""
        if not self.is_ahead:
            return buffer.value
        sharding = self.replicated if buffer.annotation is None else buffer.annotation.to_jax()
        return jax.ShapeDtypeStruct(buffer.stored, buffer.dtype, sharding=sharding)

    def state_sharding(self, buffer: Buffer) -> Any:
        """The sharding of the gradient and the optimizer state of a parameter, whose value is part of a stack after a rolled program."""
        if buffer.state_annotation is not None:
            return buffer.state_annotation.to_jax()
        if not self.is_ahead and buffer.value is not None and (self.mesh is None or lies_on(buffer.value, self.mesh)):
            return buffer.value.sharding
        if buffer.annotation is not None:
            return buffer.annotation.to_jax()
        return buffer.queue.member_sharding() or self.replicated if isinstance(buffer.queue, BufferStack) else self.replicated

    def array_of(self, host: np.ndarray[Any, Any]) -> Any:
        """A host array, replicated over the devices; for a program that is compiled ahead of time, its shape, dtype and sharding."""
        if self.is_ahead:
            return jax.ShapeDtypeStruct(host.shape, host.dtype, sharding=self.replicated)
        return on_all_devices(host, self.replicated)


__all__ = ["ProgramDevices"]
