"""Is a compiled step as fast as the same step written by hand in JAX? A Megatron MLP, forward, backward and AdamW.

    python benchmarks/megatron.py                                    # 1024 -> 4096 -> 1024 on 4 x 2 virtual devices
    python benchmarks/megatron.py --mesh data=2,model=4 --layers 4 --rounds 10 --json /tmp/megatron.json
    python benchmarks/megatron.py --preset tiny

Three contenders take turns in one process, so that a busy machine slows them alike: ours, JAX by hand (a pytree of float32
parameters, AdamW by hand, `jax.value_and_grad`, donation, pinned `NamedSharding`s) and eager PyTorch on the CPU. Ratios are
medians over the rounds of the ratio within a round. Results go to benchmarks/results/megatron.json; a table is printed.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.metadata
import json
import math
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import rich
import rich.table
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import mesh
import spmd
from spmd.program import _hlo

ROOT = Path(__file__).resolve().parents[1]
LR, BETA1, BETA2, EPS, WEIGHT_DECAY = 1e-3, 0.9, 0.999, 1e-8, 1e-2
CLOCKS = ("ready", "returned", "returned_cpu")
STAGES = ("trace_s", "lower_s", "compile_s")
SIZES = {"small": (1024, 4096, 256), "tiny": (64, 256, 32)}  # width, hidden, batch
SMALL = (8, 16, 32, 25)  # width, hidden, batch, layers of the model whose dispatch is timed
NUM_SMALL = 4 * SMALL[3]
WARM_UP = 3
ABOUT = {
    "calls": "float32; contenders alternate in one process, the order turns every round; the devices are idle when a call starts",
    "ready": "seconds from the call until its parameters are ready",
    "returned": "seconds until the call returned; on a busy machine that includes waiting for a core",
    "returned_cpu": "CPU seconds of the calling thread until the call returned",
    "small": f"a model of {NUM_SMALL} small parameters, {SMALL[3]} layers",
    "stages": "cold: jax.clear_caches() first; warm: median over fresh spmd.compile and jax.jit objects of fresh functions; "
    f"at width {SMALL[0]}, since they hardly depend on sizes and the devices then leave the cores to them",
    "prepare_s": "creating the optimizer's state, once and before the first trace, by a trace of its own; JAX by hand starts with zeros",
    "ratio": "to JAX by hand; of times: the median over the rounds of the ratio within a round",
    "programs": "per device and call, read from the compiled program",
}


@dataclass(frozen=True)
class Options:
    """Sizes default to the preset's.

    Attributes:
        mesh: axis sizes; the batch is split over the first axis, the hidden dim over the last.
        rounds: timed steps of each contender.
        retraces: warm traces of each contender.
        calls: timed calls of the dispatch measurement.
        json: where the results go.
    """

    preset: Literal["small", "tiny"] = "small"
    mesh: str = "data=4,model=2"
    width: int = 0
    hidden: int = 0
    batch: int = 0
    layers: int = 1
    rounds: int = 30
    retraces: int = 5
    calls: int = 200
    json: Path = ROOT / "benchmarks" / "results" / "megatron.json"

    def resolved(self) -> Options:
        width, hidden, batch = SIZES[self.preset]
        return dataclasses.replace(self, width=self.width or width, hidden=self.hidden or hidden, batch=self.batch or batch)


@dataclass
class Contender:
    """One implementation of the step.

    Attributes:
        step: run one step and return without waiting for the devices.
        wait: until the parameters that `step` changed are there.
        seconds: trace, lower and compile a fresh program; None for eager PyTorch.
        facts: collectives, FLOPs, instructions and memory of the compiled program.
    """

    step: Callable[[], Any]
    wait: Callable[[], Any] = lambda: None
    seconds: Callable[[], dict[str, float]] | None = None
    facts: Callable[[], dict[str, Any]] | None = None


class MLP(nn.Module):
    """B batch, D width, H hidden."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x_BD)))


def torch_step(model: nn.Module) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The training step; eager on the CPU and compiled by us, unchanged."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(BETA1, BETA2), eps=EPS, weight_decay=WEIGHT_DECAY)

    def train_step(x_BD: torch.Tensor, y_BD: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x_BD), y_BD)
        loss.backward()
        optimizer.step()
        return loss

    return train_step


