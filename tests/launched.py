"""Run a program under `spmd launch` in a process of its own, and read what came of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
JOB = ROOT / "benchmarks" / "faulty_job.py"
LAUNCH = (sys.executable, "-W", "ignore::UserWarning", "-m", "spmd.cli", "launch")


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
    return {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}


def command(*options: object, program: Path = JOB, arguments: tuple[object, ...] = ()) -> list[str]:
    return [*LAUNCH, *map(str, options), str(program), *map(str, arguments)]


def launch(*options: object, program: Path = JOB, arguments: tuple[object, ...] = (), timeout: float = 300) -> Done:
    done = subprocess.run(
        command(*options, program=program, arguments=arguments), env=environ(), capture_output=True, text=True, timeout=timeout, check=False
    )
    return Done(done.returncode, done.stdout, done.stderr)


def steps(folder: Path, process: int = 0) -> list[dict[str, Any]]:
    """What benchmarks/faulty_job.py noted of its steps, oldest first."""
    path = folder / f"steps-{process}.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
