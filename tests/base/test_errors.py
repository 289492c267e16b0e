"""The tree of exceptions: what the docstring draws is what there is. Messages have one form."""

import ast
import builtins
import re
from pathlib import Path

import pytest

import mesh
import spmd
from spmd.base import _errors

ROOT = Path(__file__).resolve().parents[2]
DRAWN = re.compile(r"^    (?P<depth>(?:[| ]   )*)(?:\+-- )?(?P<name>\w+)(?: \((?P<also>\w+)\))?(?:  .*)?$")


def drawn() -> dict[str, tuple[str, ...]]:
    """Class -> names of its bases, as drawn."""
    found: dict[str, tuple[str, ...]] = {}
    above: list[str] = []
    for line in (_errors.__doc__ or "").split("\n\n")[1].splitlines():
        match = DRAWN.match(line)
        assert match, line
        depth = len(match["depth"]) // 4 + ("+--" in line)
        above = [*above[:depth], match["name"]]
        found[match["name"]] = tuple(name for name in (above[depth - 1] if depth else None, match["also"]) if name)
    return found


def defined() -> dict[str, list[str]]:
    """Every exception class that the two packages define, and the names of its bases; read, since some need libraries to be imported."""
    bases: dict[str, list[str]] = {}
    for path in (path for package in ("mesh", "spmd") for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = [ast.unparse(base).rpartition(".")[2] for base in node.bases]

    def is_exception(name: str) -> bool:
        builtin = getattr(builtins, name, None)
        return (isinstance(builtin, type) and issubclass(builtin, BaseException)) or any(
            is_exception(base) for base in bases.get(name, ()) if base != name
        )

    return {name: found for name, found in bases.items() if is_exception(name)}


def test_the_tree_that_is_drawn_is_the_tree_that_there_is() -> None:
    tree, classes = drawn(), defined()
    assert sorted(classes) == sorted(set(tree) - {"Exception", "UserWarning", "ValueError"})
    for name, found in classes.items():
        assert tuple(found) == (tree[name] or ("Exception",)), name


@pytest.mark.parametrize("name", [name for name in [*mesh.__all__, *spmd.__all__] if name.endswith("Error")])
def test_every_public_error_is_an_spmd_error(name: str) -> None:
    assert issubclass(getattr(mesh, name, None) or getattr(spmd, name), spmd.SpmdError)


def test_message_shows_what_then_details_then_fix() -> None:
    assert _errors.message("what", "one", "two", fix="do") == "what\n  one\n  two\n  fix: do"
