"""torch's own sharding: FSDP2 over gloo, one process per device of the mesh; megatron's linears as DTensor too.

This process is rank 0 and starts the others, which run this same file. GPT-2 and ResNet-50 are split over all processes by
`fully_shard`; megatron has `parallelize_module` over the axis `model` and `fully_shard` over the axis `data`.
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

_CONTENDER, _STEP, _STOP = 0, 1, 2


class Rank:
    """One process of the group: its shards and its part of the batches."""

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
        """Split the model; the mesh over which the batch is split."""
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
        """One training step; every rank calls it."""
        self.last = self.train_step(*self.batches[self.count % len(self.batches)])
        self.count += 1

    def mean_loss(self) -> float:
        """Over the parts of the batch; every rank calls it."""
        total = self.last.detach().clone()
        dist.all_reduce(total)
        return total.item() / dist.get_world_size()


class Contender:
    """Rank 0, which the others follow. See `spmd.bench._peer` for what each method means."""

    def __init__(self, job: Any) -> None:
        self.folder = tempfile.TemporaryDirectory()
        folder = Path(self.folder.name)
        (folder / "job.json").write_text(json.dumps(job.to_dict()), encoding="utf-8")
        self.others = [
            subprocess.Popen([sys.executable, __file__, str(folder), str(rank)], stdout=sys.stderr) for rank in range(1, job.num_devices)
        ]
        self.rank = Rank(job, 0, str(folder / "store"))

    def _say(self, what: int) -> None:
        dist.broadcast(torch.tensor(what), 0)

    def step(self) -> None:
        self._say(_STEP)
        self.rank.step()

    def wait(self) -> None:
        """Nothing: gloo's step has ended when it returns."""

    def loss(self) -> float:
        self._say(_CONTENDER)
        return self.rank.mean_loss()

    def stages(self, cold: bool) -> dict[str, float]:
        return {}

    def program(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self._say(_STOP)
        dist.destroy_process_group()
        for other in self.others:
            other.wait()
        self.folder.cleanup()


def prepare(job: Any) -> None:
    """Nothing: a process per device is started by the contender."""


def follow(folder: Path, number: int) -> None:
    """A rank beyond the first: do what rank 0 says."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("_bench_job", Path(__file__).resolve().parents[1] / "_task.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["_bench_job"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rank = Rank(module.Job.from_dict(json.loads((folder / "job.json").read_text(encoding="utf-8"))), number, str(folder / "store"))
    said = torch.zeros((), dtype=torch.int64)
    while True:
        dist.broadcast(said, 0)
        if said.item() == _STOP:
            break
        if said.item() == _STEP:
            rank.step()
        else:
            rank.mean_loss()
    dist.destroy_process_group()


if __name__ == "__main__":
    follow(Path(sys.argv[1]), int(sys.argv[2]))
