"""PyTorch's own distributed API over 8 virtual devices: a tensor parallel plan with FSDP2, and a checkpoint loaded into another mesh."""

# pyright: reportPrivateImportUsage=none

import tempfile
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import spmd
from mesh import virtual_devices

virtual_devices(8)  # 8 virtual CPU devices; omit this line on a machine with accelerators


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def build(mesh: DeviceMesh) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(2)))
    for block in model:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


mesh = init_device_mesh("jax", (2, 4), mesh_dim_names=("dp", "tp"))
model, optimizer = build(mesh)


@spmd.compile
def train(x: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), x)
    loss.backward()
    optimizer.step()
    return loss


for _ in range(5):
    x = distribute_tensor(torch.randn(16, 64), mesh["dp"], [Shard(0)])  # the global batch
    print(f"loss {train(x).item():.4f}")
print(train.collectives())

with tempfile.TemporaryDirectory() as folder:
    saved: Any = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(saved, checkpoint_id=folder)
    model, optimizer = build(init_device_mesh("jax", (4, 2), mesh_dim_names=("dp", "tp")))
    state: Any = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
print(model[0].up.weight)
