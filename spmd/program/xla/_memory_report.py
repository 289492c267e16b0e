"""Memory of a compiled program on one device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax

from mesh import size_text

if TYPE_CHECKING:
    from jax.stages import Compiled


@dataclass(frozen=True)
class MemoryReport:
    """Per-device memory of a compiled program, as planned by the compiler.

    Attributes:
        argument_bytes, output_bytes, temp_bytes: arguments, outputs and temporaries.
        alias_bytes: outputs stored in donated arguments.
        generated_code_bytes: the program's code.
        peak_bytes: maximum of all that is allocated at the same time.
    """

    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    alias_bytes: int
    generated_code_bytes: int
    peak_bytes: int

    def __str__(self) -> str:
        donated = f" ({size_text(self.alias_bytes)} in donated arguments)" if self.alias_bytes else ""
        lines = (
            f"{size_text(self.peak_bytes)} of memory on each device, at the peak:",
            f"  {size_text(self.argument_bytes):>10}  arguments: state and batch",
            f"  {size_text(self.output_bytes):>10}  outputs{donated}",
            f"  {size_text(self.temp_bytes):>10}  temporaries",
            *([f"  {size_text(self.generated_code_bytes):>10}  the program itself"] if self.generated_code_bytes else []),
        )
        return "\n".join(lines)


def memory(compiled: Compiled) -> MemoryReport:
    """Memory of one device, from `jax.stages.Compiled.memory_analysis()`.

    Raises:
        ValueError: the backend provides no memory analysis.
    """
    analysis: object = compiled.memory_analysis()
    if analysis is None:
        raise ValueError("this backend gives no memory analysis\n  fix: compile for cpu, gpu or a tpu topology")
    names = ("argument", "output", "temp", "alias", "generated_code")
    argument, output, temp, alias, code = (int(getattr(analysis, f"{name}_size_in_bytes")) for name in names)
    total = argument + output + temp - alias  # an upper bound of the peak; the peak that a TPU reports also includes VMEM
    peak = min(int(getattr(analysis, "peak_memory_in_bytes", 0)) or total, total)
    if _is_on_cpu(compiled):  # XLA:CPU reports a peak without temporaries, and frees nothing before the call ends
        peak = total
    return MemoryReport(argument, output, temp, alias, code, peak)


def _is_on_cpu(compiled: Compiled) -> bool:
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    return any(device.platform == "cpu" for sharding in shardings[:1] for device in sharding.device_set)


__all__ = ["MemoryReport", "memory"]
