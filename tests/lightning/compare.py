"""Lightning's Trainer and Fabric on device 'jax' beside the CPU: run by test_lightning.py, with `trainer` or `fabric`."""

# pyright: reportMissingImports=none, reportUnknownVariableType=none, reportUntypedBaseClass=none, reportUnknownMemberType=none
# pyright: reportUnknownArgumentType=none

import copy
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import mesh
import spmd.lightning

lightning: Any = importlib.import_module("lightning")  # it lies in a folder that pyright does not know
PLACES = (("cpu", "auto"), ("jax", "spmd"))
# AdamW divides a gradient by its own size: where one is near zero its rounding moves a weight by a part of the step, 1e-2.
WEIGHTS: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-4 * 1e-2}


def loader() -> Any:
    rng = torch.Generator().manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(48, 16, generator=rng), torch.randint(0, 4, (48,), generator=rng)), batch_size=16)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.losses = network(), []

    def training_step(self, batch: Any, index: int) -> Any:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val", F.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)]


def fitted(module: Module, place: tuple[str, Any], **options: Any) -> Any:
    quiet: Any = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(accelerator=place[0], strategy=place[1], max_epochs=3, **quiet, **options)
    trainer.fit(module, loader(), loader())
    return trainer


def same(got: list[Any], want: list[Any]) -> None:
    """Losses of float32, which three epochs of AdamW are between: no absolute tolerance hides a small one."""
    torch.testing.assert_close([float(g) for g in got], [float(w) for w in want], rtol=1e-5, atol=0)


def trainers() -> None:
    module = Module()
    modules = [copy.deepcopy(module) for _ in PLACES]
    host, device = (fitted(m, place, gradient_clip_val=0.5) for m, place in zip(modules, PLACES, strict=True))
    same(modules[1].losses, modules[0].losses)
    same([device.callback_metrics["val"]], [host.callback_metrics["val"]])
    assert 0 < device.strategy.lazy.num_executables < 10  # first and later steps, their logs, validation, ends of epochs

    files = Path("cpu.ckpt"), Path("jax.ckpt")
    for trainer, file in zip((host, device), files, strict=True):
        trainer.save_checkpoint(file)
    saved = [torch.load(file, weights_only=False) for file in files]
    for name, value in saved[0]["state_dict"].items():
        assert type(saved[1]["state_dict"][name]) is torch.Tensor
        torch.testing.assert_close(saved[1]["state_dict"][name], value, **WEIGHTS)
    assert saved[0].keys() == saved[1].keys()
    same([t.validate(m, loader(), verbose=False)[0]["val"] for t, m in ((device, modules[1]),)], [host.callback_metrics["val"]])

    mine = spmd.lightning.SpmdStrategy(mesh.Mesh(range(8), (4, 2), ("data", "model")), rules=[("**", None)])
    other = Module()
    fitted(other, ("jax", mine))
    again = Module()
    fitted(again, ("cpu", "auto"))
    same(other.losses, again.losses)
    half = [Module() for _ in PLACES]
    for m, place in zip(half, PLACES, strict=True):
        fitted(m, place, precision="bf16-mixed")
    assert abs(float(half[0].losses[-1]) - float(half[1].losses[-1])) < 0.02
    for options, words in (({"precision": "16-mixed"}, "scales losses for CUDA"), ({"devices": 3}, "and the mesh selects among them")):
        with pytest.raises(spmd.SpmdError, match=words):
            fitted(Module(), PLACES[1], **options)
    with pytest.raises(spmd.SpmdError, match="strategy='spmd'"):
        fitted(Module(), ("jax", "auto"))


def fabrics() -> None:
    losses: list[list[Any]] = []
    for accelerator, strategy in PLACES:
        fabric = lightning.Fabric(accelerator=accelerator, strategy=strategy)
        model = network()
        model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        batches = fabric.setup_dataloaders(loader())
        losses.append([])
        for _ in range(2):
            for x, y in batches:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                fabric.backward(loss)
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                losses[-1].append(loss.detach())
        assert len(batches) == 3
        fabric.save(f"{accelerator}.ckpt", {"model": model, "optimizer": optimizer, "steps": 6})
        state = {"model": model, "optimizer": optimizer, "steps": 0}
        fabric.load("cpu.ckpt", state)
        assert state["steps"] == 6
        if accelerator == "jax":
            weight: Any = model.module[0].weight
            assert tuple(weight.partition_spec) == ("fsdp", None)
            assert 0 < fabric.strategy.lazy.num_executables < 6
            fabric.strategy.teardown()
    same(losses[1], losses[0])
    saved = [torch.load(f"{place[0]}.ckpt", weights_only=True) for place in PLACES]
    for name, value in saved[0]["model"].items():
        torch.testing.assert_close(saved[1]["model"][name], value, **WEIGHTS)


if __name__ == "__main__":
    mesh.virtual_devices(8)
    {"trainer": trainers, "fabric": fabrics}[sys.argv[1]]()
    print("equal")
