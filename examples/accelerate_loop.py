"""A training loop with Hugging Face's Accelerate over 8 virtual devices: two added lines before an otherwise unchanged script."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import spmd.huggingface
from mesh import Mesh, virtual_devices

virtual_devices(8)  # 8 virtual CPU devices; omit this line on a machine with accelerators
training = spmd.huggingface.train_on(Mesh(range(8), (8,), ("fsdp",)), rules="fsdp")

torch.manual_seed(0)
accelerator = Accelerator(gradient_accumulation_steps=2)
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
x = torch.randn(512, 64)
loader = DataLoader(TensorDataset(x, x[:, :8].argmax(1)), batch_size=64, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for epoch in range(4):
    losses = []
    for inputs, classes in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(inputs), classes)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather_for_metrics(loss.detach()))  # reading the loss in each step would split it into two programs
    accelerator.print(f"epoch {epoch}: loss {torch.stack(losses).mean().item():.4f}")
accelerator.save_model(model, "classifier")

print(f"{training.lazy.num_executables} programs")
