"""docs/where.md: every file that it names is there and defines what it says."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROWS = re.findall(r"^\| (.+) \| `([\w/.]+)` \| `([\w.]+)` \|$", (ROOT / "docs/where.md").read_text(encoding="utf-8"), re.MULTILINE)


def defined(body: list[ast.stmt]) -> dict[str, list[ast.stmt]]:
    """Names that statements define or import, each with the statements inside it."""
    found: dict[str, list[ast.stmt]] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node.body
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {ast.unparse(target): [] for target in targets}
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name: [] for alias in node.names}
    return found


def test_there_are_thirty_questions() -> None:
    assert len(ROWS) >= 30
    assert len({question for question, _, _ in ROWS}) == len(ROWS)


@pytest.mark.parametrize(("question", "file", "name"), ROWS, ids=[question for question, _, _ in ROWS])
def test_the_file_defines_what_is_looked_for(question: str, file: str, name: str) -> None:
    body = ast.parse((ROOT / file).read_text(encoding="utf-8")).body
    for part in name.split("."):
        names = defined(body)
        assert part in names, f"{file} does not define {part}"
        body = names[part]
