"""Memory functions of `torch.accelerator` and `torch.jax`, from jax's statistics of the chips of this process.

PyTorch sees all chips as one device, so each figure is that of the worst chip, which would run out of memory first. jax provides
statistics on TPUs and GPUs. On CPU devices these functions raise, and so do the functions with which torch resets statistics.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import jax

import mesh
from mesh import size_text
from spmd.base._errors import SpmdError, called_at, message
from spmd.patches._table import is_expected, replace_everywhere


def empty_cache() -> None:
    """Does nothing: jax frees an array's memory together with the array, and cannot return the memory of its pool."""


def empty_host_cache() -> None:
    """Does nothing: pinned memory is ordinary memory on this device, and it is not cached."""


def memory_stats(device_index: Any = None, /) -> OrderedDict[str, Any]:
    """Bytes by torch's names: `allocated_bytes.all.current` and `.peak`; for jax's pool `reserved_bytes.all.current` and `.peak`.

    Raises:
        SpmdError: jax provides no statistics on this platform.
    """
    chips = _chips()
    kinds = {
        "allocated_bytes.all.current": ("bytes_in_use",),
        "allocated_bytes.all.peak": ("peak_bytes_in_use", "bytes_in_use"),
        "reserved_bytes.all.current": ("pool_bytes", "bytes_in_use"),
        "reserved_bytes.all.peak": ("peak_pool_bytes", "pool_bytes", "peak_bytes_in_use"),
    }
    return OrderedDict((name, max(_first(chip, keys) for chip in chips)) for name, keys in kinds.items())


def memory_allocated(device_index: Any = None, /) -> int:
    """Bytes of the arrays on the chip."""
    return memory_stats()["allocated_bytes.all.current"]


def max_memory_allocated(device_index: Any = None, /) -> int:
    """The most bytes that were allocated at one time since the process began."""
    return memory_stats()["allocated_bytes.all.peak"]


def memory_reserved(device_index: Any = None, /) -> int:
    """Bytes in jax's memory pool."""
    return memory_stats()["reserved_bytes.all.current"]


def max_memory_reserved(device_index: Any = None, /) -> int:
    """The most bytes in jax's memory pool at one time since the process began."""
    return memory_stats()["reserved_bytes.all.peak"]


def get_memory_info(device_index: Any = None, /) -> tuple[int, int]:
    """(free, total) bytes that jax may use, on the chip with the least free memory."""
    return min((chip["bytes_limit"] - chip["bytes_in_use"], chip["bytes_limit"]) for chip in _chips())


def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    """The figures of `memory_stats` as a table, each of the chip on which it is worst."""
    lines = (f"{size_text(count):>10}  {name.replace('.all.', ', ').replace('_', ' ')}" for name, count in memory_stats().items())
    return "\n".join(["memory of the chip that would run out first", *lines])


def reset_peak_memory_stats(device_index: Any = None, /) -> None:
    """Raises SpmdError: jax's peak is that of the whole process and cannot be reset."""
    raise _no_reset("torch.accelerator.reset_peak_memory_stats")


def reset_accumulated_memory_stats(device_index: Any = None, /) -> None:
    """Raises SpmdError, as `reset_peak_memory_stats` does."""
    raise _no_reset("torch.accelerator.reset_accumulated_memory_stats")


FUNCTIONS = (
    *(empty_cache, empty_host_cache, memory_stats, memory_allocated, max_memory_allocated, memory_reserved, max_memory_reserved),
    *(get_memory_info, memory_summary, reset_peak_memory_stats, reset_accumulated_memory_stats),
)


def register() -> None:
    """Replace torch's functions, which fail with an internal assertion in C++ (`empty_host_cache` even ends the process)."""
    for function in FUNCTIONS:
        target = f"torch.accelerator.memory.{function.__name__}"
        if function is not memory_summary and is_expected(target):
            replace_everywhere(target, function, "torch.accelerator")


def counted() -> list[dict[str, int]]:
    """jax's statistics of the chips of this process that have some."""
    return [counts for counts in _counts() if counts]


def _chips() -> list[dict[str, int]]:
    """jax's statistics of every chip of this process.

    Raises:
        SpmdError: jax provides no statistics on this platform.
    """
    chips = counted()
    if len(chips) < len(_counts()):
        raise SpmdError(
            message(
                f"jax provides no memory statistics on platform {jax.default_backend()!r}",
                *called_at(),
                fix="step.memory() returns the memory of a compiled function on each device",
            )
        )
    return chips


def _counts() -> list[dict[str, int] | None]:
    own: list[Any] = [device for device in mesh.devices() if device.process_index == jax.process_index()]
    return [chip.memory_stats() for chip in own]


def _first(chip: dict[str, int], keys: tuple[str, ...]) -> int:
    return next((chip[key] for key in keys if key in chip), 0)


def _no_reset(name: str) -> SpmdError:
    return SpmdError(
        message(
            f"{name} cannot reset jax's statistics: they are for the whole process",
            *called_at(),
            fix="compare torch.accelerator.memory_allocated() before and after, or read step.memory()",
        )
    )
