"""Recipes from TOML and words: what is read, and what each mistake is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spmd.train import RecipeError, read_recipe, recipe_of
from spmd.train._import_path import imported
from spmd.train._recipe_file import with_changes
from spmd.train._train_command import main

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples" / "recipes").glob("*.toml"))
LEAST: dict[str, Any] = {"model": {"config": "GPT2Config"}, "data": {"paths": ["x.bin"]}}


def with_keys(table: str, **keys: Any) -> dict[str, Any]:
    return {**LEAST, table: {**LEAST.get(table, {}), **keys}} if table else {**LEAST, **keys}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_read(path: Path) -> None:
    recipe = read_recipe(path, ["--steps", "7", "--optimizer.lr=1e-4", "--model.arguments.n_layer", "3", "--out", "runs/x"])
    assert (recipe.steps, recipe.optimizer.lr, recipe.model.arguments["n_layer"], recipe.out) == (7, 1e-4, 3, "runs/x")
    assert all(Path(found).is_absolute() for found in recipe.data.paths)


WRONG = {
    "a misspelt key": (with_keys("optimizer", lrr=1.0), "[optimizer] has no key 'lrr'", "fix: write 'lr'"),
    "a misspelt table": ({**LEAST, "optimiser": {"lr": 1.0}}, "the top level has no key 'optimiser'", "fix: write 'optimizer'"),
    "a key of another table": (with_keys("model", lr=1.0), "[model] has no key 'lr'", "fix: it is a key of [optimizer]"),
    "a key of the top": (with_keys("model", steps=5), "[model] has no key 'steps'", "it is a key of the top level, above all tables"),
    "text for a number": (with_keys("optimizer", lr="high"), "[optimizer] lr = 'high' is of type str", "fix: a value of type float"),
    "a float for an int": (with_keys("", steps=1.5), "the top level steps = 1.5 is of type float", "fix: a value of type int"),
    "a bool for an int": (with_keys("data", seq=True), "[data] seq = True is of type bool", "fix: a value of type int"),
    "a number for a table": (with_keys("", mesh=8), "'mesh' is a table, got 8", "fix: [mesh]"),
    "no such choice": (with_keys("schedule", name="cosin"), "[schedule] name = 'cosin' is not allowed", "fix: 'cosine'"),
    "a number for a list": (with_keys("data", paths=3), "[data] paths = 3 is not a list", "fix: [...]"),
    "two models": (with_keys("model", own="a:b"), "[model] names config and own", "fix: one of pretrained"),
    "no model": ({**LEAST, "model": {}}, "[model] names no model", "fix: one of pretrained"),
    "no data": ({**LEAST, "data": {}}, "[data] names no data of kind 'tokens'", "fix: paths = ..."),
    "a key without effect": (with_keys("data", own="a:b"), "[data] own has no effect where kind is 'tokens'", "fix: drop it, or kind"),
    "no steps": (with_keys("", steps=0), "steps = 0 is out of range", "fix: at least 1"),
    "uneven micro-batches": (with_keys("optimizer", accumulate=3), "[data] batch = 8 does not divide into 3", "a divisor of 8"),
    "an average of nothing": (with_keys("ema", decay=1.0), "[ema] decay = 1.0 is out of range", "fix: between 0 and 1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_told_with_its_key_and_the_fix(name: str) -> None:
    found, what, fix = WRONG[name]
    with pytest.raises(RecipeError) as error:
        recipe_of(found, "a.toml")
    assert str(error.value).startswith("a.toml: ") and what in str(error.value) and fix in str(error.value)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["steps", "3"], "'steps' is not an override"),
        (["--steps"], "--steps has no value"),
        (["--optimizer.lrr", "3"], "[optimizer] has no key 'lrr'"),
        (["--steps.many", "3"], "--steps.many: 'steps' is a key, not a table"),
    ],
)
def test_overrides_have_the_errors_of_the_file(words: list[str], told: str, tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text('steps = 2\n[model]\nconfig = "GPT2Config"\n[data]\npaths = "x.bin"\n', encoding="utf-8")
    assert read_recipe(path, ["--data.batch", "4"]).data.batch == 4
    with pytest.raises(RecipeError) as error:
        read_recipe(path, words)
    assert told in str(error.value)


def test_a_recipe_is_changed_by_the_rules_of_the_file() -> None:
    recipe = with_changes(
        recipe_of({**LEAST, "ema": {"decay": 0.5}}), {"steps": 3, "optimizer": {"lr": 1}, "model": {"arguments": {"n_layer": 2}}}
    )
    assert (recipe.steps, recipe.optimizer.lr, recipe.ema.decay, recipe.data.paths) == (3, 1.0, 0.5, ("x.bin",))
    assert (recipe.model.config, recipe.model.arguments) == ("GPT2Config", {"n_layer": 2})
    with pytest.raises(RecipeError, match="changes of the recipe: .optimizer. has no key 'lrr'"):
        with_changes(recipe, {"optimizer": {"lrr": 1}})


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="no.toml cannot be read: No such file"):
        read_recipe(tmp_path / "no.toml")
    path = tmp_path / "a.toml"
    path.write_text("steps = \n", encoding="utf-8")
    with pytest.raises(RecipeError, match="a.toml is not valid TOML: Invalid value"):
        read_recipe(path)


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("torch", "is not of the form package.module:name"),
        ("no.such:x", "no module 'no'"),
        ("torch.nn:Linaer", "has no 'Linaer'\n  fix: torch.nn:Linear"),
    ],
)
def test_an_import_path_that_leads_nowhere_is_told(path: str, told: str) -> None:
    with pytest.raises(RecipeError) as error:
        imported(path, "[model] own")
    assert told in str(error.value) and str(error.value).startswith("[model] own = ")


@pytest.mark.parametrize(
    "words", [["--help"], ["run.toml", "--help"], ["--init", "run.toml", "--help"], ["run.toml", "--steps", "3", "-h"]]
)
def test_help_is_shown_wherever_it_is_asked_for(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    assert "spmd train RECIPE.toml" in capsys.readouterr().out


def test_a_recipe_that_is_not_there_is_refused_with_the_command_that_writes_it(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"no\.toml cannot be read: (?s:.*)fix: spmd train --init .*no\.toml writes one"):
        read_recipe(tmp_path / "no.toml", [])
