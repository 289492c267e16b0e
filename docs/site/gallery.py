"""The pictures of docs/gallery.md, made by the code above each: python docs/site/gallery.py writes them anew."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"```python\n((?:(?!```).)*)```\n!\[[^\]]*\]\((images/gallery/\w+\.svg)\)", re.DOTALL)


def pictures() -> list[tuple[str, str]]:
    """Code and the picture's path, in the page's order."""
    return BLOCK.findall((DOCS / "gallery.md").read_text(encoding="utf-8"))


def preamble() -> str:
    """The page's first lines."""
    match = re.search(r"```python preamble\n(.*?)```", (DOCS / "gallery.md").read_text(encoding="utf-8"), re.DOTALL)
    assert match
    return match[1]


def drawn(code: str, namespace: dict[str, Any]) -> str:
    """The SVG of what the code's last line is worth."""
    tree = ast.parse(code)
    last = tree.body.pop()
    assert isinstance(last, ast.Expr)
    exec(compile(tree, "gallery", "exec"), namespace)
    return eval(compile(ast.Expression(last.value), "gallery", "eval"), namespace).to_svg() + "\n"


if __name__ == "__main__":
    shared: dict[str, Any] = {"__name__": "gallery"}
    exec(preamble(), shared)
    for source, path in pictures():
        (DOCS / path).write_text(drawn(source, shared), encoding="utf-8")
