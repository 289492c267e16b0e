"""docs/training.md tells the truth about its proofs: each test that it names exists."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs/training.md").read_text(encoding="utf-8"))))


def test_every_line_of_a_table_names_a_test() -> None:
    lines = (ROOT / "docs/training.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("| ") and not line.startswith(("| ---", "| what |"))]
    assert len(rows) > 30
    assert [row for row in rows if "::test_" not in row] == []


@pytest.mark.parametrize(("file", "name"), NAMED, ids=lambda value: str(value))
def test_a_named_test_exists(file: str, name: str) -> None:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
