"""DistributedDataParallel over 8 virtual devices: the wrapper shards the batch, and one all-reduce sums the gradients."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import spmd
from mesh import virtual_devices

virtual_devices(8)  # 8 virtual CPU devices; omit this line on a machine with accelerators

torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4)).to("jax"))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)


@spmd.compile
def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


x, y = torch.randn(64, 16).to("jax"), torch.randint(0, 4, (64,)).to("jax")  # the global batch, because there is one process
for step in range(20):
    loss = train_step(x, y)
    if step % 5 == 4:
        print(f"step {step + 1}: loss {loss.item():.4f}")
print(train_step.collectives())
