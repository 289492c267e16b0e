"""`torch_xla._internal.tpu`: properties of the TPU, if there is one."""

from __future__ import annotations

import re

from mesh import devices


def version() -> int:
    """The TPU's generation; 0 without a TPU."""
    found = re.search(r"v(\d+)", devices()[0].device_kind) if devices()[0].platform == "tpu" else None
    return int(found[1]) if found else 0


def num_available_chips() -> int:
    """Number of TPU chips of this job."""
    return sum(device.platform == "tpu" for device in devices())


num_available_devices = num_available_chips


def get_tpu_type() -> str | None:
    """The kind of the chips; None without a TPU."""
    return devices()[0].device_kind if devices()[0].platform == "tpu" else None
