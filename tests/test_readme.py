"""The README's Python runs as it stands, in a process of its own, and prints what the README says it prints."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(), re.DOTALL)


def test_the_first_example_runs_and_prints_what_the_readme_shows() -> None:
    (code,) = blocks("python")
    shown = next(block for block in blocks("text") if "all-reduce" in block)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=README.parent)
    assert done.returncode == 0, done.stderr
    assert shown.strip() in done.stdout
