"""The Dockerfile, without Docker: its instructions are known, what it copies exists and is all that the package is built of."""

import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "Dockerfile").read_text(encoding="utf-8")
KNOWN = {"FROM", "ARG", "RUN", "WORKDIR", "COPY", "CMD", "ENV", "ENTRYPOINT", "LABEL", "USER", "EXPOSE", "VOLUME", "ADD", "SHELL"}


def instructions() -> list[tuple[str, str]]:
    lines = [line for line in TEXT.splitlines() if line.strip() and not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in joined.splitlines()]


def values(name: str) -> list[str]:
    return [value for each, value in instructions() if each == name]


def copied() -> set[str]:
    return {source for value in values("COPY") for source in shlex.split(value)[:-1]}


def test_every_instruction_is_one_of_dockers_and_the_first_is_from() -> None:
    assert {name for name, _ in instructions()} <= KNOWN
    assert instructions()[0][0] == "FROM"


def test_its_python_is_one_that_the_package_takes() -> None:
    (image,) = values("FROM")
    match = re.fullmatch(r"python:(3)\.(\d+)-slim", image)
    assert match and (int(match[1]), int(match[2])) >= (3, 11)
    assert "/" not in image


def test_what_is_copied_exists_and_is_all_that_the_package_is_built_of() -> None:
    assert all((ROOT / source).exists() for source in copied())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {"pyproject.toml", "README.md", *project["project"]["license-files"], *wheel["packages"]}
    needed |= {name.split("/")[0] for name in wheel["force-include"]}
    assert needed <= copied()


def test_every_package_has_the_version_of_the_constraints() -> None:
    installs = [value for value in values("RUN") if "pip install" in value]
    assert installs and all("--constraint constraints.txt" in value for value in installs)


@pytest.mark.parametrize(("ground", "extras"), [("cpu", "hf"), ("tpu", "hf,tpu"), ("cuda", "hf,cuda")])
def test_its_argument_chooses_the_extras(ground: str, extras: str) -> None:
    line = next(value for value in values("RUN") if "GROUND" in value).replace("pip install", "echo")
    done = subprocess.run(["sh", "-euc", line], env={"GROUND": ground}, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == f".[{extras}]"
    known = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert set(extras.split(",")) <= known.keys()


@pytest.mark.parametrize(("index", "words"), [("", ["torch"]), ("https://index", ["--index-url", "https://index", "torch"])])
def test_torch_may_come_from_an_index_of_its_own(index: str, words: list[str]) -> None:
    line = next(value for value in values("RUN") if "TORCH_INDEX" in value).replace("pip install", "echo")
    done = subprocess.run(["sh", "-euc", line], env={"TORCH_INDEX": index}, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-len(words) :] == words
    assert "constraints.txt" in done.stdout.split()[-len(words) - 1]
