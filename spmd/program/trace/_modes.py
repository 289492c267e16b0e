"""torch's global modes that a traced function changes: restored after the trace, and set by every call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from spmd.base._torch import set_grad_enabled

_SWITCHES: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.is_grad_enabled, set_grad_enabled),
    (torch.get_default_dtype, torch.set_default_dtype),
    (lambda: torch.is_autocast_enabled("jax"), lambda on: torch.set_autocast_enabled("jax", on)),
    (lambda: torch.get_autocast_dtype("jax"), lambda dtype: torch.set_autocast_dtype("jax", dtype)),
)


class Switches:
    """Context that restores torch's global modes after a traced function.

    Attributes:
        effects: for each mode that the function changed, a call that sets it as the function did.
    """

    def __init__(self) -> None:
        self._before = [read() for read, _ in _SWITCHES]
        self.effects: list[Callable[[], Any]] = []

    def __enter__(self) -> Switches:
        return self

    def __exit__(self, *error: object) -> None:
        for (read, write), before in zip(_SWITCHES, self._before, strict=True):
            now = read()
            if now != before:
                self.effects.append(lambda write=write, now=now: write(now))
                write(before)
