"""Imports in a compiled function: which modules they find, also for the first time, or no longer."""

import importlib
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import spmd


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path, whose modules are forgotten afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("of_a_test"):
            del sys.modules[name]


def write(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    importlib.invalidate_caches()


def put(name: str, **values: Any) -> None:
    """Put a module with these values under a name."""
    module = types.ModuleType(name)
    vars(module).update(values)
    sys.modules[name] = module


def by_statement(x: torch.Tensor) -> torch.Tensor:
    try:
        import of_a_test  # pyright: ignore[reportMissingImports]
    except ImportError:
        return -x
    return x * of_a_test.scale


def by_name(x: torch.Tensor) -> torch.Tensor:
    try:
        found: Any = importlib.import_module("of_a_test")
    except ImportError:
        return -x
    return x * found.scale


def by_function(x: torch.Tensor) -> torch.Tensor:
    try:
        found: Any = __import__("of_a_test")
    except ImportError:
        return -x
    return x * found.scale


@pytest.mark.parametrize("fn", [by_statement, by_name, by_function])
def test_a_module_that_is_missing_at_first_is_found_later(fn: Callable[[torch.Tensor], torch.Tensor], folder: Path) -> None:
    step, x = spmd.compile(fn), torch.ones(1, device="jax")
    assert [step(x).item() for _ in range(2)] == [-1.0, -1.0]
    assert step.num_traces == 1
    write(folder / "of_a_test.py", "scale = 2.0")
    assert step(x).item() == 2.0
    sys.modules["of_a_test"].scale = 3.0  # type: ignore[attr-defined]
    assert step(x).item() == 3.0
    put("of_a_test", scale=4.0)
    assert step(x).item() == 4.0
    (folder / "of_a_test.py").unlink()
    del sys.modules["of_a_test"]
    importlib.invalidate_caches()
    assert step(x).item() == -1.0


def test_a_module_that_the_function_imports_first_is_guarded(folder: Path) -> None:
    text = "count, scale, config = 0, 2.0, [1.0]\ndef scaled(x):\n    return x * scale + config[0]\n"
    write(folder / "of_a_test_late.py", text)

    @spmd.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        from of_a_test_late import scaled  # pyright: ignore[reportMissingImports]

        return scaled(x)

    x = torch.ones(1, device="jax")
    assert [step(x).item() for _ in range(2)] == [3.0, 3.0] and step.num_traces == 1
    late: Any = sys.modules["of_a_test_late"]
    late.config[0] = 5.0
    assert step(x).item() == 7.0
    late.scale = 4.0
    assert step(x).item() == 9.0


def test_what_the_function_writes_to_a_module_that_it_imports_first_is_written_once(folder: Path) -> None:
    write(folder / "of_a_test_counting.py", "count = 0")

    @spmd.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        import of_a_test_counting as found  # pyright: ignore[reportMissingImports]

        found.count += 1
        return x * found.count

    assert [step(torch.ones(1, device="jax")).item() for _ in range(4)] == [1.0, 2.0, 3.0, 4.0]
    assert sys.modules["of_a_test_counting"].count == 4  # type: ignore[attr-defined]


def test_relative_imports_find_what_their_package_has(folder: Path) -> None:
    write(folder / "of_a_test_package" / "__init__.py", "")
    write(folder / "of_a_test_package" / "config.py", "scale = 2.0")
    lines = ("from .config import scale", "try:", "    from . import more", "except ImportError:", "    return x * scale")
    body = "".join(f"    {line}\n" for line in (*lines, "return x * scale * more.scale"))
    write(folder / "of_a_test_package" / "code.py", f"def fn(x):\n{body}")
    code: Any = importlib.import_module("of_a_test_package.code")
    step, x = spmd.compile(code.fn), torch.ones(1, device="jax")
    assert step(x).item() == 2.0
    sys.modules["of_a_test_package.config"].scale = 3.0  # type: ignore[attr-defined]
    assert step(x).item() == 3.0
    put("of_a_test_package.config", scale=4.0)
    assert step(x).item() == 4.0
    write(folder / "of_a_test_package" / "more.py", "scale = 10.0")
    assert step(x).item() == 40.0
    sys.modules["of_a_test_package.more"].scale = 20.0  # type: ignore[attr-defined]
    assert step(x).item() == 80.0
