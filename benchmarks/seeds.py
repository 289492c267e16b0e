"""Runs random trials, one per seed, in a worker process, so that a trial that crashes or hangs does not end the run.

for seed, answer in trials("benchmarks.fuzz_trials", range(100), timeout_s=60.0):   # the result of `trial(seed)`, or of its failure
    ...
"""

from __future__ import annotations

import importlib
import os
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

from benchmarks.worker import Worker, serve

# These flags do not affect the partitioner. LLVM's optimizations would take longer than running each program once.
FAST_COMPILATION = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
TRIALS_PER_WORKER = 100  # compiled programs accumulate in a worker's memory
_FORGET_EVERY = 25  # trials between two `jax.clear_caches()`


def trials(module: str, seeds: Iterable[int], timeout_s: float) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields each seed with the result of the module's `trial`, or {"result": "abort: ..."} if the worker crashed or timed out."""
    worker, began = _start(module), time.monotonic()
    try:
        for number, seed in enumerate(seeds, 1):
            answer = worker.ask({"seed": seed}, timeout_s)
            if isinstance(answer, str) or number % TRIALS_PER_WORKER == 0:
                worker.stop()
                worker = _start(module)
            if number % 100 == 0:
                sys.stderr.write(f"{number} trials, {time.monotonic() - began:.0f} s\n")
            yield seed, {"result": f"abort: {answer}"} if isinstance(answer, str) else answer
    finally:
        worker.stop()


def kind_of(result: str) -> str:
    """The first word of a result: "equal", "wrong", "abort", ..."""
    return result.partition(":")[0]


def _start(module: str) -> Worker:
    return Worker([sys.executable, "-m", "benchmarks.seeds", module], env={**os.environ, "XLA_FLAGS": FAST_COMPILATION})


def _serve(module: str) -> None:
    """Run in the worker: reply with one JSON line per seed on standard output until standard input ends."""
    warnings.simplefilter("ignore")
    import torch

    import mesh

    mesh.virtual_devices(8)
    trial = importlib.import_module(module).trial
    torch.set_num_threads(1)
    serve(lambda request: trial(request["seed"]), forget_every=_FORGET_EVERY)


if __name__ == "__main__":
    _serve(sys.argv[1])
