"""Figures of compiled programs and models: FLOPs, collectives, memory, and model FLOPs utilization (MFU)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spmd.base._chips import peak_flops as peak_flops
from spmd.base._torch import FakeTensorMode
from spmd.bench._task import Job
from spmd.program.xla import _hlo

MFU = "MFU = model FLOPs of a step / (seconds of a step * chips * peak FLOPs of a chip)"


def program_facts(hlo: str, found: dict[str, Any], job: Job) -> dict[str, Any]:
    """Figures per device and step: collectives by kind and axis, FLOPs, instructions, memory; also executables and retraces.

    Args:
        hlo: HLO text of the program.
        found: the result of the peer's `program`.
        job: gives the axes of the mesh.
    """
    names, sizes = tuple(name for name, _ in job.axes), tuple(size for _, size in job.axes)
    report = _hlo.collectives(hlo, names, sizes)
    rows: dict[str, dict[str, int]] = {}
    for item in report:
        row = rows.setdefault(f"{item.kind} over {'+'.join(item.axes) or '?'}", {"count": 0, "bytes": 0})
        row["count"] += item.count
        row["bytes"] += item.count * item.num_bytes
    memory = found["memory"]  # the peak counts all allocations: XLA:CPU's own figure omits temporaries
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
    """The figures of the program whose text the peer wrote to `path`, or None if the peer has no program."""
    return program_facts(path.read_text(encoding="utf-8"), found, job) if found else None


def model_flops(job: Job) -> int:
    """FLOPs of forward and backward on the whole batch, counted by torch on fake tensors."""
    import dataclasses

    import torch
    from torch.utils.flop_counter import FlopCounterMode

    job = dataclasses.replace(job, topology=job.topology or "none", dtype="float32")  # with a topology the tensors are on the meta device
    model, batch = job.model(), job.batches()[0]
    # Fake tensors, not only meta tensors: some models read tensor values unless they detect that they are being traced.
    with FakeTensorMode(allow_non_fake_inputs=True), FlopCounterMode(display=False) as counter, torch.device("meta"):
        job.script.loss(model, *batch).backward()
    return counter.get_total_flops()


def mfu(flops: int, step_s: float, num_chips: int, peak: float | None) -> float | None:
    """Model FLOPs utilization, see `MFU`. None if the chip's peak is unknown."""
    return None if peak is None else flops / (step_s * num_chips * peak)
