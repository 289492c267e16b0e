"""A small ResNet over 8 virtual devices: BatchNorm over the global batch, bfloat16 autocast, and evaluation of averaged weights."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import spmd
from mesh import Mesh, virtual_devices

virtual_devices(8)  # 8 virtual CPU devices; omit this line on a machine with accelerators
mesh = Mesh(range(8), (8,), ("data",))


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),  # statistics of all 64 images, as on one device: the program sees the global batch
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.layers(x))


torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), Residual(16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4)).to("jax")
spmd.shard_module(model, mesh, [("**", None)])  # all parameters are replicated; only the batch is sharded
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95), use_buffers=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)

# Images of four classes. Each class is brighter in one quarter of the image.
labels = torch.randint(4, (512,))
images = torch.randn(512, 3, 16, 16)
for quarter in range(4):
    top, left = 8 * (quarter // 2), 8 * (quarter % 2)
    images[labels == quarter, quarter % 3, top : top + 8, left : left + 8] += 1.0
train, held_out = ((images[rows], labels[rows]) for rows in (slice(384), slice(384, None)))


@spmd.compile
def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    with torch.autocast("jax", torch.bfloat16):
        loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    average.update_parameters(model)  # averages BatchNorm's statistics too
    return loss


@spmd.compile
@torch.no_grad()
def num_right(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (average(x).argmax(1) == y).sum()


batches = spmd.shard_loader(DataLoader(TensorDataset(*train), batch_size=64, shuffle=True), mesh, ("data",))
for epoch in range(8):
    for x, y in batches:
        loss = train_step(x, y)
    print(f"epoch {epoch + 1}: loss {loss.item():.3f}")

average.eval()
right = sum(int(num_right(x, y)) for x, y in spmd.shard_loader(DataLoader(TensorDataset(*held_out), batch_size=64), mesh, ("data",)))
print(f"{right} of {len(held_out[1])} held-out images")
assert right > 0.7 * len(held_out[1])
