"""Loops that never read a result: eager sharded steps and compiled calls without state, dispatched far ahead of virtual devices.

    python benchmarks/unread.py                                  # every row, each in its own process
    python benchmarks/unread.py --row eager --devices 8 --threads 3 --calls 2000

XLA:CPU deadlocks, and aborts the process after 40 s, if the programs in flight occupy all its threads (Note [Threads of XLA:CPU]).
Programs in flight also occupy memory. A row passes if every loop ends with the right last result, and memory does not grow after a warm-up.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import nn

import spmd
from mesh import Mesh, virtual_devices

ROOT = Path(__file__).resolve().parents[1]
ROWS = ("eager", "compiled")


@dataclass(frozen=True)
class Options:
    """Attributes:
    row: run one row in this process; None runs all rows.
    calls: number of calls in a row, over all its threads.
    json: file for the table.
    """

    row: str | None = None
    devices: int = 8
    threads: int = 1
    calls: int = 2000
    json: Path = ROOT / "benchmarks" / "results" / "unread.json"


def resident_mb() -> float:
    """Resident memory of this process, in MiB."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize() / 2**20


def eager_loop(mesh: Mesh) -> Any:
    """A function that runs a training step whose weight gradient is summed over all devices."""
    model = nn.Linear(64, 256, bias=False).to("jax")
    spmd.mark_sharding(model.weight, mesh, (None, None))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x = spmd.mark_sharding(torch.ones(256, 64, device="jax"), mesh, ("data", None))

    def call() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return call


def compiled_loop(mesh: Mesh) -> Any:
    """A function that calls a compiled evaluation without state."""
    model = nn.Linear(64, 256, bias=False).to("jax")
    spmd.mark_sharding(model.weight, mesh, (None, None))
    x = spmd.mark_sharding(torch.ones(256, 64, device="jax"), mesh, ("data", None))

    @spmd.compile
    def evaluate(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(x).square().mean()

    return lambda: evaluate(x)


def run(options: Options) -> dict[str, Any]:
    """Run one row in this process."""
    virtual_devices(options.devices)
    mesh = Mesh(range(options.devices), (options.devices,), ("data",))
    make = {"eager": eager_loop, "compiled": compiled_loop}[str(options.row)]
    calls = [make(mesh) for _ in range(options.threads)]
    results: list[tuple[float, float]] = []

    def loop(call: Any, count: int) -> None:
        first = call().item()
        for _ in range(count - 1):
            last = call()
        results.append((first, last.item()))

    def all_threads(count: int) -> None:
        threads = [threading.Thread(target=loop, args=(call, count)) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    all_threads(max(100, options.calls // 4) // options.threads)
    before, start = resident_mb(), time.perf_counter()
    all_threads(options.calls // options.threads)
    spent = time.perf_counter() - start
    right = len(results) == 2 * options.threads and all(abs(a - b) < 1e-6 for a, b in results)
    return {"done": True, "right": right, "seconds": round(spent, 2), "growth_mb": round(resident_mb() - before, 1)}


def main(options: Options) -> None:
    if options.row is not None:
        print(json.dumps(run(options)))
        return
    table = []
    for row in ROWS:
        for devices in (2, 8):
            for threads in (1, 3):
                command = [sys.executable, __file__, "--row", row, "--devices", str(devices), "--threads", str(threads)]
                done = subprocess.run([*command, "--calls", str(options.calls)], capture_output=True, text=True, check=False)
                lines = done.stdout.splitlines()
                outcome = json.loads(lines[-1]) if done.returncode == 0 and lines else {"done": False, "exit_code": done.returncode}
                table.append({"row": row, "devices": devices, "threads": threads, "calls": options.calls, **outcome})
                print(table[-1], flush=True)
    result = {"cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1), "rows": table}
    options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(tyro.cli(Options))
