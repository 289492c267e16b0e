"""How much memory a compiled program takes on one device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mesh import size_text

if TYPE_CHECKING:
    from jax.stages import Compiled


@dataclass(frozen=True)
class MemoryReport:
    """Per-device memory of a compiled program as the compiler planned it; `alias_bytes` are outputs that live in donated arguments."""

    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    alias_bytes: int
    generated_code_bytes: int
    peak_bytes: int

    def __str__(self) -> str:
        parts = ((name.removesuffix("_bytes").replace("_", " "), count) for name, count in vars(self).items())
        return "per device: " + ", ".join(f"{name} {size_text(count)}" for name, count in parts)


def memory(compiled: Compiled) -> MemoryReport:
    """Memory of one device, from `jax.stages.Compiled.memory_analysis()`.

    Raises:
        ValueError: the backend has no memory analysis.
    """
    analysis: object = compiled.memory_analysis()
    if analysis is None:
        raise ValueError("this backend gives no memory analysis\n  fix: compile for cpu, gpu or a tpu topology")
    names = ("argument", "output", "temp", "alias", "generated_code")
    argument, output, temp, alias, code = (int(getattr(analysis, f"{name}_size_in_bytes")) for name in names)
    total = argument + output + temp - alias  # all allocations of the program; the TPU's own figure for the peak counts VMEM on top
    peak = min(int(getattr(analysis, "peak_memory_in_bytes", 0)) or total, total)
    return MemoryReport(argument, output, temp, alias, code, peak)


__all__ = ["MemoryReport", "memory"]
