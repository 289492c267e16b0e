"""The opening snippet of docs/checkpoints.md runs as it stands, in a job of two processes too, and goes on where it was."""

import re
from pathlib import Path

import pytest

from tests.launched import launch

PAGE = Path(__file__).resolve().parents[2] / "docs" / "checkpoints.md"

BEFORE = """
import torch, mesh, spmd
from torch.utils.data import DataLoader, TensorDataset

m = mesh.Mesh(range(4), (4,), ("data",))
dataset = TensorDataset(torch.arange(1024.0).reshape(512, 2) / 1024, torch.arange(512.0).reshape(512, 1) / 512)
model = torch.nn.Linear(2, 1).to("jax")
optimizer = torch.optim.AdamW(model.parameters())
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)


@spmd.compile
def train_step(x, y):
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss

"""


@pytest.mark.slow  # two processes that import torch
def test_the_opening_snippet_runs_in_a_job_of_two_and_goes_on(tmp_path: Path) -> None:
    (snippet, *_) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    snippet = snippet.replace('"runs/a"', repr(str(tmp_path / "run"))).replace("% 100", "% 3")
    program = tmp_path / "program.py"
    program.write_text(f"{BEFORE}\n{snippet}print('first', step)\n{snippet}print('then', step)\n", encoding="utf-8")
    done = launch("-n", 2, "--devices-per-process", 2, program=program)
    assert done.code == 0, done.err
    assert done.out.count("first 8") == done.out.count("then 8") == 2  # the second one: steps 7 and 8, after the save of step 6
