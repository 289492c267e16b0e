"""Every recipe under examples/recipes is run as a reader would run it, at small sizes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests import fork_server
from tests.launched import ROOT, environ
from tests.train.recipes import records
from tests.train.test_images import write_images

RECIPES = ROOT / "examples" / "recipes"
SMALL = {
    "gpt2": ["--data.seq", "16", "--model.arguments", "{ n_layer = 1, n_embd = 16, n_head = 2, n_positions = 16, vocab_size = 64 }"],
    "llama": ["--data.seq", "16", "--model.arguments.hidden_size", "64", "--model.arguments.intermediate_size", "64"],
    "resnet": ["--data.size", "16", "--data.batch", "16", "--model.arguments.hidden_sizes", "[8, 8, 8, 8]"],
}
SMALL["llama"] += ["--model.arguments.num_hidden_layers", "2", "--model.arguments.vocab_size", "64"]
SMALL["resnet"] += ["--model.arguments.embedding_size", "8", "--data.workers", "2"]


def test_every_example_is_run() -> None:
    assert {path.stem for path in RECIPES.glob("*.toml")} == set(SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_an_example_trains(name: str, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for number, part in enumerate(("train", "held-out")):
        np.random.default_rng(number).integers(0, 64, 2000).astype(np.uint16).tofile(tmp_path / "data" / f"{part}.bin")
        write_images(tmp_path / "data" / part, 8, seed=number)
    recipe = tmp_path / f"{name}.toml"
    recipe.write_text((RECIPES / f"{name}.toml").read_text(encoding="utf-8"), encoding="utf-8")
    words = ["--steps", "3", "--metrics.every", "1", *SMALL[name]]
    code, _, err = fork_server.run(["spmd.cli", "train", str(recipe), *words], environ(), tmp_path)
    assert code == 0, err
    assert list(records(tmp_path / "runs" / name)) == [1, 2, 3]
    assert (tmp_path / "runs" / name / "model-3" / "model.safetensors").is_file()
