"""What each further layer costs: Hugging Face's GPT-2 as it is, with its layers as a loop and without, beside `lax.scan` by hand.

    python benchmarks/depth.py                                # 4, 24 and 48 layers on data 2 x model 4; writes results/depth.json
    python benchmarks/depth.py --layers 4 24 --mesh data=8 --json None

Each contender is a process of its own. Seconds to trace, lower and compile; operations and bytes of the optimised HLO; bytes of
temporaries and of collectives on a device; the median of some steps.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gpt2
import rich.console
import rich.table
import tyro

HERE = Path(__file__).resolve().parent
CONTENDERS = ("rolled", "unrolled", "scan by hand")


@dataclass(frozen=True)
class Options:
    """Attributes:
    layers: numbers of layers.
    mesh: axes of the 8 virtual devices.
    without: contenders to leave out; unrolled takes minutes at 48 layers.
    json: where the result goes; None: printed only.
    """

    layers: tuple[int, ...] = (4, 24, 48)
    mesh: str = "data=2,model=4"
    width: int = 128
    seq: int = 64
    steps: int = 12
    without: tuple[str, ...] = ()
    json: Path | None = HERE / "results" / "depth.json"


def config_of(layers: int, options: Options) -> Any:
    return gpt2.Config("hf", vocabulary=512, seq=options.seq, width=options.width, layers=layers, heads=8, batch=16)


def grid_of(options: Options) -> Any:
    import mesh

    mesh.virtual_devices(8)
    axes = {name: int(size) for name, size in (part.split("=") for part in options.mesh.split(","))}
    return mesh.Mesh(range(8), tuple(axes.values()), tuple(axes))


def spec_of(name: str, ndim: int, axes: tuple[str, ...]) -> tuple[str | None, ...]:
    """As `gpt2.HF_SHARDINGS` says, without the axes that this mesh lacks."""
    import fnmatch

    spec = next((spec for pattern, spec in gpt2.HF_SHARDINGS.items() if fnmatch.fnmatchcase(name, pattern)), (None,) * ndim)
    return tuple(axis if axis in axes else None for axis in spec)


def timed_steps(step: Callable[[], Any], wait: Callable[[Any], Any], count: int) -> float:
    """Median seconds until a step's loss is there."""
    seconds: list[float] = []
    for _ in range(count):
        start = time.perf_counter()
        wait(step())
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def facts(stages: dict[str, float], compiled: Any, losses: list[float], step_s: float, axes: Any) -> dict[str, Any]:
    """What is told of a contender."""
    from spmd.program.xla import _hlo

    text = compiled.as_text()
    report = _hlo.collectives(text, *axes)
    return {
        **stages,
        "operations": text.count(" = "),
        "hlo_kb": len(text) // 1000,
        "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "collective_bytes": sum(item.count * item.num_bytes for item in report),
        "step_ms": 1e3 * step_s,
        "losses": losses,
    }


