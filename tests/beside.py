"""Scripts over a package that lies in a folder beside the environment, each in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run_with(folder: str, script: str, *arguments: str, cwd: Path) -> str:
    """What a script of this repository prints with `folder` on its path.

    Raises:
        AssertionError: it failed; the message is what it wrote.
    """
    path = os.pathsep.join((str(ROOT), str(ROOT / folder), os.environ.get("PYTHONPATH", "")))
    command = [sys.executable, str(ROOT / script), *arguments]
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
