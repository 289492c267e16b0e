"""State that is replaced is gone at once: no program, trace or stack of layers holds the values of before."""

import gc
from pathlib import Path

import jax
import pytest
import torch

import spmd

WIDTH = 37  # no other test's arrays have this shape


class Layers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.scale = torch.nn.Parameter(torch.ones(WIDTH, WIDTH), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x @ self.scale


class Trained:
    """A model, its optimizer, and a compiled step that ran twice."""

    def __init__(self, roll: bool) -> None:
        torch.manual_seed(0)
        self.model = Layers().to("jax")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3)
        self.step = spmd.compile(self._step, roll=roll)
        self.x = torch.ones(3, WIDTH, device="jax")
        for _ in range(2):
            self.step(self.x).item()

    def _step(self, x: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.model(x).pow(2).mean()
        loss.backward()
        self.optimizer.step()
        return loss


def matrices() -> int:
    """How many matrices of this width lie in memory, those in stacks too; several arrays may show one memory."""
    gc.collect(1)  # of all garbage, a million objects of other tests, only what was made lately
    shapes = {a.unsafe_buffer_pointer(): a.shape for a in jax.live_arrays() if a.shape[-2:] == (WIDTH, WIDTH)}
    return sum(shape[0] if len(shape) == 3 else 1 for shape in shapes.values())


OWN = 3 * 6 + 1  # weights and two moments; the scale


def by_load_state_dict(trained: Trained, folder: Path) -> None:
    trained.model.load_state_dict({name: torch.full_like(value, 0.5, device="cpu") for name, value in trained.model.state_dict().items()})


def by_copies(trained: Trained, folder: Path) -> None:
    with torch.no_grad():
        for parameter in trained.model.parameters():
            parameter.copy_(parameter * 0.5)


def by_restore(trained: Trained, folder: Path) -> None:
    spmd.checkpoint.restore(folder, {"model": trained.model, "optimizer": trained.optimizer})


@pytest.mark.parametrize("roll", [False, True])
def test_replaced_state_is_there_once(roll: bool, tmp_path: Path) -> None:
    gc.collect()  # what was trained before is in a cycle
    trained = Trained(roll)
    assert matrices() == OWN
    spmd.checkpoint.save(tmp_path, 1, {"model": trained.model, "optimizer": trained.optimizer}, wait=True)
    assert matrices() == OWN
    for replace in (by_load_state_dict, by_copies, by_restore):
        trained.step(trained.x).item()
        replace(trained, tmp_path)
        assert matrices() <= OWN, replace  # what was restored may still lie on the host
        trained.step(trained.x).item()
        assert matrices() == OWN, replace
    assert trained.step.num_traces == 1
