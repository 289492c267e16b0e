"""Cost per layer of Hugging Face's unmodified GPT-2 and Llama, with their layers rolled into a loop or unrolled, and of hand-written JAX.

    python benchmarks/depth.py                                # 4, 24 and 48 layers on every mesh; writes results/depth.json
    python benchmarks/depth.py --models gpt2 --layers 4 24 --meshes fsdp=8 --json None
    python benchmarks/depth.py --models llama --layers 4 48 --meshes "v5e:2x4 data=2,model=4" --without unrolled "unrolled by hand"

Each contender runs in its own process. The figures are the seconds to trace, lower and compile; operations and size of the optimized
HLO; bytes of temporaries and of collectives per device; and the median step time. For a TPU topology, programs are compiled but not run.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import depth_models
import numpy as np
import rich.console
import rich.table
import tyro

HERE = Path(__file__).resolve().parent
CONTENDERS = ("rolled", "unrolled", "scan by hand", "unrolled by hand")
MESHES = ("data=2,model=4", "fsdp=8", "fsdp=2,model=4", "v5e:2x4 data=2,model=4", "v5e:2x4 fsdp=8")
WITH_LOOP = ("rolled", "scan by hand")


@dataclass(frozen=True)
class Options:
    """Attributes:
    models: "gpt2", "llama".
    layers: numbers of layers to measure.
    meshes: axes over 8 virtual devices, or over a TPU topology whose name comes first.
    without: contenders to skip.
    most_unrolled: largest number of layers for which programs without a loop are compiled; larger ones take minutes.
    json: file for the result; None only prints it.
    """

    models: tuple[str, ...] = ("gpt2", "llama")
    layers: tuple[int, ...] = (4, 24, 48)
    meshes: tuple[str, ...] = MESHES
    width: int = 128
    seq: int = 64
    steps: int = 12
    without: tuple[str, ...] = ()
    most_unrolled: int = 24
    json: Path | None = HERE / "results" / "depth.json"


@dataclass(frozen=True)
class Task:
    """The measurement of one contender."""

    model: str
    layers: int
    mesh: str
    contender: str
    width: int
    seq: int
    steps: int

    @property
    def is_ahead(self) -> bool:
        """Whether the program is compiled ahead of time for a TPU topology."""
        return ":" in self.mesh


def grid_of(task: Task) -> Any:
    import mesh

    topology, _, text = task.mesh.rpartition(" ")
    if not topology:
        mesh.virtual_devices(8)
    axes = {name: int(size) for name, size in (part.split("=") for part in text.split(","))}
    return mesh.Mesh(range(math.prod(axes.values())), tuple(axes.values()), tuple(axes), **({"topology": topology} if topology else {}))


def timed_steps(step: Callable[[], Any], wait: Callable[[Any], Any], count: int) -> float:
    """Median seconds of a step, until its loss is computed."""
    seconds: list[float] = []
    for _ in range(count):
        start = time.perf_counter()
        wait(step())
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def facts(stages: dict[str, float], compiled: Any, grid: Any, ran: dict[str, Any]) -> dict[str, Any]:
    """The figures of a contender."""
    from spmd.program.xla import _hlo

    text = compiled.as_text()
    report = _hlo.collectives(text, tuple(grid.axis_names), tuple(grid.mesh_shape))
    return {
        **stages,
        "operations": text.count(" = "),
        "hlo_kb": len(text) // 1000,
        "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "collectives": sum(item.count for item in report),
        "collective_bytes": sum(item.count * item.num_bytes for item in report),
        **ran,
    }


def step_of(task: Task) -> tuple[Any, Any]:
    """The compiled training step of an annotated model, and its argument."""
    import torch

    import spmd

    grid, names = grid_of(task), depth_models.NAMES[task.model]
    axes = tuple(grid.axis_names)
    rows = depth_models.rows_of(axes)
    torch.manual_seed(0)
    with torch.device("meta" if task.is_ahead else "cpu"):
        model = depth_models.build(task.model, task.layers, task.width, task.seq)
    if not task.is_ahead:
        model.to("jax")
    for name, parameter in model.named_parameters():
        spmd.mark_sharding(parameter, grid, depth_models.spec_of(task.model, name, parameter.dim(), axes))
    if task.is_ahead:
        model.to_empty(device="jax")
    for name, module in model.named_modules():
        if name == names.embedding or name.rpartition(".")[0] == names.blocks:
            module.register_forward_hook(lambda _, __, out: spmd.mark_sharding(out, grid, (rows, None, None)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, (0.9, 0.95), 1e-8, 0.1)

    @spmd.compile(roll=task.contender == "rolled")
    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(input_ids=x, labels=x).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    tokens = torch.randint(0, depth_models.VOCABULARY, (depth_models.BATCH, task.seq))
    x = spmd.mark_sharding(torch.empty_like(tokens, device="jax") if task.is_ahead else tokens.to("jax"), grid, (rows, None))
    return step, x


def ours(task: Task) -> dict[str, Any]:
    import spmd

    spmd.configure(cache_dir=False)  # compilation is measured
    step, x = step_of(task)
    ran = {} if task.is_ahead else run(lambda: step(x).item(), task.steps)
    program = step.program(x)
    return facts({n: getattr(program.timings, n) for n in ("trace_s", "lower_s", "compile_s")}, program.compiled, grid_of(task), ran)


def run(step: Callable[[], float], steps: int) -> dict[str, Any]:
    """Losses of three steps, and the median milliseconds of `steps` more."""
    losses = [step() for _ in range(3)]
    return {"step_ms": 1e3 * timed_steps(step, float, steps), "losses": losses}


def by_hand(task: Task) -> dict[str, Any]:
    grid = grid_of(task)
    import depth_jax
    import jax
    import jax.numpy as jnp
    import torch
    from jax.sharding import NamedSharding, PartitionSpec

    import mesh

    torch.manual_seed(0)
    named = {name: p.detach().numpy() for name, p in depth_models.build(task.model, task.layers, task.width, task.seq).named_parameters()}
    tokens = torch.randint(0, depth_models.VOCABULARY, (depth_models.BATCH, task.seq)).numpy()
    axes, devices, blocks = tuple(grid.axis_names), grid.to_jax(), f"{depth_models.NAMES[task.model].blocks}."

    def place(value: Any, *spec: Any) -> Any:
        where = NamedSharding(devices, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=where) if task.is_ahead else jax.device_put(value, where)

    def spec_of(name: str) -> tuple[str | None, ...]:
        return depth_models.spec_of(task.model, name, named[name].ndim, axes)

    has_stacks = task.contender == "scan by hand"
    params = {name: place(v, *spec_of(name)) for name, v in named.items() if not (has_stacks and name.startswith(blocks))}
    families = {
        name: [named[name.replace(f"{blocks}0.", f"{blocks}{i}.")] for i in range(task.layers)]
        for name in named
        if has_stacks and name.startswith(f"{blocks}0.")
    }
    both = params, {name: place(np.stack(family), None, *spec_of(name)) for name, family in families.items()}
    zeros = [jax.tree.map(lambda v: place(np.zeros(v.shape, v.dtype), *v.sharding.spec), both) for _ in range(2)]
    state = both, (*zeros, place(np.zeros((), np.float32)))
    rows = PartitionSpec(depth_models.rows_of(axes))

    def constrain(x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(devices, rows))

    def step(state: Any, x: jax.Array) -> Any:
        return depth_jax.step(state, x, task.model, task.layers, constrain)

    x = place(tokens, *rows)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(jax.tree.map(lambda v: v.sharding, state), None))
    marks = [time.perf_counter()]
    traced = jitted.trace(state, x)
    marks.append(time.perf_counter())
    lowered = traced.lower()
    marks.append(time.perf_counter())
    compiled = lowered.compile(mesh.topology_options() if task.is_ahead else None)
    marks.append(time.perf_counter())
    stages = {n: b - a for n, a, b in zip(("trace_s", "lower_s", "compile_s"), marks, marks[1:], strict=False)}

    def once() -> float:
        nonlocal state
        state, loss = compiled(state, jnp.asarray(x))
        return float(loss)

    return facts(stages, compiled, grid, {} if task.is_ahead else run(once, task.steps))


def shown(rows: list[dict[str, Any]]) -> rich.table.Table:
    """A table with one row per contender and number of layers."""
    heads = ("layers", "contender", "trace + lower, s", "compile, s", "operations", "kB of HLO", "temporaries")
    table = rich.table.Table("model", "mesh", *heads, "collectives", "their bytes", "step, ms")
    for row in rows:
        seconds = f"{row['trace_s'] + row['lower_s']:.1f}", f"{row['compile_s']:.1f}"
        counts = (row[name] for name in ("operations", "hlo_kb", "temp_bytes", "collectives", "collective_bytes"))
        step = f"{row['step_ms']:.0f}" if "step_ms" in row else ""
        table.add_row(row["model"], row["mesh"], str(row["layers"]), row["contender"], *seconds, *(f"{n:,}" for n in counts), step)
    return table


def main(options: Options) -> None:
    rows: list[dict[str, Any]] = []
    for model, mesh, layers, contender in product(options.models, options.meshes, options.layers, CONTENDERS):
        if contender in options.without or (layers > options.most_unrolled and contender not in WITH_LOOP):
            continue
        task = Task(model, layers, mesh, contender, options.width, options.seq, options.steps)
        done = subprocess.run([sys.executable, __file__, json.dumps(asdict(task))], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr)
        rows.append({"model": model, "mesh": mesh, "layers": layers, "contender": contender, **json.loads(done.stdout.splitlines()[-1])})
        if options.json is not None:  # written after each contender, so that a long run can be interrupted
            options.json.write_text(json.dumps({"width": options.width, "seq": options.seq, "rows": rows}, indent=1) + "\n")
    rich.console.Console(width=180).print(shown(rows))


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].startswith("{"):
        task = Task(**json.loads(sys.argv[1]))  # in a subprocess, whose last line of output is the result
        print(json.dumps(by_hand(task) if task.contender.endswith("by hand") else ours(task)))
    else:
        main(tyro.cli(Options))
