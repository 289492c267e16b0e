"""docs/recipes.md: its tables are the dataclasses, its example is a recipe, its metrics are those of a run's records."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from spmd.train import recipe_of
from spmd.train._clock import KINDS
from spmd.train._key_tables import markdown

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "recipes.md").read_text(encoding="utf-8")


def test_the_tables_are_the_keys() -> None:
    assert PAGE.split("## Every key\n\n")[1] == markdown(), "spmd train --keys prints them"


def test_the_example_is_a_recipe() -> None:
    recipe_of(tomllib.loads(re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)[0]))


def test_every_kind_of_seconds_is_told() -> None:
    line = next(line for line in PAGE.splitlines() if line.startswith("| `seconds` |"))
    assert tuple(re.findall(r"`(\w+)`", line)[1:]) == KINDS
