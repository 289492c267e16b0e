"""Ours: the PyTorch script unchanged, its parameters marked, its step compiled."""

from __future__ import annotations

import dataclasses
import fnmatch
import time
from typing import Any

import jax

import mesh
import spmd
from spmd.program import _hlo


class Contender:
    """The PyTorch step through `spmd`. See `spmd.bench._peer` for what each method means."""

    def __init__(self, job: Any) -> None:
        self.job = job
        self.grid = mesh.Mesh.from_string(",".join(f"{name}={size}" for name, size in job.axes) or "data=1")
        self.model = job.model().to("jax")
        for name, parameter in self.model.named_parameters():
            spmd.mark_sharding(parameter, self.grid, job.spec_of(name, parameter.dim()))
        for pattern, spec in job.activations().items():
            self._hold(pattern, spec)
        self.optimizer = job.script.optimizer(self.model.parameters())
        specs = job.batch_specs()
        self.batches = [[spmd.mark_sharding(t.to("jax"), self.grid, s) for t, s in zip(b, specs, strict=True)] for b in job.batches()]
        self.compiled = spmd.compile(self.train_step)
        self.count, self.last = 0, None

    def _hold(self, pattern: str, spec: Any) -> None:
        for name, module in self.model.named_modules():
            if name and fnmatch.fnmatchcase(name, pattern):
                module.register_forward_hook(lambda _module, _args, result: spmd.mark_sharding(result, self.grid, spec))

    def train_step(self, *batch: Any) -> Any:
        """The step as anyone writes it."""
        self.optimizer.zero_grad()
        loss = self.job.script.loss(self.model, *batch)
        loss.backward()
        self.optimizer.step()
        return loss

    def step(self) -> None:
        self.last = self.compiled(*self.batches[self.count % len(self.batches)])
        self.count += 1

    def wait(self) -> None:
        jax.block_until_ready([p.jax for p in self.model.parameters()])

    def loss(self) -> float:
        return self.last.item()  # type: ignore[union-attr]

    def stages(self, cold: bool) -> dict[str, float]:
        if cold:
            jax.clear_caches()
            jax.jit(lambda x: x + 1).lower(1).compile()  # what jax does once in a process is nobody's
        fresh = spmd.compile(self.train_step)
        before = time.perf_counter()
        fresh(*self.batches[0])
        self.wait()
        return dataclasses.asdict(fresh.timings) | {"first_call_s": time.perf_counter() - before}

    def program(self) -> dict[str, Any]:
        if self.compiled.num_executables == 0:
            self.step()
        memory = _hlo.memory(self.compiled._program.compiled)
        return {
            "hlo": self.compiled.hlo(),
            "memory": {
                name: getattr(memory, name) for name in ("argument_bytes", "output_bytes", "temp_bytes", "alias_bytes", "peak_bytes")
            },
            "executables": self.compiled.num_executables,
            "retraces": list(self.compiled.retraces),
        }

    def weights(self) -> dict[str, Any]:
        return {name: p.detach().cpu().float().numpy() for name, p in self.model.named_parameters()}


def prepare(job: Any) -> None:
    """As many virtual CPU devices as the mesh has, or the accelerator's."""
    if job.platform == "cpu":
        mesh.virtual_devices(1 if job.topology else job.num_devices)
