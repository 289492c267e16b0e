"""Ours: the unchanged PyTorch script with marked parameters and a compiled step."""

from __future__ import annotations

import dataclasses
import fnmatch
from pathlib import Path
from typing import Any

import jax
import torch

import spmd
from mesh import Mesh, virtual_devices
from spmd.device._storage import load


class Contender:
    """The PyTorch step compiled by `spmd`. See `spmd.bench._peer` for the methods."""

    def __init__(self, job: Any) -> None:
        spmd.configure(cache_dir=False)  # compilation is measured
        self.job = job
        self.mesh = Mesh.from_string(job.mesh_text)
        self.device_kind = self.mesh.to_jax().devices.flat[0].device_kind
        self.model = job.model().to_empty(device="jax") if job.topology else job.model().to("jax")
        for name, parameter in self.model.named_parameters():
            spmd.mark_sharding(parameter, self.mesh, job.spec_of(name, parameter.dim()))
        for pattern, spec in job.activations().items():
            self._constrain(pattern, spec)
        self.train_step = job.train_step(self.model, job.script.optimizer(self.model.parameters()))
        self.batches = [[self._placed(t, s) for t, s in zip(batch, job.batch_specs(), strict=True)] for batch in job.batches()]
        self.compiled: Any = spmd.compile(self.train_step)
        self.count, self.last = 0, None

    def _placed(self, tensor: Any, spec: Any) -> Any:
        moved = torch.empty(tensor.shape, dtype=tensor.dtype, device="jax") if tensor.is_meta else tensor.to("jax")
        return spmd.mark_sharding(moved, self.mesh, spec)

    def _constrain(self, pattern: str, spec: Any) -> None:
        for name, module in self.model.named_modules():
            if name and fnmatch.fnmatchcase(name, pattern):
                module.register_forward_hook(lambda _module, _args, result: spmd.mark_sharding(result, self.mesh, spec))

    def step(self) -> None:
        self.last = self.compiled(*self.batches[self.count % len(self.batches)])
        self.count += 1

    def wait(self) -> None:
        jax.block_until_ready([load(p) for p in self.model.parameters()])

    def loss(self) -> float:
        return self.last.item()  # type: ignore[union-attr]

    def stages(self, cold: bool) -> dict[str, float]:
        if cold:
            jax.clear_caches()
            jax.jit(lambda x: x + 1).lower(1).compile()  # jax's one-time work per process is not measured
        fresh: Any = spmd.compile(self.train_step)
        return dataclasses.asdict(fresh.program(*self.batches[0]).timings)

    def program(self) -> dict[str, Any]:
        program = self.compiled.program(*self.batches[0])
        sizes, names = program.memory(), ("argument_bytes", "output_bytes", "temp_bytes", "alias_bytes", "peak_bytes")
        return {
            "hlo": program.hlo(),
            "memory": {name: getattr(sizes, name) for name in names},
            "stages": dataclasses.asdict(program.timings),
            "executables": max(1, self.compiled.num_executables),
            "retraces": list(self.compiled.retraces),
        }

    def save(self, file: Path) -> None:
        state = {name: value.cpu() for name, value in self.model.state_dict().items()}
        self.job.script.save_weights(state, self.job.config, file)


def prepare(job: Any) -> None:
    """Create as many virtual CPU devices as the mesh needs. With another platform the accelerator's devices are used."""
    if job.platform == "cpu":
        virtual_devices(1 if job.topology else job.num_devices)
