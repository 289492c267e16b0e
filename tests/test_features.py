"""docs/features.md claims nothing without a test, and says no at most five times, with the reason."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LINES = (ROOT / "docs/features.md").read_text(encoding="utf-8").splitlines()
ROWS = [
    [cell.strip() for cell in line.split("|")[1:-1]]
    for line in LINES
    if line.startswith("| ") and not line.startswith(("| ---", "| feature", "| **"))
]
NAMED = sorted({tuple(test) for row in ROWS for test in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row[4])})


def test_every_row_is_yes_or_part_with_a_test_or_no_with_a_reason() -> None:
    assert len(ROWS) > 50
    for feature, who, here, how, shown in ROWS:
        assert here in ("yes", "part", "no"), feature
        assert bool(re.search(r"::test_", shown)) == (here != "no"), feature
        assert how, feature
        assert set(who.split()) <= set("TMLA"), feature
    assert len({row[0] for row in ROWS}) == len(ROWS)


def test_no_is_said_five_times_at_most() -> None:
    assert sum(row[2] == "no" for row in ROWS) <= 5


@pytest.mark.parametrize(("file", "name"), NAMED, ids=lambda value: str(value))
def test_a_named_test_exists(file: str, name: str) -> None:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
