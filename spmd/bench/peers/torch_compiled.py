"""torch.compile on one device, unsharded: `torch_cpu.Compiled` under the name `Contender`, which `_peer` looks for."""

from __future__ import annotations

from torch_cpu import Compiled as Contender  # pyright: ignore[reportMissingImports]
from torch_cpu import prepare as prepare  # pyright: ignore[reportMissingImports]

__all__ = ["Contender", "prepare"]
