"""The options of a compiled step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from spmd.base._errors import SpmdError, message


@dataclass(frozen=True)
class Options:
    """The options of a compiled step. `spmd.compile` documents each."""

    keep_grads: bool = False
    max_retraces: int = 8
    on_retrace: str = "warn"
    max_programs: int = 32
    steps_per_call: int = 1
    check: bool = False
    debug_nans: bool = False
    check_indices: bool | None = None
    roll: bool | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        flags: dict[str, object] = {"keep_grads": self.keep_grads, "check": self.check, "debug_nans": self.debug_nans}
        for name, flag in flags.items():
            if not isinstance(flag, bool):
                raise SpmdError(
                    message(f"compile's option {name} must be True or False", f"got {flag!r}", fix=f"spmd.compile(fn, {name}=True)")
                )
        counts: dict[str, object] = {name: getattr(self, name) for name in ("max_retraces", "max_programs", "steps_per_call")}
        for name, count in counts.items():
            if type(count) is not int or count < 1:
                raise SpmdError(message(f"compile's option {name} must be at least 1", f"got {count!r}", fix=f"spmd.compile(fn, {name}=8)"))
        if self.check_indices is not None and not isinstance(self.check_indices, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            what = "compile's option check_indices must be True, False or None"
            raise SpmdError(message(what, f"got {self.check_indices!r}", fix="spmd.compile(fn, check_indices=True)"))
        if self.on_retrace not in ("warn", "error"):
            what = f"compile's option on_retrace must be 'warn' or 'error', got {self.on_retrace!r}"
            raise SpmdError(message(what, fix='spmd.compile(fn, on_retrace="warn")'))
        if not isinstance(self.roll, bool) and self.roll != "auto":
            raise SpmdError(message("roll must be True, False or 'auto'", f"roll={self.roll!r}", fix='spmd.compile(fn, roll="auto")'))


def has_dims(dynamic: object) -> bool:
    """Whether the option `dynamic` of `compile` makes sizes vary.

    Raises:
        SpmdError: it is neither a mapping, nor True, False or None.
    """
    if dynamic is not None and not isinstance(dynamic, bool | Mapping):
        what = f"compile's option dynamic must be a dict from arguments to dims, or True, got {dynamic!r}"
        raise SpmdError(message(what, fix='dynamic={"x": {0: spmd.Dim("batch", max=64)}}'))
    return bool(dynamic)


__all__ = ["Options", "has_dims"]
