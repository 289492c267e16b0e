"""`spmd train` as a command: on one process and on two, killed and started again, told to stop."""

from __future__ import annotations

import functools
import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mesh import PREEMPTED
from tests import fork_server
from tests.later import transformers
from tests.launched import environ, launch
from tests.oracle import TOLERANCE, assert_reordered
from tests.train.mortal import Mortal
from tests.train.recipes import BATCH, GPT2, LLAMA, RESNET, SEQ, STEPS, by_hand, records, sample_batches, tables, write_tokens
from tests.train.test_images import SIZE as IMAGE_SIZE
from tests.train.test_images import write_images


def written(folder: Path, **changes: Any) -> Path:
    """A recipe as a file, with dropout."""
    folder.mkdir(exist_ok=True)
    found = tables(folder, **{"model": {"arguments": GPT2}, "checkpoint": {"every": 2}, **changes})
    lines: list[str] = [f"{name} = {json.dumps(value)}" for name, value in found.items() if not isinstance(value, dict)]
    for table, keys in found.items():
        if isinstance(keys, dict):
            plain = {name: value for name, value in keys.items() if not isinstance(value, dict)}
            lines += [f"[{table}]", *(f"{name} = {json.dumps(value)}" for name, value in plain.items())]
            lines += [
                f"{name}.{key} = {json.dumps(v)}" for name, value in keys.items() if isinstance(value, dict) for key, v in value.items()
            ]
    path = folder / "recipe.toml"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def train(path: Path, *words: object) -> tuple[int, str, str]:
    """Run the command in a process of its own."""
    return fork_server.run(["spmd.cli", "train", str(path), *map(str, words)], environ(), path.parent)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of one process that nothing interrupts."""
    folder = tmp_path_factory.mktemp("unbroken")
    code, out, err = train(written(folder), "--metrics.writers", '["terminal", "json"]')
    assert code == 0, err
    assert f"step {STEPS}/{STEPS}" in out
    return records(folder / "run")


@pytest.mark.slow  # tests/test_train_gpt2.py compares two processes with one on every change
def test_two_processes_give_the_losses_of_one(unbroken: dict[int, float], tmp_path: Path) -> None:
    """And its evaluation, whose last batch has rows for one of them alone."""
    evaluation = {"every": STEPS, "paths": [str(write_tokens(tmp_path, 20 * SEQ + 1, seed=1))]}
    path = written(tmp_path, evaluation=evaluation)
    code, _, err = train(path, "--launch.processes", 2)
    assert code == 0, err
    assert_reordered(list(records(tmp_path / "run").values()), list(unbroken.values()))
    assert train(path, "--out", tmp_path / "one")[0] == 0
    of_two, of_one = (records(tmp_path / out, "evaluation_loss")[STEPS] for out in ("run", "one"))
    assert_reordered(of_two, of_one)


@pytest.mark.slow
def test_the_launcher_starts_it_too_and_a_run_goes_on_elsewhere(unbroken: dict[int, float], tmp_path: Path) -> None:
    path = written(tmp_path)
    assert train(path, "--steps", 3)[0] == 0
    done = launch("-n", 2, "--devices-per-process", 4, program=Path("--"), arguments=("-m", "spmd.train", path))
    assert done.code == 0, done.err
    assert list(records(tmp_path / "run").values())[:3] == list(unbroken.values())[:3]
    assert_reordered(list(records(tmp_path / "run").values()), list(unbroken.values()))


MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": {"model": {"config": "LlamaConfig", "arguments": LLAMA, "rules": "fsdp+megatron"}},
    "resnet": {
        "model": {"config": "ResNetConfig", "auto": "AutoModelForImageClassification", "arguments": RESNET, "rules": "replicated"},
        "optimizer": {"name": "SGD", "lr": 0.1, "arguments": {"momentum": 0.9}},
    },
}


def mortal(folder: Path, sends: str, name: str) -> Path:
    """A recipe over a dataset that ends process 1 of two when it loads the third pass, after six of nine steps."""
    path = write_images(folder / "images", 17) if name == "resnet" else write_tokens(folder)
    size = IMAGE_SIZE if name == "resnet" else SEQ
    arguments = {"path": str(path), "size": size, "folder": str(folder), "sends": sends, "after": 50}
    data = {"kind": "dataset", "own": "tests.train.mortal:Mortal", "arguments": arguments, "batch": BATCH}
    return written(folder, steps=9, data=data, launch={"processes": 2, "restarts": 1}, **MODELS[name])


@pytest.fixture(scope="module")
def unbroken_of_two(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[int, float]]:
    """The losses of a model on two processes over that dataset that nothing interrupts."""

    @functools.cache
    def losses(name: str) -> dict[int, float]:
        folder = tmp_path_factory.mktemp(name)
        code, _, err = train(mortal(folder, "", name))
        assert code == 0, err
        return records(folder / "run")

    return losses


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_killed_process_costs_nothing_but_time(name: str, unbroken_of_two: Any, tmp_path: Path) -> None:
    path = mortal(tmp_path, "SIGKILL", name)
    code, _, err = train(path)
    assert code == 0 and re.search("restarting all 2 processes from the checkpoint of step [46]", err), err
    assert records(tmp_path / "run") == unbroken_of_two(name)
    assert records(tmp_path / "run", "seconds")[9]["restart"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "resnet"])
def test_two_processes_give_the_losses_of_a_loop_by_hand(name: str, unbroken_of_two: Any, tmp_path: Path) -> None:
    """GPT-2 has dropout here; without, `test_run` compares it."""
    found = tomllib.loads(mortal(tmp_path, "", name).read_text(encoding="utf-8"))
    samples = Mortal(**found["data"]["arguments"]).inner
    torch.manual_seed(0)
    model = (
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
        if name == "llama"
        else transformers.ResNetForImageClassification(transformers.ResNetConfig(**RESNET))
    )
    expected = by_hand(found, model, sample_batches(samples, BATCH))
    rtol, atol = TOLERANCE[torch.float32]
    torch.testing.assert_close(list(unbroken_of_two(name).values()), expected, rtol=rtol, atol=atol)


@pytest.mark.slow
def test_a_run_that_is_told_to_stop_saves_and_goes_on(unbroken_of_two: Any, tmp_path: Path) -> None:
    path = mortal(tmp_path, "SIGTERM", "gpt2")
    code, _, err = train(path)
    assert code == PREEMPTED, err
    done = max(records(tmp_path / "run"))
    assert 6 <= done < 9 and (tmp_path / "run" / "checkpoints" / f"step_{done:08d}").is_dir()
    code, _, err = train(path)
    assert code == 0, err
    assert records(tmp_path / "run") == unbroken_of_two("gpt2")


def test_a_mistake_is_one_message_and_exit_code_two(tmp_path: Path) -> None:
    code, out, err = train(written(tmp_path), "--model.rules", "megatrom")
    assert code == 2 and "Traceback" not in err
    assert "'megatrom' is not a preset" in err + out
    code, _, err = train(written(tmp_path), "--optimizer.lrr", "1")
    assert code == 2 and "fix: write 'lr'" in err
