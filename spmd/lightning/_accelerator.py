"""Lightning's accelerator "jax": the one device that all chips of this process are to PyTorch."""

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
    """For Trainer and Fabric; which chips are used, and how, the strategy's mesh says."""

    def setup_device(self, device: torch.device) -> None:
        """Nothing to do for the device.

        Raises:
            SpmdError: another strategy put the model elsewhere.
        """
        if device.type != NAME:
            what = f"accelerator='jax' was given a strategy whose device is '{device}'"
            raise SpmdError(message(what, fix="Trainer(accelerator='jax', strategy='spmd')"))

    def teardown(self) -> None:
        """Nothing to do."""

    @staticmethod
    def parse_devices(devices: Any) -> int:
        """The number of devices to PyTorch, which is one: "auto", -1, 1 and the number of chips all mean every chip.

        Raises:
            SpmdError: another number.
        """
        if devices in ("auto", -1, "-1", 1, "1", device_count(), str(device_count())):
            return 1
        what = f"devices={devices!r}: this process has {device_count()} devices, of which the mesh says which are used"
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
        """Bytes on the chip that has the most; nothing where jax counts none (CPU devices)."""
        try:
            return dict(memory_stats())
        except SpmdError:
            return {}

    @classmethod
    def register_accelerators(cls, accelerator_registry: Any) -> None:
        accelerator_registry.register(NAME, cls, description="all jax devices of this process", override=True)


__all__ = ["NAME", "JaxAccelerator"]
