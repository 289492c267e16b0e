"""The index of error messages: every `message(...)` of the source, by its first words, with its exception and the page that explains it.

python docs/site/error_index.py PAGE
"""

from __future__ import annotations

import ast
import functools
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# where a message stands -> the page about it; the longest prefix counts
PAGES = {
    "mesh/_": "sharding",
    "mesh/job": "reliability",
    "mesh/launch": "reliability",
    "mesh/platform": "reliability",
    "mesh/schedulers": "quickstart",
    "spmd": "training",
    "spmd/bench": "benchmarks",
    "spmd/checkpoint": "checkpoints",
    "spmd/collectives": "sharding",
    "spmd/compat/torch_distributed": "ecosystem",
    "spmd/compat/torch_xla": "migration",
    "spmd/data": "data",
    "spmd/demo": "benchmarks",
    "spmd/draw": "gallery",
    "spmd/dynamo": "compile_backend",
    "spmd/fsdp": "sharding",
    "spmd/huggingface": "ecosystem",
    "spmd/huggingface/_gener": "generation",
    "spmd/interop": "jax",
    "spmd/lightning": "ecosystem",
    "spmd/lowering": "extending",
    "spmd/ops": "ops",
    "spmd/program/lazy": "lazy",
    "spmd/program/roll": "depth",
    "spmd/program/sizes": "sizes",
    "spmd/rules": "sharding",
    "spmd/shard_map": "sharding",
    "spmd/sharding": "sharding",
    "spmd/train": "recipes",
    "spmd/visualize": "gallery",
    "spmd/xla_names": "migration",
}


@dataclass(frozen=True)
class Entry:
    """A message: its first line and its fix with … for what is put in, its exception, where it stands, and the page."""

    words: str
    fix: str
    error: str
    source: str
    line: int
    page: str


@functools.cache
def entries() -> list[Entry]:
    """Every call of `message`, in alphabetical order of the words."""
    found = [entry for folder in ("mesh", "spmd") for path in (ROOT / folder).rglob("*.py") for entry in _of_file(path)]
    return sorted(found, key=lambda entry: (entry.words.lstrip("…' ").casefold(), entry.source, entry.line))


def page_of(source: str) -> str | None:
    """The page about a source file; None where the table has none."""
    fitting = [prefix for prefix in PAGES if source.startswith(prefix)]
    return PAGES[max(fitting, key=len)] if fitting else None


def markdown() -> str:
    """The page: a table for each page that explains some, with one row for each different text."""
    rows: dict[str, dict[tuple[str, str], Entry]] = {}
    for entry in entries():
        rows.setdefault(entry.page, {}).setdefault((entry.words, entry.error), entry)
    lines = [
        "# Index of error messages",
        "",
        "Every message of the package by its first line, under the page that explains what it is about; … stands for names and values. "
        "The last line of a message is the fix.",
    ]
    for page in sorted(rows):
        lines += [
            "",
            f"## {_title(page)}",
            "",
            f"Explained in [{_title(page)}](../{page}.md).",
            "",
            "| message | fix | exception |",
            "| --- | --- | --- |",
        ]
        for entry in rows[page].values():
            place = "" if any(letter.isalpha() for letter in entry.words) else f" (said in {_cell(entry.source)})"
            lines.append(f"| {_cell(entry.words)}{place} | {_cell(entry.fix)} | {entry.error} |")
    return "\n".join(lines) + "\n"


def _title(page: str) -> str:
    return (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8").splitlines()[0].removeprefix("# ").partition(":")[0]


def _cell(text: str) -> str:
    """As code: nothing of it is markup, and its quotes stay as they are."""
    shown = text.replace("`", "'").replace("|", "\\|").replace("\n", " ").strip()
    return f"`{shown}`" if shown else ""


def _of_file(path: Path) -> Iterator[Entry]:
    text = path.read_text(encoding="utf-8")
    if "message(" not in text:
        return
    tree = ast.parse(text)
    source = path.relative_to(ROOT).as_posix()
    above = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "message" and node.args:
            scope = _scope(node, above)
            fix = next((keyword.value for keyword in node.keywords if keyword.arg == "fix"), None)
            words = _text(node.args[0], scope, node.lineno)
            yield Entry(
                words, _text(fix, scope, node.lineno) if fix else "", _error(node, above), source, node.lineno, page_of(source) or ""
            )


def _scope(node: ast.AST, above: dict[ast.AST, ast.AST]) -> ast.AST:
    """The function around a node, or its module."""
    while node in above and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        node = above[node]
    return node


def _error(node: ast.AST, above: dict[ast.AST, ast.AST]) -> str:
    """The class that the message is given to, where it is named."""
    parent = above.get(node)
    if isinstance(parent, ast.Call):
        name = parent.func.id if isinstance(parent.func, ast.Name) else parent.func.attr if isinstance(parent.func, ast.Attribute) else ""
        return name if name[:1].isupper() else "warning" if name == "warn" else ""
    return ""


def _text(value: ast.expr, scope: ast.AST, line: int) -> str:
    """A text with … for what is known at run time; a name is looked up where it was last given a value before the line."""
    if isinstance(value, ast.Constant):
        return str(value.value)
    if isinstance(value, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "…" for part in value.values)  # pyright: ignore
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
        return _text(value.left, scope, line) + _text(value.right, scope, line)
    if isinstance(value, ast.IfExp):
        return _text(value.body, scope, line)
    if isinstance(value, ast.Name):
        given = [
            node
            for node in ast.walk(scope)
            if isinstance(node, ast.Assign)
            and node.lineno < line
            and any(isinstance(t, ast.Name) and t.id == value.id for t in node.targets)
        ]
        return _text(max(given, key=lambda node: node.lineno).value, ast.Module([], []), line) if given else "…"
    return "…"


if __name__ == "__main__":
    Path(os.path.abspath(sys.argv[1])).write_text(markdown(), encoding="utf-8")
