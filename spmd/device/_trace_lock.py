"""The lock that lets only one thread trace at a time. An eager operation of another thread waits if it meets a tracer.

Note [Threads]
While a function is traced, the buffers that it writes contain tracers, which are invalid outside that trace. Every call of a compiled
function therefore holds `trace_lock` while it is traced, compiled and dispatched; the devices run on after the lock is released. Two
calls that update the same state must not overlap in any case. An eager operation takes no lock. If the buffer that it reads contains
a tracer of another thread, it waits for the end of the trace and reads the array that is there again. An array may also be deleted
before the operation is dispatched, or its values are copied to the host, because a compiled call of another thread donated it. The
operation then waits for `trace_lock` and reads again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from contextlib import contextmanager
from threading import RLock
from typing import Any, ParamSpec, TypeVar

from spmd.base._errors import SpmdError, TraceError, called_at, message
from spmd.base._jax import is_tracer, is_tracing

P = ParamSpec("P")
T = TypeVar("T")
trace_lock = RLock()
_LIMIT_S = 1800.0  # upper bound for tracing and compiling a first step


def is_of_another_thread(value: Any) -> bool:
    """Whether a buffer's value is a tracer of another thread."""
    return is_tracer(value) and not is_tracing()


def wait_for_trace(holder: Any = None) -> None:
    """Wait until no other thread traces.

    Args:
        holder: a buffer whose value is a tracer.

    Raises:
        TraceError: the other thread traces for more than `_LIMIT_S` seconds, perhaps because it waits for this thread; or the buffer's
            value is the same tracer afterwards.
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
    """Whether an operation failed because a compiled call of another thread, or a JAX function, donated the memory of an operand."""
    return "has been deleted" in str(error) or (isinstance(error.__cause__, Exception) and was_taken(error.__cause__))


def retried(read: Callable[P, T]) -> Callable[P, T]:
    """A function that reads values and writes nothing before; it runs again if a compiled call of another thread took the memory.

    The function raises SpmdError if the memory was freed and is not replaced.
    """

    @functools.wraps(read)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return read(*args, **kwargs)
        except Exception as error:
            if is_tracing() or not was_taken(error):
                raise
        with with_trace_lock():
            return read(*args, **kwargs)

    return run


@contextmanager
def with_trace_lock() -> Generator[None]:
    """Hold the lock while an operation is retried, so that no compiled call of another thread runs in the meantime.

    Raises:
        SpmdError: the memory of an operand was freed and is not replaced.
    """
    with trace_lock:
        try:
            yield
        except (RuntimeError, ValueError) as error:
            if not was_taken(error):
                raise
            raise memory_is_gone() from error


def reread(holder: Any) -> Any:
    """Read a buffer again whose array was deleted, after waiting for the compiled calls of other threads.

    Raises:
        SpmdError: its array is still deleted.
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


__all__ = ["is_of_another_thread", "memory_is_gone", "retried", "with_trace_lock", "reread", "trace_lock", "wait_for_trace", "was_taken"]
