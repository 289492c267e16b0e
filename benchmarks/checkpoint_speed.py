"""Time and memory of saving a checkpoint, and the time that it blocks the step, compared with plain tensorstore.

    python benchmarks/checkpoint_speed.py                          # 1 GB of parameters on 8 virtual devices
    python benchmarks/checkpoint_speed.py --mib 64 --rounds 2 --json /tmp/speed.json

Plain tensorstore writes the same shards as zarr arrays, one chunk per shard, and syncs its files as we do. It writes no checksums and
reads nothing back. Contenders alternate. A ratio is the median over the rounds of the ratio within a round. Memory is the growth of
the peak over the resident size before the save, measured in its own process.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
import rich
import rich.table
import tensorstore as ts
import tyro

import spmd
from mesh import AcceleratorIdle, Mesh, virtual_devices
from spmd.device._storage import load

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 2048
MIB = 2**20


@dataclass(frozen=True)
class Options:
    """Options of the measurement."""

    mib: int = 1024
    """Size of the parameters, in MiB."""
    rounds: int = 5
    """Number of saves by each contender."""
    memory_of: Literal["", "wait", "async"] = ""
    """Only print the memory of one kind of save. The program starts itself with this option."""
    folder: Path | None = None
    """Folder for the checkpoints; by default a temporary folder."""
    json: Path = ROOT / "benchmarks" / "results" / "checkpoint_speed.json"
    """File for the results."""


def state(mib: int) -> dict[str, Any]:
    """float32 matrices of 16 MiB each, split over both axes of the mesh."""
    import torch

    mesh = Mesh(range(8), (4, 2), ("data", "model"))
    found: dict[str, Any] = {}
    for number in range(max(1, mib // 16)):
        host = np.random.default_rng(number).standard_normal((WIDTH, WIDTH), dtype=np.float32)
        found[f"layer.{number}"] = spmd.mark_sharding(torch.from_numpy(host).to("jax"), mesh, ("data", "model"))
    return found


def plain(folder: Path, arrays: dict[str, Any]) -> None:
    """Write every shard as a chunk of a zarr array, all concurrently."""
    opened: list[tuple[Any, Any]] = []
    for name, tensor in arrays.items():
        array = load(tensor)
        spec = {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": f"{folder}/{name}/"},
            "metadata": {
                "shape": array.shape,
                "data_type": "float32",
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": array.sharding.shard_shape(array.shape)}},
                "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
            },
        }
        opened.append((array, ts.open(spec, create=True)))
    writes = [
        future.result()[shard.index].write(np.asarray(shard.data), can_reference_source_data_indefinitely=True)
        for array, future in opened
        for shard in array.addressable_shards
        if shard.replica_id == 0
    ]
    for write in writes:
        write.result()


def clocked(action: Any) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def measured(base: Path, arrays: dict[str, Any], rounds: int) -> dict[str, list[float]]:
    """Seconds of every round, by contender."""
    seconds: dict[str, list[float]] = {name: [] for name in ("plain", "wait", "blocked", "async", "restore")}
    contenders = [plain_seconds, wait_seconds, async_seconds]
    for number in range(rounds + 1):  # the first round warms up
        one: dict[str, float] = {}
        for contender in contenders:
            os.sync()  # so that no contender waits for writes of the previous one
            one |= contender(base / "run", arrays)
            shutil.rmtree(base / "run")
        contenders.append(contenders.pop(0))
        if number:
            for name, value in one.items():
                seconds[name].append(value)
    return seconds


def plain_seconds(folder: Path, arrays: dict[str, Any]) -> dict[str, float]:
    return {"plain": clocked(lambda: plain(folder, arrays))}


def wait_seconds(folder: Path, arrays: dict[str, Any]) -> dict[str, float]:
    return {"wait": clocked(lambda: spmd.checkpoint.save(folder, 1, arrays, wait=True))}


def async_seconds(folder: Path, arrays: dict[str, Any]) -> dict[str, float]:
    start = time.perf_counter()
    spmd.checkpoint.save(folder, 1, arrays)
    blocked = time.perf_counter() - start
    spmd.checkpoint.join()
    whole = time.perf_counter() - start
    return {"blocked": blocked, "async": whole, "restore": clocked(lambda: spmd.checkpoint.restore(folder, arrays))}


def memory(kind: str, base: Path, arrays: dict[str, Any]) -> int:
    """Growth of the process's peak memory during a save, in bytes."""
    for tensor in arrays.values():
        jnp.asarray(load(tensor)).block_until_ready()
    spmd.checkpoint.save(base / "small", 1, {"x": np.ones(3)}, wait=True)  # starts threads and loads libraries
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = status("VmRSS")
    spmd.checkpoint.save(base / "big", 1, arrays, wait=kind == "wait")
    spmd.checkpoint.join()
    return status("VmHWM") - before


def status(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def main(options: Options) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AcceleratorIdle)
        virtual_devices(8)
    arrays = state(options.mib)
    nbytes = sum(load(tensor).nbytes for tensor in arrays.values())
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        if options.memory_of:
            sys.stdout.write(str(memory(options.memory_of, Path(name), arrays)))
            return 0
        seconds = measured(Path(name), arrays, options.rounds)
    grown: dict[str, int] = {}
    for kind in ("wait", "async"):
        command = [sys.executable, __file__, "--memory-of", kind, "--mib", str(options.mib)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
        grown[kind] = int(done.stdout)

    def ratio(one: str, other: str) -> float:
        return statistics.median(a / b for a, b in zip(seconds[one], seconds[other], strict=True))

    report = {
        "bytes": nbytes,
        "rounds": options.rounds,
        "seconds": {name: {"median": statistics.median(values), "all": values} for name, values in seconds.items()},
        "save_to_plain": ratio("wait", "plain"),
        "async_save_to_plain": ratio("async", "plain"),
        "blocked_share": ratio("blocked", "async"),
        "memory_to_shards": {kind: value / nbytes for kind, value in grown.items()},
    }
    options.json.write_text(json.dumps(report, indent=1) + "\n")
    table = rich.table.Table("figure", "measured", "goal")
    table.add_row("plain tensorstore", f"{statistics.median(seconds['plain']):.2f} s", "")
    table.add_row("save, synchronous", f"{statistics.median(seconds['wait']):.2f} s, {report['save_to_plain']:.2f} x plain", "1.3")
    table.add_row("save, asynchronous", f"{statistics.median(seconds['async']):.2f} s, {report['async_save_to_plain']:.2f} x plain", "1.3")
    table.add_row("  the step waits", f"{statistics.median(seconds['blocked']):.3f} s, {100 * report['blocked_share']:.1f} %", "10 %")
    table.add_row("restore with checksums", f"{statistics.median(seconds['restore']):.2f} s", "")
    for kind in ("wait", "async"):
        table.add_row(f"memory, {kind}", f"{report['memory_to_shards'][kind]:.2f} x the shards", "1.3")
    rich.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
