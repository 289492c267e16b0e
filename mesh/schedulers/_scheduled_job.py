"""A job as a scheduler's file needs it: what runs, on what, and how code, packages and secrets get there."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from mesh.schedulers._tpu_slice import TpuSlice


@dataclass(frozen=True)
class Code:
    """How the program gets to the hosts.

    Attributes:
        kind: "here": this folder, which the hosts share or get a copy of; "image": the image holds it; "git": each host fetches it.
        url, ref: of the repository and the branch, tag or commit (kind "git").
    """

    kind: str = "here"
    url: str = ""
    ref: str = "HEAD"

    @staticmethod
    def parse(text: str) -> Code:
        """From "here", "image" or "git+https://host/path@ref".

        Raises:
            ValueError: none of them.
        """
        if text in ("here", "image"):
            return Code(text)
        match = re.fullmatch(r"git\+((?:\w+://)?(?:[^@/\s]+@)?[^@\s]+)(?:@([^@:\s]+))?", text)
        if match is None:
            raise ValueError(text)
        return Code("git", match[1], match[2] or "HEAD")


@dataclass(frozen=True)
class Volume:
    """Storage that outlives a host: `source` as the scheduler names it, seen by the program as the folder `path`."""

    source: str
    path: str


@dataclass(frozen=True)
class Resources:
    """What each host has. Of `tpu`, the whole slice.

    Attributes:
        gpus: of each host, e.g. ("H100", 8).
        cpus: cores of each host; None: the scheduler's default.
        memory_gb: host memory, in GiB.
    """

    tpu: TpuSlice | None = None
    gpus: tuple[str, int] | None = None
    cpus: int | None = None
    memory_gb: int | None = None


@dataclass(frozen=True)
class Setup:
    """What there must be on the hosts before the program runs.

    Attributes:
        image: of a container.
        code: how the program gets there.
        install: run once on each host, by a shell; None: nothing.
        secrets: names of environment variables whose values the file does not hold.
        volumes: storage that outlives the hosts.
        resources: what each host has.
        directives: of SLURM, as "partition=tpu".
        name: the job's; None: the program's.
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
    """What a file is written of.

    Attributes:
        name: up to 40 lower case letters, digits and dashes, a letter first.
        command: what each process runs.
        num_hosts, processes: in all; processes are spread evenly.
        restarts: how often it may fail and be started again.
        exports: environment variables, values included.
        setup: what there must be on the hosts.
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
        """The command as a line of a shell."""
        return shlex.join(self.command)


def fetched(code: Code, folder: str) -> list[str]:
    """Commands of a shell after which it stands in `folder`, with the files of a commit, a tag or a branch; a second time too."""
    return [
        f"git init --quiet {folder}",
        f"cd {folder}",
        f"git fetch --quiet --depth 1 {shlex.quote(code.url)} {shlex.quote(code.ref)}",
        "git checkout --quiet --force FETCH_HEAD",
    ]


def environment_of_its_own(install: str) -> list[str]:
    """Lines of a shell after which packages are installed in ~/env, under a Python that is new enough whatever the host has."""
    return [
        "command -v uv > /dev/null || python3 -m pip install --quiet --user uv",
        'export PATH="$HOME/.local/bin:$PATH"',
        "[ -d ~/env ] || uv venv --quiet --seed --python 3.12 ~/env",
        ". ~/env/bin/activate",
        install,
    ]


def quoted(text: str) -> str:
    """A YAML string in double quotes."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def indented(lines: list[str], spaces: int) -> str:
    """Lines of a file, each behind so many spaces; an empty line stays empty."""
    return "".join((" " * spaces + line if line else "") + "\n" for line in "\n".join(lines).split("\n"))