def eager(host: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Contender:
    """PyTorch on the CPU, one device."""
    train_step = torch_step(copy.deepcopy(host))
    return Contender(lambda: train_step(x, y))


def ours(host: nn.Module, x: torch.Tensor, y: torch.Tensor, grid: mesh.Mesh) -> Contender:
    """Megatron shardings over the mesh's last axis (torch's Linear.weight is [out, in]), the batch split over the first."""
    data, model_axis = grid.axis_names[0], grid.axis_names[-1]
    model = copy.deepcopy(host).to("jax")
    specs = {"up.weight": (model_axis, None), "up.bias": (model_axis,), "down.weight": (None, model_axis), "down.bias": (None,)}
    for name, parameter in model.named_parameters():
        spmd.mark_sharding(parameter, grid, specs[name.partition(".")[2]])
    x, y = (spmd.mark_sharding(t.to("jax"), grid, (data, None)) for t in (x, y))
    train_step = torch_step(model)
    program = spmd.compile(train_step)

    def wait() -> None:
        jax.block_until_ready([p.jax for p in model.parameters()])

    def seconds() -> dict[str, float]:
        fresh = spmd.compile(train_step)
        fresh(x, y)
        wait()
        return dataclasses.asdict(fresh.timings)

    def facts() -> dict[str, Any]:
        found = facts_of(program.hlo(), program.collectives(), program.memory())
        return found | {"executables": program.num_executables, "retraces": len(program.retraces)}

    return Contender(lambda: program(x, y), wait, seconds, facts)


def hand_loss(params: list[Any], x_BD: jax.Array, y_BD: jax.Array) -> jax.Array:
    """Mean squared error of the blocks in JAX."""
    out_BD = x_BD
    for block in params:
        h_BH = jax.nn.gelu(out_BD @ block["up"]["weight"].T + block["up"]["bias"], approximate=False)
        out_BD = h_BH @ block["down"]["weight"].T + block["down"]["bias"]
    return jnp.mean((out_BD - y_BD) ** 2)


def hand_adamw(params: Any, grads: Any, first: Any, second: Any, count: jax.Array) -> tuple[Any, Any, Any, jax.Array]:
    """torch.optim.AdamW's arithmetic on pytrees, bias corrections from one step counter."""
    count = count + 1
    correction1, correction2 = 1 - BETA1**count, 1 - BETA2**count
    first = jax.tree.map(lambda m, g: m + (1 - BETA1) * (g - m), first, grads)
    second = jax.tree.map(lambda v, g: BETA2 * v + (1 - BETA2) * g * g, second, grads)

    def updated(p: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
        return p * (1 - LR * WEIGHT_DECAY) - LR / correction1 * m / (jnp.sqrt(v) / jnp.sqrt(correction2) + EPS)

    return jax.tree.map(updated, params, first, second), first, second, count


def hand_step() -> Callable[..., Any]:
    """The step as a fresh function, so that jax reuses nothing of an earlier trace."""

    def train_step(state: tuple[Any, ...], x_BD: jax.Array, y_BD: jax.Array) -> tuple[Any, jax.Array]:
        params, *rest = state
        loss, grads = jax.value_and_grad(hand_loss)(params, x_BD, y_BD)
        return hand_adamw(params, grads, *rest), loss

    return train_step


def by_hand(host: nn.Sequential, x: torch.Tensor, y: torch.Tensor, grid: mesh.Mesh) -> Contender:
    """Pytrees, state donated, every sharding pinned; weights [out, in] as in torch, which XLA:CPU multiplies twice as fast as [in, out]."""
    data, model_axis = grid.axis_names[0], grid.axis_names[-1]
    place = lambda *spec: NamedSharding(grid.to_jax(), P(*spec))  # noqa: E731
    up, down = {"weight": place(model_axis, None), "bias": place(model_axis)}, {"weight": place(None, model_axis), "bias": place(None)}
    block = {"up": up, "down": down}
    shardings = ([block] * len(host), [block] * len(host), [block] * len(host), place())
    zeros = jax.tree.map(np.zeros_like, params := [arrays_of(mlp) for mlp in host])
    state = jax.device_put((params, zeros, zeros, np.float32(0)), shardings)
    batch = jax.device_put((x.numpy(), y.numpy()), place(data, None))

    def fresh() -> Any:
        return jax.jit(hand_step(), donate_argnums=0, out_shardings=(shardings, place()))

    jitted, held = fresh(), [state, None]

    def step() -> None:
        held[:] = jitted(held[0], *batch)

    def seconds() -> dict[str, float]:
        jitted, marks = fresh(), [time.perf_counter()]
        traced = jitted.trace(held[0], *batch)
        marks.append(time.perf_counter())
        lowered = traced.lower()
        marks.append(time.perf_counter())
        lowered.compile()
        marks.append(time.perf_counter())
        return {name: after - before for name, before, after in zip(STAGES, marks, marks[1:], strict=False)}

    def facts() -> dict[str, Any]:
        compiled = jitted.lower(held[0], *batch).compile()
        text = compiled.as_text()
        return facts_of(text, _hlo.collectives(text, tuple(grid.axis_names), tuple(grid.mesh_shape)), _hlo.memory(compiled))

    return Contender(step, lambda: jax.block_until_ready(held), seconds, facts)


def arrays_of(mlp: nn.Module) -> dict[str, Any]:
    """One block's parameters as a pytree."""
    return {name: {key: p.detach().numpy().copy() for key, p in child.named_parameters()} for name, child in mlp.named_children()}


def facts_of(text: str, collectives: _hlo.CollectiveReport, memory: _hlo.MemoryReport) -> dict[str, Any]:
    """What the compiled program says of itself, per device and call."""
    by_axis = {f"{kind} over {'+'.join(axes) or '?'}": count for (kind, axes), count in sorted(collectives.by_axis().items())}
    facts = {"collectives": by_axis, "collective_bytes": collectives.num_bytes, "flops": _hlo.flops(text)}
    return facts | {"instructions": _hlo.instruction_count(text), "peak_bytes": memory.peak_bytes, "temp_bytes": memory.temp_bytes}


def contenders(grid: mesh.Mesh, width: int, hidden: int, batch: int, layers: int) -> dict[str, Contender]:
    """The same model and data, three times."""
    torch.manual_seed(0)
    host = nn.Sequential(*(MLP(width, hidden) for _ in range(layers)))
    x, y = torch.randn(batch, width), torch.randn(batch, width)
    return {"jax": by_hand(host, x, y, grid), "ours": ours(host, x, y, grid), "torch": eager(host, x, y)}


def measured_stages(found: dict[str, Contender], num_warm: int) -> dict[str, Any]:
    """Seconds to trace, lower and compile: the first time with jax's caches empty, and the median of some more times."""
    runs: dict[str, list[dict[str, float]]] = {"jax": [], "ours": []}
    for number in range(num_warm + 1):
        for name in runs:
            if number == 0:
                jax.clear_caches()
                jax.jit(lambda x: x + 1).lower(1).compile()  # what jax does once in a process is neither's
            runs[name].append(found[name].seconds())
    warm = {name: {stage: statistics.median(run[stage] for run in of[1:]) for stage in STAGES} for name, of in runs.items()}
    return {name: {"cold": runs[name][0], "warm": warm[name]} for name in runs}


def measured_calls(found: dict[str, Contender], rounds: int) -> dict[str, dict[str, Any]]:
    """`rounds` steps of each contender in turns, by each of the clocks that ABOUT describes."""
    names, seconds = list(found), {kind: {name: list[float]() for name in found} for kind in CLOCKS}
    for number in range(-WARM_UP, rounds):
        for name in (*names[number % len(names) :], *names[: number % len(names)]):
            cpu, start = time.thread_time(), time.perf_counter()
            found[name].step()
            returned, cpu_returned = time.perf_counter(), time.thread_time()
            found[name].wait()
            ready = time.perf_counter()
            if number >= 0:
                for kind, value in zip(CLOCKS, (ready - start, returned - start, cpu_returned - cpu), strict=True):
                    seconds[kind][name].append(value)
    return {kind: summary(of) for kind, of in seconds.items()}


def summary(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Median and least seconds of each contender, and the median over the rounds of its ratio to JAX by hand."""
    return {
        name: {
            "median_s": statistics.median(times),
            "least_s": min(times),
            "ratio": statistics.median(a / b for a, b in zip(times, seconds["jax"], strict=True)),
        }
        for name, times in seconds.items()
    }


def measure(options: Options) -> dict[str, Any]:
    """Everything that the table shows, as JSON-able data."""
    grid = mesh.Mesh.from_string(options.mesh)
    models = {
        "step": contenders(grid, options.width, options.hidden, options.batch, options.layers),
        "small": contenders(grid, *SMALL),
    }
    del models["small"]["torch"]
    narrow = contenders(grid, *SMALL[:3], options.layers)
    results: dict[str, Any] = {"about": ABOUT, "machine": machine(), "options": described(options)}
    results["stages"] = {
        "step": measured_stages(narrow, options.retraces),
        "small": measured_stages(models["small"], options.retraces),
    }
    results["calls"] = {
        "step": measured_calls(models["step"], options.rounds),
        "small": measured_calls(models["small"], options.calls),
    }
    results["programs"] = {model: {n: c.facts() for n, c in found.items() if c.facts} for model, found in models.items()}
    return results | {"goals": goals(results)}


def goals(results: dict[str, Any]) -> list[dict[str, Any]]:
    """What was asked for beside what was measured; `ratio` is ours to JAX by hand."""
    rows: list[dict[str, Any]] = []

    def add(what: str, goal: float, ours: float, hand: float, ratio: float | None = None) -> None:
        ratio = ours / hand if ratio is None else ratio
        rows.append({"what": what, "ours": ours, "jax": hand, "ratio": ratio, "goal": goal, "met": ratio <= goal})

    def add_calls(what: str, goal: float, of: dict[str, Any]) -> None:
        add(what, goal, of["ours"]["median_s"], of["jax"]["median_s"], of["ours"]["ratio"])

    add_calls("step, s", 1.05, results["calls"]["step"]["ready"])
    add_calls(f"host dispatch of {NUM_SMALL} parameters, CPU s", 2, results["calls"]["small"]["returned_cpu"])
    for model, title in (("step", "the step"), ("small", f"{NUM_SMALL} parameters")):
        for kind in ("cold", "warm"):
            seconds = {name: of[kind]["trace_s"] + of[kind]["lower_s"] for name, of in results["stages"][model].items()}
            add(f"trace + lower of {title}, {kind}, s", 2, seconds["ours"], seconds["jax"])
    for model, title in (("step", "the step"), ("small", f"{NUM_SMALL} parameters")):
        facts = results["programs"][model]
        for fact, goal in (("peak_bytes", 1.01), ("flops", 1), ("collective_bytes", 1)):
            add(f"{fact.replace('_', ' ')} of {title}", goal, facts["ours"][fact], facts["jax"][fact])
    return rows


def machine() -> dict[str, Any]:
    """What the numbers depend on; no names of hosts or paths."""
    about = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = next((line.partition(":")[2].strip() for line in about.splitlines() if line.startswith("model name")), platform.processor())
    packages = {name: importlib.metadata.version(name) for name in ("torch", "jax", "jaxlib", "numpy")}
    return {"cpu": model, "cores": os.cpu_count(), "system": platform.system(), "python": platform.python_version()} | packages


def described(options: Options) -> dict[str, Any]:
    return {name: value for name, value in dataclasses.asdict(options).items() if name != "json"}


def table(results: dict[str, Any]) -> rich.table.Table:
    """Goal beside measured."""
    shown = rich.table.Table(title=f"Megatron step, {results['options']['mesh']}, {results['machine']['cpu']}")
    for name in ("", "ours", "JAX by hand", "ratio", "goal", "met"):
        shown.add_column(name, justify="left" if not name else "right")
    for row in results["goals"]:
        met = "[green]yes" if row["met"] else "[red]no"
        shown.add_row(row["what"], *(f"{row[k]:,.4g}" for k in ("ours", "jax")), f"{row['ratio']:.3f}", f"<= {row['goal']:g}", met)
    for program, of in results["programs"].items():
        found = [", ".join(f"{count} {kind}" for kind, count in of[name]["collectives"].items()) for name in ("ours", "jax")]
        shown.add_row(f"collectives, {program}", *found, "", "same", "[green]yes" if found[0] == found[1] else "[red]no")
    for model, title in (("step", "the step"), ("small", f"{NUM_SMALL} parameters")):
        shown.add_row(f"optimizer state of {title}, cold, s", f"{results['stages'][model]['ours']['cold']['prepare_s']:.4g}")
    shown.add_row("eager torch on the CPU, s", f"{results['calls']['step']['ready']['torch']['median_s']:.4g}")
    return shown


def main() -> None:
    options = tyro.cli(Options, description=__doc__).resolved()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mesh.AcceleratorIdle)
        mesh.virtual_devices(math.prod(int(axis.partition("=")[2]) for axis in options.mesh.split(",")))
    results = measure(options)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(results, indent=1) + "\n")
    rich.print(table(results))


if __name__ == "__main__":
    main()
