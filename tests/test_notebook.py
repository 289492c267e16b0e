"""The notebook among the examples is a notebook, holds no outputs, and runs from its first cell to its last."""

import ast
import contextlib
import io
from pathlib import Path
from typing import Any

import pytest

from tests.later import nbformat

NOTEBOOK = Path(__file__).resolve().parents[1] / "examples" / "first_day.ipynb"


def code_cells() -> list[str]:
    return [cell.source for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code"]


def run_cell(source: str, namespace: dict[str, Any]) -> Any:
    """Run a cell as a kernel does: what its last line is worth, if that is an expression."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), namespace)
    return eval(compile(ast.Expression(last.value), "cell", "eval"), namespace) if isinstance(last, ast.Expr) else None


def test_it_is_a_notebook_without_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        assert cell.cell_type == "markdown" or (cell.outputs == [] and cell.execution_count is None)


@pytest.mark.multidevice(num=8)
@pytest.mark.filterwarnings("ignore::mesh.AcceleratorIdle")
@pytest.mark.parametrize("ahead", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["here", "and for a pod"])
def test_it_runs_from_top_to_bottom(ahead: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_devices: int) -> None:
    """The cell that compiles for a pod takes libtpu's compiler ten seconds."""
    if num_devices != 8:
        pytest.skip("its meshes have 8 devices")
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    shown: list[str] = []
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for source in code_cells():
            if ahead or "topology=" not in source:
                value = run_cell(source, namespace)
                shown += [value._repr_html_()] if hasattr(value, "_repr_html_") else []
    assert len(shown) == 2 and all("<svg" in picture for picture in shown)
    assert "all-reduce" in printed.getvalue() and "1 program" in printed.getvalue() and "True" in printed.getvalue()
    assert namespace["losses"][-1] < namespace["losses"][0] / 2
    assert ("large_step" in namespace) == ahead
