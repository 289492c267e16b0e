"""`torch_xla.runtime`."""

from __future__ import annotations

from typing import Any

import jax

from mesh import DeviceError, device_attributes, device_count, virtual_devices
from mesh import devices as all_devices
from mesh.launch._xla_environment import check_env_flag, master_address, set_spmd_flags, torch_xla_environment
from spmd.compat.torch_xla._debug_metrics import num_compilations
from spmd.compat.torch_xla._device_names import XLA
from spmd.xla_names import _mode


def xla_device(n: int | None = None, devkind: str | None = None) -> Any:
    return XLA


def use_spmd(auto: bool = False) -> None:
    """Only sets `XLA_USE_SPMD=1`, for code that reads it: one process always drives all devices.

    Raises:
        SpmdError: `auto` is True.
    """
    _mode.use_spmd(auto)
    set_spmd_flags()


def is_spmd() -> bool:
    """True, unless the program itself removed `XLA_USE_SPMD` from the environment."""
    return check_env_flag("XLA_USE_SPMD")


def get_master_ip() -> str:
    """Address of process 0."""
    return master_address()


def device_type() -> str:
    """ "CPU", "TPU" or "CUDA"."""
    asked = torch_xla_environment().device
    platform = all_devices()[0].platform.upper()
    return asked.partition("_")[0] if asked else "CUDA" if platform == "GPU" else platform


def set_device_type(pjrt_device: str) -> None:
    """Select a platform: "CPU" keeps the program off accelerators; other values have no effect."""
    if pjrt_device == "CPU":
        virtual_devices(torch_xla_environment().num_cpu_devices or 1)


def using_pjrt() -> bool:
    return True


def is_bf16_supported() -> bool:
    return True


def global_runtime_device_count() -> int:
    """Number of devices of all processes."""
    return device_count()


def addressable_runtime_device_count() -> int:
    """Number of devices of this process."""
    return jax.local_device_count()


def global_runtime_device_attributes() -> list[dict[str, Any]]:
    """Name of each device and, if known, its coordinates and slice."""
    return device_attributes()


global_device_attributes = global_runtime_device_attributes


def runtime_device_attributes(device: str) -> dict[str, Any]:
    """The attributes of one device, such as "CPU:3"."""
    found = {str(attributes["name"]): attributes for attributes in device_attributes()}
    if device not in found:
        raise DeviceError(f"there is no device {device!r}\n  devices: {', '.join(found)}\n  fix: name one of these")
    return found[device]


def global_device_count() -> int:
    """Number of devices that the program sees: the one that represents all."""
    return 1


addressable_device_count = local_device_count = global_device_count


def world_size() -> int:
    """Number of replicas: always one under SPMD."""
    return 1


def global_ordinal() -> int:
    return 0


def local_ordinal() -> int:
    return 0


def local_process_count() -> int:
    return 1


def process_index() -> int:
    return jax.process_index()


host_index = process_index


def process_count() -> int:
    return jax.process_count()


def initialize_cache(path: str, readonly: bool = False) -> None:
    """Cache compiled programs in a folder for later runs."""
    jax.config.update("jax_compilation_cache_dir", path)


def get_num_cached_compilation_graph() -> int:
    """Number of programs compiled so far."""
    return num_compilations()