def ours(layers: int, options: Options, roll: bool) -> dict[str, Any]:
    import torch

    import spmd

    spmd.configure(cache_dir=False)  # compilations are measured
    grid, config = grid_of(options), config_of(layers, options)
    torch.manual_seed(0)
    model = gpt2.build(config).to("jax")
    axes = tuple(grid.axis_names)
    for name, parameter in model.named_parameters():
        spmd.mark_sharding(parameter, grid, spec_of(name, parameter.dim(), axes))
    for name, module in model.named_modules():
        if name == "transformer.wte" or name.rpartition(".")[0] == "transformer.h":
            module.register_forward_hook(lambda _, __, out: spmd.mark_sharding(out, grid, ("data", None, None)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, (0.9, 0.95), 1e-8, 0.1)

    @spmd.compile(roll=roll)
    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = gpt2.loss(model, x, x)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    x = spmd.mark_sharding(torch.randint(0, 512, (config.batch, config.seq)).to("jax"), grid, ("data", None))
    losses = [step(x).item() for _ in range(3)]
    step_s = timed_steps(lambda: step(x), lambda loss: loss.item(), options.steps)
    stages = {name: getattr(step.timings, name) for name in ("trace_s", "lower_s", "compile_s")}
    return facts(stages, step.program(x).compiled, losses, step_s, (axes, tuple(grid.mesh_shape)))


def by_hand(layers: int, options: Options) -> dict[str, Any]:
    grid, config = grid_of(options), config_of(layers, options)
    import depth_jax
    import jax
    import jax.numpy as jnp
    import torch
    from jax.sharding import NamedSharding, PartitionSpec

    torch.manual_seed(0)
    named = {name: p.detach().numpy() for name, p in gpt2.build(config).named_parameters()}
    tokens = torch.randint(0, 512, (config.batch, config.seq)).numpy()
    axes, devices = tuple(grid.axis_names), grid.to_jax()

    def place(value: Any, spec: tuple[str | None, ...]) -> Any:
        return jax.device_put(jnp.asarray(value), NamedSharding(devices, PartitionSpec(*spec)))

    start = depth_jax.BLOCK
    params = {name: place(v, spec_of(name, v.ndim, axes)) for name, v in named.items() if ".h." not in name}
    stacked = {
        name: place(
            jnp.stack([named[name.replace(start, f"transformer.h.{i}.")] for i in range(layers)]), (None, *spec_of(name, v.ndim, axes))
        )
        for name, v in named.items()
        if name.startswith(start)
    }
    both = params, stacked
    state = both, jax.tree.map(lambda v: v, depth_jax.OPTIMIZER.init(both))
    where = NamedSharding(devices, PartitionSpec("data"))
    shardings = jax.tree.map(lambda v: v.sharding if v.ndim else NamedSharding(devices, PartitionSpec()), state)
    state = jax.device_put(state, shardings)

    def hold(x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, where)

    def step(state: Any, x: jax.Array) -> Any:
        return depth_jax.step(state, x, config.heads, hold)

    x = jax.device_put(tokens, where)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))
    marks = [time.perf_counter()]
    traced = jitted.trace(state, x)
    marks.append(time.perf_counter())
    lowered = traced.lower()
    marks.append(time.perf_counter())
    compiled = lowered.compile()
    marks.append(time.perf_counter())
    stages = {n: b - a for n, a, b in zip(("trace_s", "lower_s", "compile_s"), marks, marks[1:], strict=False)}

    def run() -> jax.Array:
        nonlocal state
        state, loss = compiled(state, x)
        return loss

    losses = [float(run()) for _ in range(3)]
    return facts(stages, compiled, losses, timed_steps(run, float, options.steps), (axes, tuple(grid.mesh_shape)))


def shown(rows: list[dict[str, Any]]) -> rich.table.Table:
    """A line for each contender and number of layers."""
    table = rich.table.Table(
        "layers", "contender", "trace + lower, s", "compile, s", "operations", "kB of HLO", "temporaries", "collectives", "step, ms"
    )
    for row in rows:
        seconds = f"{row['trace_s'] + row['lower_s']:.1f}", f"{row['compile_s']:.1f}"
        counts = row["operations"], row["hlo_kb"], row["temp_bytes"], row["collective_bytes"]
        table.add_row(str(row["layers"]), row["contender"], *seconds, *(f"{n:,}" for n in counts), f"{row['step_ms']:.0f}")
    return table


def main(options: Options) -> None:
    rows: list[dict[str, Any]] = []
    for layers in options.layers:
        for contender in (c for c in CONTENDERS if c not in options.without):
            asked = json.dumps({**asdict(options), "json": None, "layers": [layers], "contender": contender})
            done = subprocess.run([sys.executable, __file__, asked], capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(done.stderr)
            rows.append({"layers": layers, "contender": contender, **json.loads(done.stdout.splitlines()[-1])})
    rich.console.Console(width=140).print(shown(rows))
    if options.json is not None:
        options.json.write_text(
            json.dumps({"mesh": options.mesh, "width": options.width, "seq": options.seq, "rows": rows}, indent=1) + "\n"
        )


def run_one(asked: dict[str, Any]) -> None:
    """In a process of its own: the last line it prints is the result."""
    contender, (layers,) = asked.pop("contender"), asked["layers"]
    options = Options(**{**asked, "layers": (layers,), "without": ()})
    print(json.dumps(by_hand(layers, options) if contender == "scan by hand" else ours(layers, options, contender == "rolled")))


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].startswith("{"):
        run_one(json.loads(sys.argv[1]))
    else:
        main(tyro.cli(Options))
