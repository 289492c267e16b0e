"""The lock that lets one thread trace at a time: an eager operation of another thread waits where it meets a trace.

Note [Threads]
While a function is traced, the buffers it writes hold tracers, which mean nothing outside of that trace. So every call of a compiled
function holds `turn`, for as long as it is traced, compiled or dispatched (the devices go on after it); two calls that update the
same state must not overlap in any case. An eager operation takes no lock: it reads what a buffer holds, which is an array, or a
tracer of another thread's trace. Then it waits for the trace to end and finds the array again. An array may also be gone before
the operation is dispatched: a compiled call of another thread that updates it has taken its memory. Then the operation waits for
`trace_lock` and reads again.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from threading import RLock
from typing import Any

from spmd.base._errors import SpmdError, TraceError, called_at, message
from spmd.base._jax import is_tracer, is_tracing

trace_lock = RLock()
_LIMIT_S = 1800.0  # as long as a first step may take


def is_of_another_thread(value: Any) -> bool:
    """Whether a value that a buffer holds belongs to a trace of another thread."""
    return is_tracer(value) and not is_tracing()


def wait_for_trace(holder: Any = None) -> None:
    """Wait until no other thread traces.

    Args:
        holder: a buffer that holds a tracer.

    Raises:
        TraceError: it traces for too long, perhaps because it waits for this thread; or the buffer still holds the tracer afterwards.
    """
    before: Any = None if holder is None else holder.value
    if not trace_lock.acquire(timeout=_LIMIT_S):
        raise TraceError(
            message(
                f"a tensor is part of a function that another thread has been tracing for {_LIMIT_S:g} s",
                "the compiled function may be waiting for a thread that uses its tensors",
                fix="start no threads inside a compiled function",
            )
        )
    trace_lock.release()
    if holder is not None and holder.value is before:
        raise TraceError(
            message(
                f"a tensor of shape {before.shape} contains a tracer of a JAX function that has returned",
                *called_at(),
                "a function under jax.jit wrote the tensor, or stored it",
                fix="fn, params, buffers = spmd.functionalize(module), whose buffers are arguments and results; or spmd.compile",
            )
        )


def was_taken(error: Exception) -> bool:
    """Whether an operation failed because a compiled call of another thread, or a function of JAX, took the memory of an operand."""
    return "has been deleted" in str(error)


@contextmanager
def with_trace_lock() -> Generator[None]:
    """Around an operation that is tried again: no compiled call of another thread runs meanwhile.

    Raises:
        SpmdError: memory of an operand is still gone.
    """
    with trace_lock:
        try:
            yield
        except (RuntimeError, ValueError) as error:
            if not was_taken(error):
                raise
            raise memory_is_gone() from error


def reread(holder: Any) -> Any:
    """The array of a buffer that was found deleted, after the compiled calls of other threads.

    Raises:
        SpmdError: it still is.
    """
    with trace_lock:
        value = holder.get()
        if value.is_deleted():
            raise memory_is_gone()
        return value


def memory_is_gone() -> SpmdError:
    """The error for a tensor whose array JAX has deleted."""
    return SpmdError(
        message(
            "the memory of a tensor was freed: its array was passed to a JAX function that donates its arguments",
            *called_at(),
            "spmd.to_jax and spmd.from_jax do not copy: tensor and array share memory",
            fix="pass a copy: fn(jnp.copy(array))",
        )
    )


__all__ = ["is_of_another_thread", "memory_is_gone", "with_trace_lock", "reread", "trace_lock", "wait_for_trace", "was_taken"]
