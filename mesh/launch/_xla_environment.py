"""The environment variables with which torch_xla configures a script."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mesh._mesh_errors import DeviceError, message


@dataclass(frozen=True)
class TorchXlaEnvironment:
    """The devices and mode that torch_xla's variables request.

    Attributes:
        device: `PJRT_DEVICE` ("CPU", "TPU", "CUDA"), or None.
        num_cpu_devices: `CPU_NUM_DEVICES`, or None.
        auto_sharding: whether `XLA_AUTO_SPMD` is set.
    """

    device: str | None
    num_cpu_devices: int | None
    auto_sharding: bool


def torch_xla_environment() -> TorchXlaEnvironment:
    """Read torch_xla's variables from the environment.

    Raises:
        DeviceError: `CPU_NUM_DEVICES` is not a positive integer.
    """
    count = os.environ.get("CPU_NUM_DEVICES")
    if count is not None and (not count.isdecimal() or int(count) < 1):
        raise DeviceError(message(f"CPU_NUM_DEVICES={count!r} is not a positive number of devices", fix="CPU_NUM_DEVICES=8"))
    return TorchXlaEnvironment(
        device=os.environ.get("PJRT_DEVICE"),
        num_cpu_devices=None if count is None else int(count),
        auto_sharding=os.environ.get("XLA_AUTO_SPMD", "0") not in ("", "0", "false"),
    )


def check_env_flag(name: str, default: str = "") -> bool:
    """Whether a variable is "true" or a positive number, as torch_xla reads its flags."""
    flag = os.environ.get(name, default)
    return flag == "true" or (flag.isdigit() and int(flag) > 0)


def getenv_as(name: str, type: Callable[[Any], Any], defval: Any = None) -> Any:
    """A variable converted by `type` (for bool: from a number), or `defval` if it is not set."""
    text = os.environ.get(name)
    if text is None:
        return defval
    return bool(int(text)) if type is bool else type(text)


def set_spmd_flags(auto: bool = False) -> None:
    """Set the environment variables that torch_xla's `use_spmd` sets, for programs that read them."""
    os.environ["XLA_USE_SPMD"] = "1"
    if auto:
        os.environ["XLA_AUTO_SPMD"] = "1"


def master_address() -> str:
    """Host of the process that coordinates the job: `MASTER_ADDR`, or "localhost"."""
    return os.environ.get("MASTER_ADDR", "localhost")
