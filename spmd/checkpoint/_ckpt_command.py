"""The words of `spmd ckpt`: what each asks for. The command line renders the answers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional


@dataclass(frozen=True)
class Ls:
    """List the steps: size, arrays, and whether the manifest can be read. Exit code 1 if one cannot."""

    path: Positional[Path]
    """Folder of the checkpoints."""


@dataclass(frozen=True)
class Verify:
    """Read every byte and compare it with the checksums. Exit code 1 if something is damaged."""

    path: Positional[Path]
    """Folder of the checkpoints."""
    step: int | None = None
    """Only this step; all by default."""


@dataclass(frozen=True)
class Reshard:
    """Write a step anew, its arrays cut as another mesh would hold them."""

    source: Positional[Path]
    """Folder of the checkpoints."""
    target: Positional[Path]
    """Folder for the new one."""
    mesh: str
    """Axes and sizes, as in data=4,model=2."""
    step: int | None = None
    """This step; the latest that is whole by default."""


__all__ = ["Ls", "Reshard", "Verify"]
