"""Run a program in a process of its own, alone or under `spmd launch`, and read what came of it."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import compilation, fork_server

ROOT = Path(__file__).resolve().parents[1]
JOB = ROOT / "benchmarks" / "faulty_job.py"
LAUNCH = (sys.executable, "-W", "ignore::UserWarning", "-m", "spmd.cli", "launch")
LAUNCH_WITHOUT_TORCH = (sys.executable, "-W", "ignore::UserWarning", "-m", "mesh.launch")


@dataclass(frozen=True)
class Done:
    """A launcher that has ended: its exit code and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def last_line(self) -> str:
        return self.err.strip().splitlines()[-1]


def environ() -> dict[str, str]:
    flags = f"{os.environ.get('XLA_FLAGS', '')} {compilation.flags()}".strip()
    return {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **({"XLA_FLAGS": flags} if flags else {})}


def command(*options: object, program: Path = JOB, arguments: tuple[object, ...] = (), launcher: tuple[str, ...] = LAUNCH) -> list[str]:
    return [*launcher, *map(str, options), str(program), *map(str, arguments)]


def launch(*options: object, program: Path = JOB, arguments: tuple[object, ...] = (), timeout: float = 300) -> Done:
    """Run the job to its end; the launcher is a fork of one that has imported what it needs (`command` is one of its own)."""
    argv = ["spmd.cli", *command(*options, program=program, arguments=arguments)[len(LAUNCH) - 1 :]]
    return Done(*fork_server.run(argv, environ(), Path.cwd(), timeout))


def start(*options: object, arguments: tuple[object, ...] = ()) -> Future[Done]:
    """The same meanwhile."""
    return ThreadPoolExecutor(1).submit(launch, *options, arguments=arguments)


def run(program: str | Path, *arguments: object, timeout: float = 300, **variables: str) -> Done:
    """Run a script of this repository, or Python as `python -c` takes it, in a fork."""
    with tempfile.TemporaryDirectory() as folder:
        path = program if isinstance(program, Path) else Path(folder, "program.py")
        if isinstance(program, str):
            path.write_text(program, encoding="utf-8")
        return Done(*fork_server.run([str(path), *map(str, arguments)], {**environ(), **variables}, ROOT, timeout))


def steps(folder: Path, process: int = 0) -> list[dict[str, Any]]:
    """What benchmarks/faulty_job.py noted of its steps, oldest first."""
    path = folder / f"steps-{process}.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
