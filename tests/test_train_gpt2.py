"""`examples/train_gpt2.py` on one process and on several: the same losses, resumed on any mesh, and whole after faults."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from benchmarks import faults
from tests import fork_server
from tests.launched import ROOT, environ, launch
from tests.oracle import assert_reordered

EXAMPLE = ROOT / "examples" / "train_gpt2.py"
STEPS, HALF = 8, 4
MESH = "data=4,model=2"


def arguments(out: Path, steps: int, mesh: str, evaluate_every: int = STEPS) -> tuple[object, ...]:
    size = np.prod([int(part.partition("=")[2]) for part in mesh.split(",")])
    words = {"out": out, "steps": steps, "mesh": mesh, "devices": size, "save-every": HALF, "evaluate-every": evaluate_every, "sample": 2}
    return tuple(word for name, value in words.items() for word in (f"--{name}", value))


def alone(out: Path, steps: int, mesh: str = MESH, evaluate_every: int = STEPS) -> None:
    """Run the example in one process, as a reader would."""
    argv = [str(EXAMPLE), *map(str, arguments(out, steps, mesh, evaluate_every))]
    code, said, err = fork_server.run(argv, environ(), out.parent)
    assert code == 0, said + err


def losses(out: Path) -> list[float]:
    """The training losses in the run's records, in the order in which they were written."""
    lines = map(json.loads, (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [line["loss"] for line in lines if "loss" in line]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of a run of one process that nothing interrupts."""
    out = tmp_path_factory.mktemp("unbroken") / "run"
    alone(out, STEPS)
    return losses(out)


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process that ended half-way."""
    out = tmp_path_factory.mktemp("half") / "run"
    alone(out, HALF)
    return out


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_several_processes_give_the_losses_of_one(processes: int, unbroken: list[float], tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = launch("-n", processes, "--devices-per-process", 8 // processes, program=EXAMPLE, arguments=arguments(out, STEPS, MESH))
    assert done.code == 0, done.err
    assert_reordered(losses(out), unbroken)


@pytest.mark.parametrize("mesh", [*(pytest.param(mesh, marks=pytest.mark.slow) for mesh in (MESH, "data=2,model=4")), "data=2"])
def test_a_run_goes_on_from_its_checkpoint_on_any_mesh(mesh: str, half: Path, unbroken: list[float], tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(half, out)
    alone(out, STEPS, mesh, evaluate_every=10 * STEPS)  # the unbroken run evaluates and draws samples, which changes no loss
    assert losses(out)[:HALF] == unbroken[:HALF]
    if mesh == MESH:
        assert losses(out) == unbroken  # bit for bit
    assert_reordered(losses(out), unbroken)


@pytest.mark.slow
def test_random_faults_are_survived_bit_for_bit() -> None:
    """Of a small job, see `benchmarks/faults.py`: any process, any of five faults, at any moment of its life."""
    trials = 12
    row = faults.processes(trials, random.Random(1))
    assert row["survived bit-identical"] == row["trials"] == trials, row["failed"]
    assert row["restarted"] >= trials // 2  # else nothing was tried
