"""Private names of torch and of jax have one file each, and one that is gone is reported where it is imported."""

import ast
import functools
import importlib
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax._src.core
import jax._src.distributed
import pytest
import torch.utils.checkpoint

from spmd import lowering

ROOT = Path(__file__).resolve().parents[2]
# Peers of the benchmarks are scripts of their own, which import no spmd.
SOURCES = sorted(
    path.relative_to(ROOT).as_posix()
    for package in ("mesh", "spmd")
    for path in (ROOT / package).rglob("*.py")
    if not path.is_relative_to(ROOT / "spmd/bench/peers")
)
OWNERS = {
    "torch": ("spmd/base/_torch.py", "spmd/base/_torch_late.py"),
    "functorch": ("spmd/base/_torch_late.py",),
    "jax": ("spmd/base/_jax.py", "spmd/base/_jax_executables.py", "mesh/platform/_jax_runtime.py"),
    "jaxlib": (),
}
# Patches say their target by its own name; operators of ATen are no names of Python.
ALLOWED = ("torch.ops.", "torch.nn.Module._apply")


def dotted(node: ast.expr) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := dotted(node.value)):
        return f"{base}.{node.attr}"
    return None


@functools.cache
def names_of(source: str) -> list[tuple[int, str]]:
    return list(named(source))


def named(source: str) -> Iterator[tuple[int, str]]:
    """Every dotted name of a file that starts at something imported, spelled out."""
    tree = ast.parse((ROOT / source).read_text(encoding="utf-8"))
    imported: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                imported[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield node.lineno, f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                imported[alias.asname or alias.name.partition(".")[0]] = alias.name if alias.asname else alias.name.partition(".")[0]
                yield node.lineno, alias.name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (name := dotted(node)):
            first, _, rest = name.partition(".")
            if first in imported:
                yield node.lineno, f"{imported[first]}.{rest}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and isinstance(node.args[0], ast.Constant):
            yield node.lineno, str(node.args[0].value)


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


@pytest.mark.parametrize("library", OWNERS)
def test_private_names_have_one_file(library: str) -> None:
    findings = [
        f"{source}:{line}: {name} belongs in {' or '.join(OWNERS[library]) or 'no file'}"
        for source in SOURCES
        if source not in OWNERS[library]
        for line, name in names_of(source)
        if name.partition(".")[0] == library and (is_private(name) or library in ("jaxlib", "functorch")) and not name.startswith(ALLOWED)
    ]
    assert not findings, "\n" + "\n".join(dict.fromkeys(findings))


def test_names_are_spelled_out_through_aliases() -> None:
    assert is_private("torch.utils._pytree") and not is_private("torch.Tensor.__add__")
    assert "jax._src.distributed.global_state" in {name for _, name in named("mesh/platform/_jax_runtime.py")}


@pytest.mark.parametrize(
    ("owner", "name", "file"),
    [
        (torch.utils.checkpoint, "_CheckpointFrame", "spmd/base/_torch.py"),
        (torch._C, "_storage_id", "spmd/base/_torch.py"),
        (torch.nn.Module, "_apply", "spmd/base/_torch.py"),
        (jax._src.core, "trace_ctx", "spmd/base/_jax.py"),
        (jax._src.distributed, "global_state", "mesh/platform/_jax_runtime.py"),
    ],
)
def test_a_name_that_is_gone_says_so_at_import_with_the_versions_that_have_it(
    owner: Any, name: str, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(owner, name)
    with pytest.raises(ImportError, match=name) as raised:
        runpy.run_path(str(ROOT / file))
    lines = str(raised.value).splitlines()
    assert "a private name that spmd uses" in lines[0]
    assert lines[1].startswith(f"  tested versions: {'torch' if 'torch' in file else 'jax'} ")
    assert lines[2].startswith("  fix: pip install ")


def test_a_torch_that_is_too_old_says_so_at_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.10.1+cpu")
    with pytest.raises(ImportError, match=r"2.10.1\+cpu is not supported: it is too old\n(.*)2.11 to (.*)\n  fix: pip install"):
        runpy.run_path(str(ROOT / "spmd/base/_torch.py"))


def test_a_torch_that_is_too_new_for_a_lowering_says_so_at_import(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_overload(name: str) -> None:
        raise ValueError("there is no ATen overload 'relu'\n  the nearest name is 'prelu'")

    monkeypatch.setattr(importlib, "import_module", without_overload)
    with pytest.raises(ValueError, match="nearest name"):  # a misspelt name, in a torch that was tried
        lowering._fill()
    monkeypatch.setattr(torch, "__version__", "99.0.0")
    with pytest.raises(ImportError, match=r"99.0.0 is not supported: there is no ATen overload 'relu'\n(.*)\n  fix: pip install"):
        lowering._fill()
