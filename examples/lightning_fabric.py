"""Lightning's Fabric over 8 virtual devices: an ordinary Fabric loop with another accelerator and strategy."""

# pyright: reportMissingImports=none

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import spmd.lightning
from mesh import Mesh, virtual_devices

virtual_devices(8)  # 8 virtual CPU devices; omit this line on a machine with accelerators
strategy = spmd.lightning.SpmdFabricStrategy(Mesh(range(8), (8,), ("fsdp",)), rules="fsdp")
fabric = Fabric(accelerator="jax", strategy=strategy)
fabric.launch()

seed_everything(0)
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 8))
model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
batches = fabric.setup_dataloaders(DataLoader(TensorDataset(torch.randn(256, 16), torch.randint(0, 8, (256,))), batch_size=32))
for epoch in range(4):
    for x, y in batches:  # 32 is the global batch
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        fabric.backward(loss)
        optimizer.step()
    print(f"epoch {epoch + 1}: loss {loss.item():.4f}")
