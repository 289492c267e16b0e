"""Description of a job for a scheduler's file: its command, resources, code, packages and secrets."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from mesh.schedulers._tpu_slice import TpuSlice


@dataclass(frozen=True)
class Code:
    """Source of the program's code on the hosts.

    Attributes:
        kind: "here": this folder, which the hosts share or get a copy of; "image": part of the image; "git": each host fetches it.
        url: URL of the repository (kind "git").
        ref: branch, tag or commit (kind "git").
    """

    kind: str = "here"
    url: str = ""
    ref: str = "HEAD"

    @staticmethod
    def parse(text: str) -> Code:
        """Parse "here", "image" or "git+https://host/path@ref".

        Raises:
            ValueError: the text is none of these.
        """
        if text in ("here", "image"):
            return Code(text)
        match = re.fullmatch(r"git\+((?:\w+://)?(?:[^@/\s]+@)?[^@\s]+)(?:@([^@:\s]+))?", text)
        if match is None:
            raise ValueError(text)
        return Code("git", match[1], match[2] or "HEAD")


@dataclass(frozen=True)
class Volume:
    """Storage that outlives a host: `source` in the scheduler's notation, mounted on the hosts as the folder `path`."""

    source: str
    path: str


@dataclass(frozen=True)
class Resources:
    """Resources of each host, and the TPU slice of all hosts.

    Attributes:
        tpu: the TPU slice of the whole job.
        gpus: type and number of GPUs of each host, e.g. ("H100", 8).
        cpus: number of cores of each host. None: the scheduler's default.
        memory_gb: memory of each host, in GiB. None: the scheduler's default.
    """

    tpu: TpuSlice | None = None
    gpus: tuple[str, int] | None = None
    cpus: int | None = None
    memory_gb: int | None = None


@dataclass(frozen=True)
class Setup:
    """Setup of the hosts before the program runs.

    Attributes:
        image: container image in which the program runs, or None.
        code: source of the program's code.
        install: shell command to run once on each host, or None.
        secrets: names of environment variables whose values the file must not contain.
        volumes: storage that outlives the hosts.
        resources: resources of each host.
        directives: additional SLURM directives, e.g. "partition=tpu".
        name: name of the job. None: derived from the program.
    """

    image: str | None = None
    code: Code = Code()
    install: str | None = None
    secrets: tuple[str, ...] = ()
    volumes: tuple[Volume, ...] = ()
    resources: Resources = Resources()
    directives: tuple[str, ...] = ()
    name: str | None = None


@dataclass(frozen=True)
class ScheduledJob:
    """A job from which a scheduler's file is written.

    Attributes:
        name: up to 40 lower-case letters, digits and dashes, beginning with a letter.
        command: command of each process.
        num_hosts: total number of hosts.
        processes: total number of processes, the same number on each host.
        restarts: number of restarts after failures.
        exports: environment variables of each process, with their values.
        setup: setup of the hosts.
    """

    name: str
    command: tuple[str, ...]
    num_hosts: int = 1
    processes: int = 1
    restarts: int = 0
    exports: Mapping[str, str] = field(default_factory=dict[str, str])
    setup: Setup = Setup()

    @property
    def line(self) -> str:
        """The command as a shell command line."""
        return shlex.join(self.command)


def git_fetch_commands(code: Code, folder: str) -> list[str]:
    """Shell commands that check out the code's commit, tag or branch in `folder` and change to it. They can be run repeatedly."""
    return [
        f"git init --quiet {folder}",
        f"cd {folder}",
        f"git fetch --quiet --depth 1 {shlex.quote(code.url)} {shlex.quote(code.ref)}",
        "git checkout --quiet --force FETCH_HEAD",
    ]


def virtual_environment_commands(install: str) -> list[str]:
    """Shell commands that create a virtual environment in ~/env, with a recent Python whatever the host has, and run `install` in it."""
    return [
        "command -v uv > /dev/null || python3 -m pip install --quiet --user uv",
        'export PATH="$HOME/.local/bin:$PATH"',
        "[ -d ~/env ] || uv venv --quiet --seed --python 3.12 ~/env",
        ". ~/env/bin/activate",
        install,
    ]


def quoted(text: str) -> str:
    """The text as a YAML string in double quotes."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def indented(lines: list[str], spaces: int) -> str:
    """The lines as text, each indented by `spaces`. An empty line stays empty."""
    return "".join((" " * spaces + line if line else "") + "\n" for line in "\n".join(lines).split("\n"))
