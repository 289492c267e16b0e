"""Arguments of the subcommands of `spmd ckpt`. `spmd.cli` runs them and prints the results."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional


@dataclass(frozen=True)
class Ls:
    """List the steps: size, number of arrays, and whether the manifest is readable. Exit code 1 if one is not."""

    path: Positional[Path]
    """Folder of the checkpoints."""


@dataclass(frozen=True)
class Verify:
    """Read every byte and compare it with the checksums. Exit code 1 if something is damaged."""

    path: Positional[Path]
    """Folder of the checkpoints."""
    step: int | None = None
    """Verify only this step; by default all steps."""


@dataclass(frozen=True)
class Reshard:
    """Rewrite a step with its arrays sharded for another mesh."""

    source: Positional[Path]
    """Folder of the checkpoints."""
    target: Positional[Path]
    """Folder to write the new step to."""
    mesh: str
    """Axes and sizes, as in data=4,model=2."""
    step: int | None = None
    """The step to rewrite; by default the latest valid one."""


__all__ = ["Ls", "Reshard", "Verify"]
