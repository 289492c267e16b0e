"""torch's own sharding: FSDP2 over gloo, with one process per device of the mesh. Megatron's linears also use DTensor.

This process is rank 0. It starts the other ranks, which run the same file. `fully_shard` shards GPT-2 and ResNet-50 over all
processes. The megatron benchmark uses `parallelize_module` over the axis `model` and `fully_shard` over the axis `data`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

_LOSS, _STEP, _STOP = 0, 1, 2  # commands that rank 0 broadcasts


class Rank:
    """One process of the group, with its shards of the model and of the batches."""

    def __init__(self, job: Any, rank: int, store: str) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=job.num_devices)
        self.job, self.count, self.last = job, 0, torch.zeros(())
        self.model = job.model()
        data = self._shard()
        self.train_step = job.train_step(self.model, job.script.optimizer(self.model.parameters()))
        here = data.get_local_rank()
        self.batches = [[t.chunk(data.size())[here] for t in batch] for batch in job.batches()]

    def _shard(self) -> Any:
        """Shard the model, and return the mesh that the batch is split over."""
        sizes = dict(self.job.axes)
        model_size = sizes.get("model", 1) if self.job.name == "megatron" and self.job.config.variant == "plain" else 1
        mesh = init_device_mesh("cpu", (self.job.num_devices // model_size, model_size), mesh_dim_names=("data", "model"))
        if model_size > 1:
            for block in self.model:
                parallelize_module(block, mesh["model"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        for module in self.model.modules():
            if isinstance(module, torch.nn.ModuleList) or (isinstance(module, torch.nn.Sequential) and module is not self.model):
                for block in module:
                    if any(p.requires_grad for p in block.parameters()):
                        fully_shard(block, mesh=mesh["data"])
        fully_shard(self.model, mesh=mesh["data"])
        return mesh["data"]

    def step(self) -> None:
        """Run one training step. A collective: every rank calls it."""
        self.last = self.train_step(*self.batches[self.count % len(self.batches)])
        self.count += 1

    def mean_loss(self) -> float:
        """Mean loss over the parts of the batch. A collective: every rank calls it."""
        total = self.last.detach().clone()
        dist.all_reduce(total)
        return total.item() / dist.get_world_size()


class Contender:
    """Rank 0, which sends commands to the other ranks. See `spmd.bench._peer` for the methods."""

    def __init__(self, job: Any) -> None:
        self.folder = tempfile.TemporaryDirectory()
        folder = Path(self.folder.name)
        (folder / "job.json").write_text(json.dumps(job.to_dict()), encoding="utf-8")
        self.others = [
            subprocess.Popen([sys.executable, __file__, str(folder), str(rank)], stdout=sys.stderr) for rank in range(1, job.num_devices)
        ]
        self.rank = Rank(job, 0, str(folder / "store"))

    def _send(self, command: int) -> None:
        dist.broadcast(torch.tensor(command), 0)

    def step(self) -> None:
        self._send(_STEP)
        self.rank.step()

    def wait(self) -> None:
        """Do nothing: with gloo a step is complete when it returns."""

    def loss(self) -> float:
        self._send(_LOSS)
        return self.rank.mean_loss()

    def stages(self, cold: bool) -> dict[str, float]:
        return {}

    def program(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self._send(_STOP)
        dist.destroy_process_group()
        for other in self.others:
            other.wait()
        self.folder.cleanup()


def prepare(job: Any) -> None:
    """Do nothing: the contender starts one process per device."""


def follow(folder: Path, number: int) -> None:
    """Run a rank other than 0: execute the commands that rank 0 broadcasts."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("_bench_job", Path(__file__).resolve().parents[1] / "_task.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["_bench_job"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rank = Rank(module.Job.from_dict(json.loads((folder / "job.json").read_text(encoding="utf-8"))), number, str(folder / "store"))
    command = torch.zeros((), dtype=torch.int64)
    while True:
        dist.broadcast(command, 0)
        if command.item() == _STOP:
            break
        if command.item() == _STEP:
            rank.step()
        else:
            rank.mean_loss()
    dist.destroy_process_group()


if __name__ == "__main__":
    follow(Path(sys.argv[1]), int(sys.argv[2]))
