"""The migration guide: every snippet runs, and the program in it runs unedited from the command line."""

import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

import mesh
import spmd.compat.torch_xla
from spmd.compat.torch_xla.__main__ import main

ROOT = Path(__file__).resolve().parents[1]
GUIDE = (ROOT / "docs/migration.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", GUIDE, flags=re.DOTALL)
PROGRAM = SNIPPETS[0]


def test_the_guide_has_snippets() -> None:
    assert len(SNIPPETS) >= 10 and "MpDeviceLoader" in PROGRAM


@pytest.mark.multidevice(num=8)
@pytest.mark.parametrize("position", range(len(SNIPPETS)))
def test_a_snippet_runs_as_it_stands(position: int) -> None:
    code = compile(SNIPPETS[position], f"docs/migration.md, snippet {position}", "exec")
    if "import torch_xla" in SNIPPETS[position] and "install()" not in SNIPPETS[position]:
        with spmd.compat.torch_xla.installed():
            exec(code, {"__name__": "__main__"})
    else:
        try:
            exec(code, {"__name__": "__main__"})
        finally:
            spmd.compat.torch_xla.uninstall()


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "spmd.compat.torch_xla", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )


def test_a_script_runs_unedited(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    tail = "import sys, beside\nprint(sys.argv[1:], __name__, beside.NAME, num_devices)\n"
    (tmp_path / "beside.py").write_text("NAME = 'beside'\n")
    script.write_text(PROGRAM + tail)
    done = run(str(script), "--epochs", "3", PJRT_DEVICE="CPU", CPU_NUM_DEVICES="8", XLA_USE_SPMD="1")
    assert done.returncode == 0, done.stderr
    assert re.search(r"last loss \d", done.stdout)
    assert "['--epochs', '3'] __main__ beside 8" in done.stdout


@pytest.mark.parametrize(("arguments", "found"), [([], "got nothing"), (["nothing.py"], "got 'nothing.py'"), (["--help"], "got '--help'")])
def test_without_a_script_there_is_nothing_to_run(arguments: list[str], found: str) -> None:
    with pytest.raises(SystemExit, match=rf"there is no script to run\n  {found}\n  fix: python -m spmd.compat.torch_xla"):
        main(arguments)


@pytest.mark.parametrize(
    ("environment", "error", "message"),
    [
        ({"CPU_NUM_DEVICES": "many"}, mesh.DeviceError, "CPU_NUM_DEVICES='many' is not a positive number of devices"),
        ({"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "77"}, mesh.DeviceError, "was called too late"),
        ({"XLA_AUTO_SPMD": "1"}, spmd.SpmdError, "automatic sharding"),
    ],
)
def test_an_environment_that_cannot_be_had_is_refused(
    environment: dict[str, str], error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(error, match=message):
        spmd.compat.torch_xla.install()
    assert "torch_xla" not in sys.modules


def test_the_real_torch_xla_is_not_pushed_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_xla", types.ModuleType("torch_xla"))
    with pytest.raises(spmd.DeviceSlotError, match="torch_xla is already loaded"):
        spmd.compat.torch_xla.install()
