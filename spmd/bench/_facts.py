"""What compiled programs and models say of themselves: FLOPs, collectives, memory; and from times the share of a chip's peak."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spmd.base._chips import peak_flops as peak_flops
from spmd.base._torch import FakeTensorMode
from spmd.bench._task import Job
from spmd.program.xla import _hlo

MFU = "MFU = model FLOPs of a step / (seconds of a step * chips * peak FLOPs of a chip)"


def program_facts(hlo: str, found: dict[str, Any], job: Job) -> dict[str, Any]:
    """Per device and step: collectives by kind and axis with bytes, FLOPs, instructions, memory; executables and retraces.

    Args:
        hlo: the program's text.
        found: what the peer's `program` returned.
    """
    names, sizes = tuple(name for name, _ in job.axes), tuple(size for _, size in job.axes)
    report = _hlo.collectives(hlo, names, sizes)
    rows: dict[str, dict[str, int]] = {}
    for item in report:
        row = rows.setdefault(f"{item.kind} over {'+'.join(item.axes) or '?'}", {"count": 0, "bytes": 0})
        row["count"] += item.count
        row["bytes"] += item.count * item.num_bytes
    memory = found["memory"]  # the peak as all allocations: XLA:CPU's own figure leaves the temporaries out
    peak = memory["argument_bytes"] + memory["output_bytes"] + memory["temp_bytes"] - memory["alias_bytes"]
    return {
        "collectives": dict(sorted(rows.items())),
        "collective_bytes": report.num_bytes,
        "flops": _hlo.flops(hlo),
        "instructions": _hlo.instruction_count(hlo),
        **memory,
        "peak_bytes": peak,
        "stages": found["stages"],
        "executables": found["executables"],
        "retraces": found["retraces"],
    }


def read_program(path: Path, found: dict[str, Any], job: Job) -> dict[str, Any] | None:
    """The facts of the program whose text the peer wrote to `path`; None if it has no such program."""
    return program_facts(path.read_text(encoding="utf-8"), found, job) if found else None


def model_flops(job: Job) -> int:
    """FLOPs of forward and backward of the whole batch, counted by torch on a model without memory."""
    import dataclasses

    import torch
    from torch.utils.flop_counter import FlopCounterMode

    job = dataclasses.replace(job, topology=job.topology or "none", dtype="float32")  # a topology: tensors on the meta device
    model, batch = job.model(), job.batches()[0]
    # Fake tensors made on the way, not only meta ones: a model that looks at values unless it is traced sees that it is.
    with FakeTensorMode(allow_non_fake_inputs=True), FlopCounterMode(display=False) as counter, torch.device("meta"):
        job.script.loss(model, *batch).backward()
    return counter.get_total_flops()


def mfu(flops: int, step_s: float, num_chips: int, peak: float | None) -> float | None:
    """See `MFU`; None on a chip whose peak is not known."""
    return None if peak is None else flops / (step_s * num_chips * peak)
