"""`spmd train --init`: what it writes is a recipe, from answers or from options, and it overwrites nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from spmd.train import RecipeError, read_recipe
from spmd.train._init_recipe import QUESTIONS, write_recipe
from spmd.train._train_command import main
from tests.train.test_images import write_images


def test_empty_answers_make_a_recipe(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    asked: list[str] = []
    write_recipe(path, ["--steps", "7"], lambda question, default: asked.append(question) or "")
    recipe = read_recipe(path)
    assert (recipe.model.config, recipe.steps, recipe.mesh.devices, recipe.out) == ("GPT2Config", 7, 8, "runs/a")
    assert asked == [question for key, question, _ in QUESTIONS if key != "steps"]
    assert "steps = 7 # total number of optimizer steps" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("answer", "key"), [("org/name", "pretrained"), ("./a/LlamaConfig", "pretrained"), ("LlamaConfig", "config"), ("a.b:C", "own")]
)
def test_an_answer_says_where_the_model_comes_from(answer: str, key: str, tmp_path: Path) -> None:
    write_recipe(tmp_path / "a.toml", [], lambda question, default: answer if question.startswith("Model") else "")
    assert getattr(read_recipe(tmp_path / "a.toml").model, key) == answer


@pytest.mark.parametrize(("answer", "kind"), [("x.bin", "tokens"), ("x.txt", "text"), ("images", "images"), ("a.b:C", "dataset")])
def test_an_answer_says_what_kind_of_data_it_is(answer: str, kind: str, tmp_path: Path) -> None:
    write_images(tmp_path / "images", 1)
    write_recipe(tmp_path / "a.toml", [], lambda question, default: answer if question.startswith("Data") else "")
    assert read_recipe(tmp_path / "a.toml").data.kind == kind


def test_without_a_terminal_options_make_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "a.toml")
    words = ["--init", path, "--model.config", "GPT2Config", "--model.arguments", "{ n_layer = 2 }", "--data.paths", "x.bin"]
    assert main(words) == 0
    assert read_recipe(path).model.arguments == {"n_layer": 2}
    assert capsys.readouterr().out == f"wrote {path}; now: spmd train {path}\n"
    assert main(words) == 2
    assert "exists and is not overwritten" in capsys.readouterr().err
    assert main(["--init"]) == 2
    assert "--init needs a file name" in capsys.readouterr().err


def test_what_no_run_can_follow_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="names no model"):
        write_recipe(tmp_path / "a.toml", ["--data.paths", "x.bin"], None)
    assert not (tmp_path / "a.toml").exists()
