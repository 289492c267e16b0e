"""Lightning's Trainer over 8 virtual devices: an ordinary Lightning script with another accelerator and strategy."""

# pyright: reportMissingImports=none, reportUntypedBaseClass=none

import lightning
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import spmd.lightning
from mesh import Mesh, virtual_devices

virtual_devices(8)  # 8 virtual CPU devices; omit this line on a machine with accelerators


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 4)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        x, y = batch
        loss = F.cross_entropy(self.down(F.gelu(self.up(x))), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


lightning.seed_everything(0)
data = TensorDataset(torch.randn(256, 16), torch.randint(0, 4, (256,)))
rules = [("up.weight", ("model", None)), ("up.bias", ("model",)), ("down.weight", (None, "model")), ("down.bias", None)]
strategy = spmd.lightning.SpmdStrategy(Mesh(range(8), (4, 2), ("data", "model")), rules=rules)
trainer = lightning.Trainer(accelerator="jax", strategy=strategy, max_epochs=4, logger=False, enable_progress_bar=False)
trainer.fit(Classifier(), DataLoader(data, batch_size=32))  # 32 is the global batch
print(f"loss {trainer.callback_metrics['loss']:.4f}")
