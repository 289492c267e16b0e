"""Step time of a loop under `spmd.lazy()`, compared with the same step under `spmd.compile`: GPT-2 and ResNet-50 on 8 virtual devices.

    python benchmarks/lazy.py                # writes benchmarks/results/lazy.json
    python benchmarks/lazy.py --script gpt2 --preset tiny

Both train in one process in alternating turns. The figures are the median of the ratios of their turns, and the number of programs.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import torch

import spmd
from mesh import Mesh, virtual_devices
from spmd.device._storage import load

RESULTS = Path(__file__).resolve().parent / "results" / "lazy.json"


class Trained:
    """One model in training: `turn(n)` runs n steps."""

    def __init__(self, script: Any, config: Any, mesh: Mesh) -> None:
        torch.manual_seed(0)
        self.model = script.build(config).to("jax")
        table = script.shardings(config)
        for name, parameter in self.model.named_parameters():
            spmd.mark_sharding(parameter, mesh, spec_of(table, name, parameter.dim(), mesh))
        self.optimizer = script.optimizer(self.model.parameters())
        self.batches = [[self._placed(t, mesh) for t in batch] for batch in script.batches(config, 4)]
        self.loss_of, self.losses = script.loss, []

    def _placed(self, tensor: torch.Tensor, mesh: Mesh) -> torch.Tensor:
        return spmd.mark_sharding(tensor.to("jax"), mesh, ("data", *(None,) * (tensor.dim() - 1)))

    def step(self, *batch: Any) -> Any:
        self.optimizer.zero_grad()
        loss = self.loss_of(self.model, *batch)
        loss.backward()
        self.optimizer.step()
        return loss

    def turn(self, count: int, step: Callable[..., Any]) -> float:
        """Seconds of `count` steps, until all parameters are computed."""
        start = time.perf_counter()
        for i in range(count):
            loss = step(*self.batches[i % len(self.batches)])
            self.losses.append(loss.detach())
        spmd.sync()
        jax.block_until_ready([spmd_value(p) for p in self.model.parameters()])
        return time.perf_counter() - start


def spmd_value(tensor: torch.Tensor) -> Any:
    return load(tensor)


def spec_of(table: dict[str, Any], name: str, dims: int, mesh: Mesh) -> tuple[Any, ...]:
    """Partition spec of a parameter in the script's table, without axes that the mesh does not have."""
    for pattern, spec in table.items():
        if fnmatch.fnmatchcase(name, pattern):
            return tuple(axis if axis in mesh.axis_names else None for axis in spec)
    return (None,) * dims


def measured(name: str, preset: str, mesh_text: str, turns: int, steps: int) -> dict[str, Any]:
    """Measure one script, and return its figures."""
    script = importlib.import_module(f"benchmarks.{name}")
    config, mesh = script.PRESETS[preset], Mesh.from_string(mesh_text)
    lazily, compiled = Trained(script, config, mesh), Trained(script, config, mesh)
    step = spmd.compile(compiled.step)
    ratios: list[float] = []
    times: list[tuple[float, float]] = []
    with spmd.lazy() as lazy:
        lazily.turn(3, lazily.step)
    compiled.turn(3, step)
    for _ in range(turns):
        with lazy:
            one = lazily.turn(steps, lazily.step)
        other = compiled.turn(steps, step)
        times.append((one / steps, other / steps))
        ratios.append(one / other)
    same = [float(a) == float(b) for a, b in zip(lazily.losses, compiled.losses, strict=True)]
    return {
        "preset": preset,
        "mesh": mesh_text,
        "ratio": statistics.median(ratios),
        "lazy_ms": 1e3 * statistics.median(t[0] for t in times),
        "compiled_ms": 1e3 * statistics.median(t[1] for t in times),
        "programs": lazy.num_executables,
        "operations": lazy.program.node.count,
        "equal_losses": f"{sum(same)} of {len(same)}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--script", choices=("gpt2", "resnet50"), default=None)
    parser.add_argument("--preset", default="small")
    parser.add_argument("--mesh", default="data=2,model=4")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--steps", type=int, default=5)
    chosen = parser.parse_args()
    virtual_devices(8)
    found: dict[str, Any] = {}
    for name in ("gpt2", "resnet50") if chosen.script is None else (chosen.script,):
        found[name] = measured(name, chosen.preset, chosen.mesh, chosen.turns, chosen.steps)
        print(name, json.dumps(found[name]), flush=True)
    if chosen.script is None:
        RESULTS.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
