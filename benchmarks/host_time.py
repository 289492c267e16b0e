"""What a call of a compiled step costs on the host, beside `jax.jit` called with the same flat arrays: 300 parameters.

    python benchmarks/host_time.py
    python benchmarks/host_time.py --parameters 100 --calls 50 --json /tmp/host_time.json

Both run the same training step of a chain of small linear layers (SGD with momentum) in one process and take turns, so that a
busy machine slows them alike. The clock is the CPU time of the calling thread until the call returns; the devices are idle
when a call starts. JAX's contender gets its state as one flat list, donated, the way a hand-written loop holds it.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import rich
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
    parameters: tensors that are trained; the state is twice as many arrays.
    calls: timed calls of each contender.
    json: where the results go.
    """

    parameters: int = 300
    calls: int = 300
    json: Path = ROOT / "benchmarks" / "results" / "host_time.json"


def ours(parameters: int) -> tuple[Callable[[], Any], spmd.Step[Any, Any]]:
    """A call of the compiled torch step, and the step."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(parameters // 2))).to("jax")
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)

    @spmd.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    x = torch.ones(BATCH, WIDTH).to("jax")
    return lambda: step(x), step


def by_hand(parameters: int) -> Callable[[], Any]:
    """A call of the same step in JAX, on a flat list of arrays."""

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
    """CPU seconds of one call; waits for the devices afterwards."""
    start = time.thread_time()
    loss = call()
    spent = time.thread_time() - start
    loss.item()
    return spent


def measure(options: Options) -> dict[str, Any]:
    """Medians of both contenders, and of the ratio within a round."""
    torch_call, step = ours(options.parameters)
    calls = {"ours": torch_call, "jax": by_hand(options.parameters)}
    for call in calls.values():
        for _ in range(5):
            seconds(call)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(options.calls):
        for name in list(calls) if i % 2 else reversed(calls):
            times[name].append(seconds(calls[name]))
    ratios = [a / b for a, b in zip(times["ours"], times["jax"], strict=True)]
    return {
        "what": "CPU seconds of the calling thread for one call, devices idle; medians over the calls",
        "parameters": options.parameters,
        "arrays": 2 * options.parameters,
        "calls": options.calls,
        "seconds": {name: statistics.median(values) for name, values in times.items()},
        "ratio": statistics.median(ratios),
        "goal": 1.5,
        "executables": step.num_executables,
        "retraces": len(step.retraces),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "jax": jax.__version__},
    }


def main(options: Options) -> None:
    mesh.virtual_devices(1)
    results = measure(options)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    times = results["seconds"]
    rich.print(
        f"{results['arrays']} arrays: ours {times['ours'] * 1e6:.0f} us, jax.jit {times['jax'] * 1e6:.0f} us, ratio {results['ratio']:.2f}"
    )


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
