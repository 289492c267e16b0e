"""An action waits for the import of a module."""

import importlib
import sys
from pathlib import Path

import pytest

from spmd.patches._when_imported import when_imported


def test_an_action_runs_once_right_after_the_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "module_of_another.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    found: list[int] = []
    finders = list(sys.meta_path)
    when_imported("module_of_another", lambda: found.append(sys.modules["module_of_another"].value))
    assert not found and "module_of_another" not in sys.modules
    importlib.import_module("module_of_another")
    importlib.reload(sys.modules["module_of_another"])
    assert found == [1] and sys.meta_path == finders
    when_imported("module_of_another", lambda: found.append(2))
    assert found == [1, 2]
    monkeypatch.delitem(sys.modules, "module_of_another")


def test_a_module_that_does_not_exist_is_not_there_as_before() -> None:
    when_imported("no_module_of_anybody", lambda: None)
    with pytest.raises(ModuleNotFoundError, match="no_module_of_anybody"):
        importlib.import_module("no_module_of_anybody")
