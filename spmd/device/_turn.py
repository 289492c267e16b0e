"""One trace at a time: compiled functions take turns, and an eager operation of another thread waits where it meets a trace.

Note [Threads]
While a function is traced, the buffers it writes hold tracers, which mean nothing outside of that trace. So every call of a compiled
function holds `turn`, for as long as it is traced, compiled or dispatched (the devices go on after it); two calls that update the
same state must not overlap in any case. An eager operation takes no lock: it reads what a buffer holds, which is an array, or a
tracer of another thread's trace. Then it waits for the trace to end and finds the array again. An array may also be gone before
the operation is dispatched: a compiled call of another thread that updates it has taken its memory. Then the operation takes a turn
and reads again.
"""

from __future__ import annotations

from threading import RLock
from typing import Any

from spmd.base._errors import TraceError, message
from spmd.base._jax import is_tracer, is_tracing

turn = RLock()
_LIMIT_S = 1800.0  # as long as a first step may take


def is_of_another_thread(value: Any) -> bool:
    """Whether a value that a buffer holds belongs to a trace of another thread."""
    return is_tracer(value) and not is_tracing()


def wait_for_trace() -> None:
    """Wait until no other thread traces.

    Raises:
        TraceError: it traces for too long, perhaps because it waits for this thread.
    """
    if not turn.acquire(timeout=_LIMIT_S):
        raise TraceError(
            message(
                f"a tensor is part of a function that another thread has been tracing for {_LIMIT_S:g} s",
                "does the compiled function wait for a thread that computes with its tensors?",
                fix="start no threads inside a compiled function",
            )
        )
    turn.release()


def was_taken(error: Exception) -> bool:
    """Whether an operation failed because a compiled call of another thread took the memory of an operand."""
    return "has been deleted" in str(error)


__all__ = ["is_of_another_thread", "turn", "wait_for_trace", "was_taken"]
