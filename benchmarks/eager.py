"""Cost of PyTorch's operators on device 'jax' compared with jax's own: an eager add, and tracing a chain of operators.

    python benchmarks/eager.py                       # writes benchmarks/results/eager.json
    python benchmarks/eager.py --rounds 5 --json /tmp/eager.json

"add" is an eager `x + x` of 8 x 8 numbers. "trace" is the time inside a function of CHAIN operators while it is traced, by `spmd.compile`
with torch's operators or by `jax.jit` with jax.numpy's. Both sides alternate within a round, in one process on one CPU device. The figure
of a round is the median of its calls (the first round warms up). The reported ratio is the median over the rounds, for the CPU time of the
thread and for wall time. Goals: 2.5 for the add, 2 for tracing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402

jax.config.update("jax_platforms", "cpu")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402

import spmd  # noqa: E402

DEFAULT_JSON = ROOT / "benchmarks" / "results" / "eager.json"
GOALS = {"add": 2.5, "trace": 2.0}
BLOCKS = 20  # number of blocks in the chain, of ten operators each
CHAIN = BLOCKS * 10
Clock = Callable[[], float]
CLOCKS: dict[str, Clock] = {"cpu": time.thread_time, "wall": time.perf_counter}
Times = dict[str, float]  # seconds by clock


def timed(call: Callable[[], Any], repeats: int) -> Times:
    """Seconds per call, averaged over `repeats` consecutive calls."""
    starts = {name: clock() for name, clock in CLOCKS.items()}
    for _ in range(repeats):
        call()
    return {name: (clock() - starts[name]) / repeats for name, clock in CLOCKS.items()}


def adds(rounds: int, calls: int) -> tuple[list[Times], list[Times]]:
    """Seconds per eager add in each round, ours and jax's."""
    array = jnp.asarray(np.ones((8, 8), np.float32))
    tensor = torch.ones(8, 8).to("jax") * 1
    sides: tuple[Callable[[], Any], ...] = (lambda: tensor + tensor, lambda: array + array)
    found: tuple[list[Times], ...] = ([], [])
    for number in range(rounds + 1):
        samples: tuple[list[Times], ...] = ([], [])
        for _ in range(calls):
            for side, call in enumerate(sides):
                samples[side].append(timed(call, 20))
        jax.block_until_ready(array + array)
        if number:  # the first round warms up
            for side in (0, 1):
                found[side].append(medians(samples[side]))
    return found[0], found[1]


def torch_chain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    for _ in range(BLOCKS):
        y = torch.tanh(x @ w)
        y = y - y.mean(-1, keepdim=True)
        y = torch.exp(y * 0.5) + x
        x = torch.where(y > 1.0, y, x).transpose(0, 1)
    return x


def jnp_chain(x: jax.Array, w: jax.Array) -> jax.Array:
    for _ in range(BLOCKS):
        y = jnp.tanh(x @ w)
        y = y - jnp.mean(y, -1, keepdims=True)
        y = jnp.exp(y * 0.5) + x
        x = jnp.swapaxes(jnp.where(y > 1.0, y, x), 0, 1)
    return x


def traces(rounds: int, calls: int) -> tuple[list[Times], list[Times]]:
    """Seconds inside the chain while it is traced in each round, ours and jax's."""
    x, w = (np.full((8, 8), 0.1, np.float32) for _ in range(2))
    tensors, arrays = [torch.from_numpy(v).to("jax") for v in (x, w)], [jnp.asarray(v) for v in (x, w)]

    def inside(chain: Callable[[Any, Any], Any], trace: Callable[[Callable[[Any, Any], Any]], object]) -> Times:
        spent: list[Times] = []

        def clocked(x: Any, w: Any) -> Any:
            starts = {name: clock() for name, clock in CLOCKS.items()}
            out = chain(x, w)
            spent.append({name: clock() - starts[name] for name, clock in CLOCKS.items()})
            return out

        clocked.__module__ = jax.__name__  # counts as a library: a traced user function may not read a clock
        trace(clocked)
        return spent[-1]

    found: tuple[list[Times], ...] = ([], [])
    for number in range(rounds + 1):
        samples: tuple[list[Times], ...] = ([], [])
        for _ in range(calls):
            samples[0].append(inside(torch_chain, lambda fn: spmd.compile(fn).program(*tensors)))
            samples[1].append(inside(jnp_chain, lambda fn: jax.jit(fn).trace(*arrays)))
        if number:
            for side in (0, 1):
                found[side].append(medians(samples[side]))
    return found[0], found[1]


def medians(samples: list[Times]) -> Times:
    return {name: statistics.median(sample[name] for sample in samples) for name in CLOCKS}


def compared(name: str, ours: list[Times], theirs: list[Times], per: int) -> dict[str, Any]:
    """Median microseconds per operator of both sides, and median of their ratio within a round, by clock."""
    found: dict[str, Any] = {"goal": GOALS[name]}
    for clock in CLOCKS:
        found[clock] = {
            "ours_us": round(statistics.median(t[clock] for t in ours) * 1e6 / per, 2),
            "jax_us": round(statistics.median(t[clock] for t in theirs) * 1e6 / per, 2),
            "ratio": round(statistics.median(a[clock] / b[clock] for a, b in zip(ours, theirs, strict=True)), 2),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, default=DEFAULT_JSON, metavar="OUT")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {
        "add": compared("add", *adds(chosen.rounds, 30), 1),
        "trace": compared("trace", *traces(chosen.rounds, 3), CHAIN),
        "setting": {"rounds": chosen.rounds, "chain": CHAIN, "cores": os.cpu_count(), "torch": torch.__version__, "jax": jax.__version__},
    }
    for name in GOALS:
        for clock in CLOCKS:
            row = results[name][clock]
            sides = f"ours {row['ours_us']:8.2f} us  jax {row['jax_us']:8.2f} us"
            print(f"{name:6} {clock:5} {sides}  ratio {row['ratio']:.2f}  goal {GOALS[name]}")
    chosen.json.parent.mkdir(parents=True, exist_ok=True)
    chosen.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
