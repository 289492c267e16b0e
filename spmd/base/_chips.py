"""Peak FLOPs per second of accelerator chips, from the vendors' data sheets."""

from __future__ import annotations

# Dense bfloat16 FLOPs per second of one chip, by a part of jax's `device_kind`. The first match counts.
PEAK_FLOPS = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5p": 459e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
    "A100": 312e12,
    "H100": 989e12,
    "H200": 989e12,
}


def peak_flops(device_kind: str) -> float | None:
    """Dense bfloat16 FLOPs per second of one chip of this `jax.Device.device_kind`; None if the kind is not in the table."""
    return next((flops for name, flops in PEAK_FLOPS.items() if name in device_kind), None)


__all__ = ["PEAK_FLOPS", "peak_flops"]
