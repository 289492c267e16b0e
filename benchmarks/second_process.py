"""Seconds to the first step in a process that finds the traces and programs of an earlier one on disk, compared with that earlier process.

    python benchmarks/second_process.py
    python benchmarks/second_process.py --cases "gpt2 24 128 rolled fsdp=1,model=1" --json-file None

A case is a model of `depth_models`, its number of layers, its width, whether its layers are rolled into a loop, and its mesh of virtual
devices. For each case two processes run one after the other with the same new cache folder. Each builds the model over the mesh and calls
the training step of `depth.py` once. The executables of rolled programs over several CPU devices are not cached, their lowered programs
are: see Note [Collectives that lose their order] in `spmd/base/_jax_executables.py`. The figure is the time of that call until the loss is
computed: preparing the optimizer, tracing, lowering, compiling or loading, and running. The programs that XLA compiled during the call are
counted, those of single operations included, and the traces.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import depth
import rich
import rich.table
import tyro

HERE = Path(__file__).resolve().parent
ONE, EIGHT = "fsdp=1,model=1", "fsdp=2,model=4"
CASES = (
    f"gpt2 24 128 rolled {ONE}",
    f"gpt2 24 128 unrolled {EIGHT}",
    f"gpt2 24 128 rolled {EIGHT}",
    f"gpt2 48 128 rolled {ONE}",
    f"llama 24 128 rolled {ONE}",
    f"llama 24 128 unrolled {EIGHT}",
    f"llama 24 128 rolled {EIGHT}",
)
GOAL = 0.25


def first_step(text: str, folder: str) -> dict[str, Any]:
    """Time and compilations of the first call in this process."""
    import jax

    import spmd

    spmd.configure(cache_dir=folder)
    model, layers, width, kind, grid = text.split()
    step, x = depth.step_of(depth.Task(model, int(layers), grid, kind, int(width), seq=64, steps=0))
    events: list[str] = []
    jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
    jax.monitoring.register_event_duration_secs_listener(lambda event, duration_secs, **_: events.append(event))
    start = time.perf_counter()
    loss = step(x).item()
    seconds = time.perf_counter() - start
    program = step.program(x)
    was_read = program.compilation.read_from is not None  # by our trace's digest, without a request to jax's compiler
    requests, hits = (events.count(f"/jax/{name}") for name in ("core/compile/backend_compile_duration", "compilation_cache/cache_hits"))
    return {
        "seconds": seconds,
        "compiled": requests - (hits - was_read),
        "traces": step.num_traces,
        "loss": loss,
        **asdict(program.timings),
    }


def measure(text: str) -> dict[str, Any]:
    """Both processes of a case."""
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            done = subprocess.run([sys.executable, __file__, text, folder], capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(done.stderr)
            found.append(json.loads(done.stdout.splitlines()[-1]))
    first, second = found
    assert first["loss"] == second["loss"]
    return {"case": text, "first": first, "second": second, "ratio": second["seconds"] / first["seconds"]}


def main(cases: tuple[str, ...] = CASES, json_file: Path | None = HERE / "results" / "second_process.json") -> None:
    rows = [measure(text) for text in cases]
    table = rich.table.Table("case", "first, s", "second, s", "ratio", "compiled by the first", "by the second", "traced", "by the second")
    for row in rows:
        times = row["first"]["seconds"], row["second"]["seconds"], row["ratio"]
        counts = [str(row[process][what]) for what in ("compiled", "traces") for process in ("first", "second")]
        table.add_row(row["case"], *(f"{t:.2f}" for t in times), *counts)
    if json_file is not None:
        json_file.write_text(json.dumps({"goal": GOAL, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    rich.print(table)


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] not in ("--cases", "--json-file"):
        print(json.dumps(first_step(sys.argv[1], sys.argv[2])))
    else:
        tyro.cli(main, description=__doc__)
