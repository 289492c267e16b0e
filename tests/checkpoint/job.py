"""What `test_gang.py` runs in several processes: a few steps of a sharded model, saved, and the losses written down.

spmd launch -n 2 --devices-per-process 4 tests/checkpoint/job.py FOLDER LOSSES STEPS
"""

import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

import mesh
import spmd


def main(folder: Path, losses: Path, steps: int) -> None:
    host = mesh.init()
    count = mesh.device_count()
    grid = mesh.Mesh(range(count), (count // 2, 2), ("data", "model"))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 16)).to("jax")
    spmd.mark_sharding(model.get_parameter("0.weight"), grid, ("model", None))
    spmd.mark_sharding(model.get_parameter("2.weight"), grid, ("data", "model"))  # over all processes
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    # Every process yields its own part of the global batch: rows, seeded by their number.
    rows = 8 // host.count
    own = [
        torch.stack([torch.randn(16, generator=torch.Generator().manual_seed(100 * n + host.index * rows + i)) for i in range(rows)])
        for n in range(8)
    ]
    batches = spmd.shard_loader(own, grid, ("data", None))

    @spmd.compile
    def train_step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        return loss

    state = {"model": model, "optimizer": optimizer, "batches": batches}
    step = spmd.checkpoint.restore(folder, state).step if spmd.checkpoint.has_step(folder) else 0
    found: list[float] = []
    for x in batches:
        found.append(train_step(x).item())
        step += 1
        if step == steps:  # not before the step: the place counts batches that were handed out
            break
    spmd.checkpoint.save(folder, step, state)
    spmd.checkpoint.join()
    exported = folder.with_name(f"{folder.name}-safetensors-{step}")
    spmd.checkpoint.save_safetensors(exported, model)
    spmd.checkpoint.load_safetensors(exported, model)
    if host.index == 0:
        losses.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
