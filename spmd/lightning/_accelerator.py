"""Lightning's accelerator "jax": all chips of this process, which PyTorch sees as one device."""

# pyright: reportMissingImports=none, reportUnknownVariableType=none, reportUntypedBaseClass=none, reportUnknownMemberType=none

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.accelerators import Accelerator

from mesh import device_count
from spmd.base._errors import SpmdError, message
from spmd.device._memory_statistics import memory_stats

NAME = "jax"


class JaxAccelerator(Accelerator):
    """Accelerator for Trainer and Fabric. The strategy's mesh determines which chips are used, and how."""

    def setup_device(self, device: torch.device) -> None:
        """Check the device; there is nothing to set up.

        Raises:
            SpmdError: the strategy's device is not device 'jax'.
        """
        if device.type != NAME:
            what = f"accelerator='jax' has a strategy for device '{device}'"
            raise SpmdError(message(what, fix="Trainer(accelerator='jax', strategy='spmd')"))

    def teardown(self) -> None:
        """Nothing to do."""

    @staticmethod
    def parse_devices(devices: Any) -> int:
        """The number of PyTorch devices, always 1. "auto", -1, 1 and the number of chips all select every chip.

        Raises:
            SpmdError: any other value.
        """
        if devices in ("auto", -1, "-1", 1, "1", device_count(), str(device_count())):
            return 1
        what = f"devices={devices!r}: this process has {device_count()} devices, and the mesh selects among them"
        fix = "strategy=spmd.lightning.SpmdStrategy(spmd.Mesh(range(4), (4,), ('fsdp',)))"
        raise SpmdError(message(what, fix=fix))

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device(NAME, 0)]

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return NAME

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        """Bytes in use on the fullest chip; empty if jax reports none (CPU devices)."""
        try:
            return dict(memory_stats())
        except SpmdError:
            return {}

    @classmethod
    def register_accelerators(cls, accelerator_registry: Any) -> None:
        accelerator_registry.register(NAME, cls, description="all jax devices of this process", override=True)


__all__ = ["NAME", "JaxAccelerator"]
