"""What the chips that programs run on can do, from their makers' data sheets."""

from __future__ import annotations

# Dense bfloat16 FLOPs per second of one chip; jax's `device_kind` contains the name.
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
    """Of one chip; None for a kind that the table lacks."""
    return next((flops for name, flops in PEAK_FLOPS.items() if name in device_kind), None)


__all__ = ["PEAK_FLOPS", "peak_flops"]
