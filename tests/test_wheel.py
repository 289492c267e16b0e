"""A wheel, installed in an environment that has its dependencies and nothing of the repository, runs the README's example."""

import os
import re
import site
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

import spmd
from tests.test_readme import README, blocks

ROOT = README.parent


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=600, cwd=cwd, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as a user's pip builds it, which fetches hatchling from the package index."""
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the wheel; dependencies are this environment's, without its editable installs."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    found = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", found, "install", "--quiet", "--no-deps", wheel, cwd=folder)
    packages = Path(run(found, "-c", "import site; print(site.getsitepackages()[0])", cwd=folder).stdout.strip())
    (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()) + "\n", encoding="utf-8")
    return found


@pytest.mark.slow
def test_the_readmes_example_runs_from_a_wheel_outside_the_repository(python: Path, tmp_path: Path) -> None:
    (code,) = blocks("python")
    shown = next(block for block in blocks("text") if "all-reduce" in block)
    done = run(python, "-c", f"{code}\nprint(mesh.__file__, spmd.__file__)", cwd=tmp_path)
    assert shown.strip() in done.stdout
    places = done.stdout.split()[-2:]
    assert all(Path(place).is_relative_to(python.parents[1]) for place in places), places


@pytest.mark.slow
def test_the_wheels_description_has_no_link_that_leads_nowhere(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    text = archive.read(metadata).decode()
    assert f"Version: {spmd.__version__}" in text and "sharding (docs/sharding.md)" in text
    assert not [link for link in re.findall(r"\]\(([^)]+)\)", text) if not link.startswith(("https:", "#"))]


@pytest.mark.slow
def test_the_wheel_holds_every_module_and_no_test(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    files = {path.relative_to(ROOT).as_posix() for package in ("mesh", "spmd") for path in (ROOT / package).rglob("*.py")}
    assert files <= names
    assert not [name for name in names if name.split("/")[0] not in ("mesh", "spmd") and ".dist-info/" not in name]


@pytest.mark.slow
@pytest.mark.parametrize("command", [["-m", "spmd.cli", "--help"], ["-m", "mesh.launch", "--help"], ["-m", "spmd.cli", "bench", "--help"]])
def test_the_commands_answer(python: Path, tmp_path: Path, command: list[str]) -> None:
    assert "usage" in run(python, *command, cwd=tmp_path).stdout.lower()
