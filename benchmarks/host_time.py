"""Host time of a call of a compiled step, compared with `jax.jit` on the same flat arrays.

    python benchmarks/host_time.py
    python benchmarks/host_time.py --arrays 100 600 --guarded 0 --calls 50 --json /tmp/host_time.json

Both run the same training step of a chain of small linear layers (SGD with momentum) in one process. They take turns, so that load on
the machine slows them alike. Our step also reads `guarded` Python values (attributes, slots, dict entries, list items), each of which
is a guard that is checked before every call. The figure is the CPU time of the calling thread until the call returns; the devices are
idle when a call starts. The JAX step takes its state as one donated flat list, as a hand-written loop would. The same torch step with its
layers rolled into a loop (`roll=True`), as models of 20,000 operations are by default, passes the state of all layers as a few arrays.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import rich
import rich.table
import torch
import tyro
from torch import nn

import mesh
import spmd

ROOT = Path(__file__).resolve().parents[1]
WIDTH, BATCH, LR, MOMENTUM = 8, 4, 0.1, 0.9


@dataclass(frozen=True)
class Options:
    """Attributes:
    arrays: numbers of state arrays (parameters and momenta) to measure.
    guarded: numbers of guarded Python values to measure.
    calls: number of timed calls of each contender.
    json: file for the results.
    """

    arrays: tuple[int, ...] = (4, 100, 300, 600)
    guarded: tuple[int, ...] = (0, 100, 1000, 3000)
    calls: int = 200
    json: Path = ROOT / "benchmarks" / "results" / "host_time.json"


class Slotted:
    """Ten attributes in slots."""

    __slots__ = tuple(f"a{i}" for i in range(10))


def settings(count: int) -> list[Any]:
    """`count` numbers in plain objects, objects with slots, dicts and lists, in turn, ten numbers in each."""
    made: list[Any] = []
    for _ in range(count // 40):
        plain, slotted = SimpleNamespace(), Slotted()
        for i in range(10):
            setattr(plain, f"a{i}", float(i))
            setattr(slotted, f"a{i}", float(i))
        made.extend((plain, slotted, {f"a{i}": float(i) for i in range(10)}, [float(i) for i in range(10)]))
    return made


def total(read: list[Any]) -> float:
    """The sum of all numbers in `settings`."""
    names, found = [f"a{i}" for i in range(10)], 0.0
    for i in range(0, len(read), 4):
        plain, slotted, entries, items = read[i : i + 4]
        for k, name in enumerate(names):
            found += getattr(plain, name) + getattr(slotted, name) + entries[name] + items[k]
    return found


def ours(parameters: int, guarded: int = 0, *, roll: bool = False) -> tuple[Callable[[], Any], spmd.Step[Any, Any]]:
    """A function that calls the compiled torch step, and the step."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(parameters // 2))).to("jax")
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    read = settings(guarded)

    @spmd.compile(roll=roll)
    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean() * (1 + 1e-9 * total(read))
        loss.backward()
        optimizer.step()
        return loss

    x = torch.ones(BATCH, WIDTH).to("jax")
    return lambda: step(x), step


def by_hand(parameters: int) -> Callable[[], Any]:
    """A function that calls the same step in JAX, on a flat list of arrays."""

    def loss_of(params: list[jax.Array], x: jax.Array) -> jax.Array:
        for weight, bias in zip(params[::2], params[1::2], strict=True):
            x = x @ weight.T + bias
        return jnp.mean(jnp.square(x))

    def step(state: list[jax.Array], x: jax.Array, lr: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        params, momenta = state[:parameters], state[parameters:]
        loss, grads = jax.value_and_grad(loss_of)(params, x)
        momenta = [MOMENTUM * m + g for m, g in zip(momenta, grads, strict=True)]
        return [p - lr * m for p, m in zip(params, momenta, strict=True)] + momenta, loss

    jitted = jax.jit(step, donate_argnums=0)
    shapes = [(WIDTH, WIDTH), (WIDTH,)] * (parameters // 2)
    state = [jnp.full(shape, 0.01) for shape in shapes] + [jnp.zeros(shape) for shape in shapes]
    x, lr = jnp.ones((BATCH, WIDTH)), jnp.float32(LR)

    def call() -> jax.Array:
        nonlocal state
        state, loss = jitted(state, x, lr)
        return loss

    return call


def seconds(call: Callable[[], Any]) -> float:
    """CPU seconds of one call. Waits for the devices afterwards, outside the measured time."""
    start = time.thread_time()
    loss = call()
    spent = time.thread_time() - start
    loss.item()
    return spent


def measure(arrays: int, guarded: int, num_calls: int) -> dict[str, Any]:
    """Median time of each contender, and the medians of our ratios to JAX within a round."""
    (plain, step), (rolled, rolled_step) = (ours(arrays // 2, guarded, roll=roll) for roll in (False, True))
    calls = {"ours": plain, "rolled": rolled, "jax": by_hand(arrays // 2)}
    for call in calls.values():
        for _ in range(5):
            seconds(call)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(num_calls):
        for name in list(calls) if i % 2 else reversed(calls):
            times[name].append(seconds(calls[name]))
    ratio, rolled_ratio = (statistics.median(a / b for a, b in zip(times[name], times["jax"], strict=True)) for name in ("ours", "rolled"))
    assert all(one.num_executables == 1 and not one.retraces for one in (step, rolled_step))
    return {
        "arrays": arrays,
        "guarded": guarded,
        "seconds": {name: statistics.median(values) for name, values in times.items()},
        "ratio": ratio,
        "rolled_ratio": rolled_ratio,
    }


def main(options: Options) -> None:
    mesh.virtual_devices(1)
    table = rich.table.Table("arrays", "guarded values", "ours, us", "rolled, us", "jax.jit, us", "ratio", "rolled / jax.jit")
    rows = [measure(arrays, guarded, options.calls) for arrays in options.arrays for guarded in options.guarded]
    for row in rows:
        times = [f"{row['seconds'][name] * 1e6:.0f}" for name in ("ours", "rolled", "jax")]
        table.add_row(str(row["arrays"]), str(row["guarded"]), *times, f"{row['ratio']:.2f}", f"{row['rolled_ratio']:.2f}")
    results = {
        "what": "median CPU seconds of the calling thread for one call, with idle devices",
        "calls": options.calls,
        "goal": 1.3,
        "rows": rows,
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "jax": jax.__version__},
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    rich.print(table)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
