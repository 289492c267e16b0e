"""Errors for what no program can do: repeat it in each call, check it before a call, or tell which object an argument is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spmd.base._errors import TraceError, called_at, message

if TYPE_CHECKING:
    from spmd.program.reads._places import Place


def refused(what: str) -> TraceError:
    """The error for something that a program cannot repeat in each call.

    Args:
        what: names it, as in "time.time(): a clock".
    """
    return TraceError(
        message(
            f"the compiled function depends on a value that later calls cannot check: {what}",
            *called_at(),
            "the program would use the same value in every call",
            fix="compute it before the call and pass it as an argument",
        )
    )


def identity_of_argument(what: str) -> TraceError:
    """The error for a function that asks which object an argument is."""
    return TraceError(
        message(
            f"the compiled function {what}",
            "a trace has copies of these arguments, which no other object is",
            fix="pass a number, a name or a flag that says which one it is",
        )
    )


def written_tensor(place: Place) -> TraceError:
    """The error for a CPU tensor that the function read and then updated."""
    return TraceError(
        message(
            f"the compiled function updates {place.title} in place, which is on the CPU (shape {tuple(place.holder.shape)})",
            "it would be updated by the trace alone, not by every call",
            fix="move it to the device: .to('jax'), or use a Python number",
        )
    )


__all__ = ["identity_of_argument", "refused", "written_tensor"]
