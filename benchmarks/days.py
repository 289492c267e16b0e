"""Runs a small job with all features for many steps, and measures the growth of its host resources after the first 500 steps.

    python benchmarks/days.py                 # 10,000 steps
    python benchmarks/days.py --steps 1200

Each step takes a new batch object. Every 50 steps the job evaluates batches whose results are never read. Every 100 steps a batch has a
size without a cached program, so a program is traced and compiled, and another is evicted. Every 250 steps the job saves a checkpoint
and restores it. The figures are resident and allocated memory, threads, open files, buffers of tensors, jax arrays and cached plans.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import platform
import resource
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import torch
import tyro
from torch import nn

import spmd
from mesh import Mesh, virtual_devices
from spmd.device._storage import Buffer

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Options:
    """Attributes:
    warm: steps before the first measurement, and between measurements.
    json: file for the result; None only prints it.
    """

    steps: int = 10_000
    warm: int = 500
    devices: int = 2
    json: Path | None = ROOT / "benchmarks" / "results" / "days.json"


class _Allocated(ctypes.Structure):
    """glibc's `struct mallinfo2`, which covers all arenas."""

    _NAMES = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = [(name, ctypes.c_size_t) for name in _NAMES]


def allocated_mb() -> float | None:
    """MiB that the process has allocated and not freed. None if the C library is not glibc."""
    if platform.libc_ver()[0] != "glibc":
        return None
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _Allocated
    found = mallinfo2()
    return round((found.uordblks + found.hblkhd) / 2**20, 1)


def counts() -> dict[str, float | None]:
    """Current resources of this process. Resident memory includes memory that the allocator has not returned; allocated memory does not."""
    gc.collect()
    status = Path("/proc/self/statm").read_text(encoding="ascii").split()
    adapters = [o for o in gc.get_objects() if type(o).__name__ == "Adapter" and hasattr(o, "plans")]
    return {
        "resident_mb": round(int(status[1]) * resource.getpagesize() / 2**20, 1),
        "allocated_mb": allocated_mb(),
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
        "buffers": sum(isinstance(o, Buffer) for o in _tensors_buffers()),
        "arrays": len(jax.live_arrays()),
        "plans": sum(len(a.plans) for a in adapters),
        "objects": len(gc.get_objects()),
    }


def _tensors_buffers() -> list[Any]:
    storages = (getattr(o, "untyped_storage", None) for o in gc.get_objects() if issubclass(type(o), torch.Tensor))
    return list({id(b): b for s in storages if s is not None and (b := getattr(s(), "spmd_buffer", None)) is not None}.values())


def run(options: Options) -> None:
    """Run the job."""
    virtual_devices(options.devices)
    mesh = Mesh(range(options.devices), (options.devices,), ("data",))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 8)).to("jax")
    for p in model.parameters():
        spmd.mark_sharding(p, mesh, (None,) * p.ndim)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)

    @spmd.compile(max_programs=4, max_retraces=1_000_000)
    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    @spmd.compile(max_programs=4, max_retraces=1_000_000)
    def evaluate(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return (model(x) - x).square().mean()

    def batch(rows: int) -> torch.Tensor:
        return spmd.mark_sharding(torch.randn(rows, 8).to("jax"), mesh, ("data", None))

    measured: dict[int, dict[str, float | None]] = {}
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for i in range(1, options.steps + 1):
            loss = step(batch(8 if i % 100 else 10 + 2 * (i // 100 % 40)))
            scheduler.step()
            if i % 20 == 0:
                loss.item()
            if i % 50 == 0:
                model.eval()
                for _ in range(10):
                    evaluate(batch(8))
                model.train()
            if i % 250 == 0:
                state = {"model": model, "optimizer": optimizer, "step": i}
                spmd.checkpoint.save(folder, i, state, keep=2, wait=True)
                spmd.checkpoint.restore(folder, state)
            if i % options.warm == 0:
                measured[i] = counts()
                write(options, measured, time.perf_counter() - start)


def write(options: Options, measured: dict[int, dict[str, float | None]], seconds: float) -> None:
    """Write all measurements so far, and the growth from the first to the last."""
    first, last = measured[min(measured)], measured[max(measured)]
    pairs = ((name, first[name], now) for name, now in last.items())
    growth = {name: round(now - before, 1) for name, before, now in pairs if before is not None and now is not None}
    machine = {"cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1)}
    result = {"steps": max(measured), "since": min(measured), "growth": growth, "seconds": round(seconds), **machine, "held": measured}
    print(json.dumps(result), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    run(tyro.cli(Options))
