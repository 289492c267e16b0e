"""A Megatron-sharded MLP on 8 virtual devices: mark three parameters, compile the step, train, and print the collectives."""

import torch
import torch.nn.functional as F
from torch import nn

import spmd
from mesh import Mesh, virtual_devices

virtual_devices(8)  # 8 virtual CPU devices; omit this line on a machine with accelerators
mesh = Mesh(range(8), (4, 2), ("data", "model"))


class MegatronMLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


torch.manual_seed(0)
model = MegatronMLP(1024, 4096).to("jax")
spmd.mark_sharding(model.up.weight, mesh, ("model", None))  # Linear.weight is [out, in]: column parallel
spmd.mark_sharding(model.up.bias, mesh, ("model",))
spmd.mark_sharding(model.down.weight, mesh, (None, "model"))  # row parallel
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


@spmd.compile  # one donated jax.jit program of forward, backward and optimizer; its state is found automatically
def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


x = spmd.mark_sharding(torch.randn(64, 1024).to("jax"), mesh, ("data", None))
y = spmd.mark_sharding(torch.randn(64, 1024).to("jax"), mesh, ("data", None))
for step in range(20):
    loss = train_step(x, y)  # updates model and optimizer in place; the loss stays on the devices until it is read
    if step % 5 == 4:
        print(f"step {step + 1}: loss {loss.item():.4f}")

print(model.up.weight)
print(train_step.collectives())
print(f"{train_step.num_executables} executable, {len(train_step.retraces)} retraces")
