"""What each further layer costs: Hugging Face's GPT-2 and Llama as they are, with their layers as a loop and without, beside JAX by hand.

    python benchmarks/depth.py                                # 4, 24 and 48 layers on every mesh; writes results/depth.json
    python benchmarks/depth.py --models gpt2 --layers 4 24 --meshes fsdp=8 --json None
    python benchmarks/depth.py --models llama --layers 4 48 --meshes "v5e:2x4 data=2,model=4" --without unrolled "unrolled by hand"

Each contender is a process of its own. Seconds to trace, lower and compile; operations and bytes of the optimised HLO; bytes of
temporaries and of collectives on a device; the median of some steps. For chips that are not here, programs are compiled and not run.
"""

from __future__ import annotations

import json
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
BY_LOOP = ("rolled", "scan by hand")


@dataclass(frozen=True)
class Options:
    """Attributes:
    models: "gpt2", "llama".
    layers: numbers of layers.
    meshes: axes of 8 virtual devices, or of a topology whose name is in front.
    without: contenders to leave out.
    most_unrolled: layers up to which programs without loops are compiled; more take minutes.
    json: where the result goes; None: printed only.
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
class Asked:
    """One contender's task."""

    model: str
    layers: int
    mesh: str
    contender: str
    width: int
    seq: int
    steps: int

    @property
    def is_ahead(self) -> bool:
        """Whether the chips are not here."""
        return ":" in self.mesh


def grid_of(asked: Asked) -> Any:
    import mesh

    topology, _, text = asked.mesh.rpartition(" ")
    if not topology:
        mesh.virtual_devices(8)
    axes = {name: int(size) for name, size in (part.split("=") for part in text.split(","))}
    return mesh.Mesh(range(8), tuple(axes.values()), tuple(axes), **({"topology": topology} if topology else {}))


def timed_steps(step: Callable[[], Any], wait: Callable[[Any], Any], count: int) -> float:
    """Median seconds until a step's loss is there."""
    seconds: list[float] = []
    for _ in range(count):
        start = time.perf_counter()
        wait(step())
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def facts(stages: dict[str, float], compiled: Any, grid: Any, ran: dict[str, Any]) -> dict[str, Any]:
    """What is told of a contender."""
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


