"""`import spmd` changes nothing for a program that does not use the device."""

import subprocess
import sys

import pytest
import torch

import spmd  # noqa: F401  # pyright: ignore[reportUnusedImport]
from tests import launched

PROGRAM = """
import copy, io, pickle, sys, warnings
warnings.simplefilter("ignore")
import torch
if sys.argv[1] == "with":
    import spmd
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def autocast():
    with torch.autocast("cpu", torch.bfloat16):
        return nn.functional.cross_entropy(torch.ones(2, 2) @ torch.ones(2, 2), torch.tensor([0, 1]))

def forked():
    torch.manual_seed(0)
    with torch.random.fork_rng():
        torch.rand(1)
    return torch.rand(1)

def trained():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cpu")
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 4)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    return [p.tolist() for p in model.parameters()]

def saved(save, load):
    file = io.BytesIO()
    save(file)
    file.seek(0)
    return load(file)

def exported():
    program = torch.export.export(nn.Linear(2, 2), (torch.ones(1, 2),))
    again = saved(lambda f: torch.export.save(program, f), torch.export.load)
    return [tuple(t.shape) for t in again.state_dict.values()]

def checkpointed(reentrant):
    x = torch.ones(1, requires_grad=True)
    torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=reentrant).backward()
    return x.grad

def overlapping():
    a = torch.arange(6.0)
    try:
        a[1:].add_(a[:-1])
    except RuntimeError as error:
        return str(error)

data = TensorDataset(torch.arange(4.0), torch.arange(4))
cases = {
    "pinned loader": lambda: [[t.tolist() for t in b] for b in DataLoader(data, batch_size=2, pin_memory=True)],
    "pinned loader with workers": lambda: [[t.tolist() for t in b] for b in DataLoader(data, batch_size=2, pin_memory=True, num_workers=2)],
    "shuffled loader": lambda: [b[0].tolist() for b in DataLoader(data, shuffle=True, generator=torch.Generator().manual_seed(0))],
    "default device": lambda: (torch.get_default_device(), torch.empty(1).device, torch.cuda.is_available()),
    "script": lambda: torch.jit.script(nn.ReLU())(torch.ones(2)),
    "traced": lambda: torch.jit.trace(lambda x: x * 2, torch.ones(2))(torch.ones(2)),
    "compiled": lambda: torch.compile(lambda x: x.sin() + x.data_ptr() * 0, backend="eager")(torch.zeros(2)),
    "compiled with gradient": lambda: torch.compile(lambda x: x.sin().sum(), backend="aot_eager")(torch.ones(2, requires_grad=True)),
    "autocast": autocast,
    "forked": forked,
    "trained": trained,
    "exported": exported,
    "checkpointed": lambda: (checkpointed(True), checkpointed(False)),
    "shared": lambda: torch.ones(2).share_memory_().is_shared(),
    "storage": lambda: (torch.ones(3).untyped_storage().nbytes(), torch.ones(3).data_ptr() != 0, torch.empty(0).data_ptr()),
    "dlpack": lambda: torch.from_dlpack(torch.ones(2)),
    "pickled": lambda: pickle.loads(pickle.dumps(torch.ones(2))),
    "saved": lambda: saved(lambda f: torch.save(nn.Linear(2, 2).state_dict(), f), torch.load).keys(),
    "copied": lambda: copy.deepcopy(nn.Linear(2, 2)).weight.shape,
    "mapped": lambda: torch.vmap(lambda x: x * 2)(torch.ones(2)),
    "generator": lambda: torch.randn(2, generator=torch.Generator().manual_seed(1)),
    "overlapping": overlapping,
    "compiling": lambda: torch.compiler.is_compiling(),
}
if __name__ == "__main__":
    for name, case in cases.items():
        torch.manual_seed(0)
        print(name, case())
"""


def test_a_program_on_the_cpu_prints_the_same_with_and_without_it() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, "without"], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    imported = launched.run(PROGRAM, "with")
    assert imported.code == 0, imported.err[-2000:]
    printed = [out.splitlines() for out in (done.stdout, imported.out)]
    assert len(printed[0]) >= 23
    assert printed[1] == printed[0]


@pytest.mark.parametrize("shape", [(2, 3), (0,), ()])
def test_pinned_memory_is_a_copy_that_says_so(shape: tuple[int, ...]) -> None:
    x = torch.ones(shape)
    assert not x.is_pinned()
    pinned = x.pin_memory()
    assert pinned.is_pinned()
    assert pinned.view(-1).is_pinned()
    assert pinned.pin_memory() is pinned
    assert torch.equal(pinned, x)
    assert torch.equal(pinned.to("jax", non_blocking=True).cpu(), x)
