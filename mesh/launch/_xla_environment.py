"""The environment variables of torch_xla that say on which devices a script runs."""

from __future__ import annotations

import os
from dataclasses import dataclass

from mesh._mesh_errors import DeviceError, message


@dataclass(frozen=True)
class TorchXlaEnvironment:
    """What torch_xla's variables ask for.

    Attributes:
        device: `PJRT_DEVICE` ("CPU", "TPU", "CUDA"), or None.
        num_cpu_devices: `CPU_NUM_DEVICES`, or None.
        auto_sharding: `XLA_AUTO_SPMD` is set.
    """

    device: str | None
    num_cpu_devices: int | None
    auto_sharding: bool


def torch_xla_environment() -> TorchXlaEnvironment:
    """Read them now.

    Raises:
        DeviceError: `CPU_NUM_DEVICES` is no positive number.
    """
    count = os.environ.get("CPU_NUM_DEVICES")
    if count is not None and (not count.isdecimal() or int(count) < 1):
        raise DeviceError(message(f"CPU_NUM_DEVICES={count!r} is no number of devices", fix="CPU_NUM_DEVICES=8"))
    return TorchXlaEnvironment(
        device=os.environ.get("PJRT_DEVICE"),
        num_cpu_devices=None if count is None else int(count),
        auto_sharding=os.environ.get("XLA_AUTO_SPMD", "0") not in ("", "0", "false"),
    )
