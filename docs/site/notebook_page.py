"""A notebook as a page, with what its cells print and show: python docs/site/notebook_page.py NOTEBOOK PAGE (in a process of its own)."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any


def page_of(notebook: Path) -> str:
    """Markdown; the cells are run in order, in an empty folder."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    namespace: dict[str, Any] = {"__name__": "__main__"}
    parts: list[str] = []
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for cell in cells:
            source = "".join(cell["source"])
            if cell["cell_type"] == "markdown":
                parts.append(source.replace("](../docs/", "](../"))
                continue
            parts += [f"```python\n{source}\n```", *_shown(source, namespace)]
    return "\n\n".join(parts) + "\n"


def _shown(source: str, namespace: dict[str, Any]) -> list[str]:
    """What a cell prints, and what its last line is worth."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    value = None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(tree, "cell", "exec"), namespace)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), namespace)
    found = [f"```text\n{printed.getvalue().rstrip()}\n```"] if printed.getvalue() else []
    if hasattr(value, "_repr_html_"):
        found.append(f"```{{raw}} html\n{value._repr_html_()}\n```")
    elif value is not None:
        found.append(f"```text\n{value!r}\n```")
    return found


if __name__ == "__main__":
    given, page = (Path(os.path.abspath(argument)) for argument in sys.argv[1:3])
    page.write_text(page_of(given), encoding="utf-8")