def ours(asked: Asked) -> dict[str, Any]:
    import torch

    import spmd

    spmd.configure(cache_dir=False)  # compilations are measured
    grid, names = grid_of(asked), depth_models.NAMES[asked.model]
    axes = tuple(grid.axis_names)
    rows = depth_models.rows_of(axes)
    torch.manual_seed(0)
    with torch.device("meta" if asked.is_ahead else "cpu"):
        model = depth_models.build(asked.model, asked.layers, asked.width, asked.seq)
    if not asked.is_ahead:
        model.to("jax")
    for name, parameter in model.named_parameters():
        spmd.mark_sharding(parameter, grid, depth_models.spec_of(asked.model, name, parameter.dim(), axes))
    if asked.is_ahead:
        model.to_empty(device="jax")
    for name, module in model.named_modules():
        if name == names.embedding or name.rpartition(".")[0] == names.blocks:
            module.register_forward_hook(lambda _, __, out: spmd.mark_sharding(out, grid, (rows, None, None)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, (0.9, 0.95), 1e-8, 0.1)

    @spmd.compile(roll=asked.contender == "rolled")
    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(input_ids=x, labels=x).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    tokens = torch.randint(0, depth_models.VOCABULARY, (depth_models.BATCH, asked.seq))
    x = spmd.mark_sharding(torch.empty_like(tokens, device="jax") if asked.is_ahead else tokens.to("jax"), grid, (rows, None))
    ran = {} if asked.is_ahead else run(lambda: step(x).item(), asked.steps)
    program = step.program(x)
    return facts({n: getattr(program.timings, n) for n in ("trace_s", "lower_s", "compile_s")}, program.compiled, grid, ran)


def run(step: Callable[[], float], steps: int) -> dict[str, Any]:
    """Losses of three steps, and the milliseconds of one of some more."""
    losses = [step() for _ in range(3)]
    return {"step_ms": 1e3 * timed_steps(step, float, steps), "losses": losses}


def by_hand(asked: Asked) -> dict[str, Any]:
    grid = grid_of(asked)
    import depth_jax
    import jax
    import jax.numpy as jnp
    import torch
    from jax.sharding import NamedSharding, PartitionSpec

    import mesh

    torch.manual_seed(0)
    named = {
        name: p.detach().numpy() for name, p in depth_models.build(asked.model, asked.layers, asked.width, asked.seq).named_parameters()
    }
    tokens = torch.randint(0, depth_models.VOCABULARY, (depth_models.BATCH, asked.seq)).numpy()
    axes, devices, blocks = tuple(grid.axis_names), grid.to_jax(), f"{depth_models.NAMES[asked.model].blocks}."

    def place(value: Any, *spec: Any) -> Any:
        where = NamedSharding(devices, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=where) if asked.is_ahead else jax.device_put(value, where)

    def spec_of(name: str) -> tuple[str | None, ...]:
        return depth_models.spec_of(asked.model, name, named[name].ndim, axes)

    has_stacks = asked.contender == "scan by hand"
    params = {name: place(v, *spec_of(name)) for name, v in named.items() if not (has_stacks and name.startswith(blocks))}
    families = {
        name: [named[name.replace(f"{blocks}0.", f"{blocks}{i}.")] for i in range(asked.layers)]
        for name in named
        if has_stacks and name.startswith(f"{blocks}0.")
    }
    both = params, {name: place(np.stack(family), None, *spec_of(name)) for name, family in families.items()}
    zeros = [jax.tree.map(lambda v: place(np.zeros(v.shape, v.dtype), *v.sharding.spec), both) for _ in range(2)]
    state = both, (*zeros, place(np.zeros((), np.float32)))
    rows = PartitionSpec(depth_models.rows_of(axes))

    def hold(x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(devices, rows))

    def step(state: Any, x: jax.Array) -> Any:
        return depth_jax.step(state, x, asked.model, asked.layers, hold)

    x = place(tokens, *rows)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(jax.tree.map(lambda v: v.sharding, state), None))
    marks = [time.perf_counter()]
    traced = jitted.trace(state, x)
    marks.append(time.perf_counter())
    lowered = traced.lower()
    marks.append(time.perf_counter())
    compiled = lowered.compile(mesh.topology_options() if asked.is_ahead else None)
    marks.append(time.perf_counter())
    stages = {n: b - a for n, a, b in zip(("trace_s", "lower_s", "compile_s"), marks, marks[1:], strict=False)}

    def once() -> float:
        nonlocal state
        state, loss = compiled(state, jnp.asarray(x))
        return float(loss)

    return facts(stages, compiled, grid, {} if asked.is_ahead else run(once, asked.steps))


def shown(rows: list[dict[str, Any]]) -> rich.table.Table:
    """A line for each contender and number of layers."""
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
        if contender in options.without or (layers > options.most_unrolled and contender not in BY_LOOP):
            continue
        asked = Asked(model, layers, mesh, contender, options.width, options.seq, options.steps)
        done = subprocess.run([sys.executable, __file__, json.dumps(asdict(asked))], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr)
        rows.append({"model": model, "mesh": mesh, "layers": layers, "contender": contender, **json.loads(done.stdout.splitlines()[-1])})
        if options.json is not None:  # after each: a run of an hour may be ended
            options.json.write_text(json.dumps({"width": options.width, "seq": options.seq, "rows": rows}, indent=1) + "\n")
    rich.console.Console(width=180).print(shown(rows))


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].startswith("{"):
        task = Asked(**json.loads(sys.argv[1]))  # in a process of its own: the last line it prints is the result
        print(json.dumps(by_hand(task) if task.contender.endswith("by hand") else ours(task)))
    else:
        main(tyro.cli(Options))
