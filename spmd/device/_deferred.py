"""Deferred operations: a kernel call can be added to a queue, which returns tensors that have no value yet.

    token = deferring.set(queue)      # from here on `queue.call(operation, args, kwargs)` replaces running a kernel
    y = x * 2                         # y's buffer is pending
    y.cpu()                           # reading a value runs the pending operations: `queue.run()`

This module defines the interface only. `spmd/program/lazy` implements the queue.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

from spmd.base._fork import fork
from spmd.device._saved_results import keeping
from spmd.device._storage import recording
from spmd.device._trace_lock import retried

Kernel = Callable[..., Any]


class Deferrer(Protocol):
    """A queue of operations."""

    def call(self, operation: Deferrable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `operation.kernel(*args, **kwargs)` now or later, and return its result, possibly with pending values."""
        ...

    def boundary(self) -> None:
        """End a step: run the recorded operations."""
        ...


class ByIdentity(NamedTuple):
    """An argument of a deferrable kernel that is compared by identity: an object that contains no tensor values."""

    value: Any


deferring: ContextVar[Deferrer | None] = ContextVar("deferring", default=None)
calling: ContextVar[Callable[..., Any] | None] = ContextVar(
    "calling", default=None
)  # `(kernel, *args, **kwargs)`: how a trace calls a kernel


class Deferrable:
    """A kernel that a queue may run later.

    Attributes:
        name: name of the ATen operator.
        kernel: takes device tensors and returns device tensors or containers of them. Any other result must depend only on shapes,
            dtypes and arguments that are not tensors.
        is_number: whether the Python number at a position or name may be replaced by an array.
        writes: whether the operator works in place. Its numbers are those of an update, which change from step to step.
        needs_values: whether a call with these arguments must run now because its result's shape depends on values.
        check: called with the arguments of every call; raises if values that the host knows are invalid.
    """

    __slots__ = ("_retried", "check", "is_number", "kernel", "name", "needs_values", "writes")

    def __init__(
        self,
        name: str,
        kernel: Kernel,
        is_number: Callable[[int | str, Any], bool] = lambda position, value: False,
        *,
        writes: bool = False,
        needs_values: Callable[[tuple[Any, ...], dict[str, Any]], bool] = lambda args, kwargs: False,
        check: Callable[[tuple[Any, ...], dict[str, Any]], None] | None = None,
    ) -> None:
        self.name = name
        self.kernel = kernel
        self._retried = retried(kernel)
        self.is_number = is_number
        self.writes = writes
        self.needs_values = needs_values
        self.check = check

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the kernel, or add it to the queue."""
        if fork.is_bad:
            raise fork.error()
        queue = deferring.get()
        if queue is None or recording.get() is not None or keeping.get() is not None:
            call = calling.get()
            if call is None and not self.writes:
                return self._retried(*args, **kwargs)
            return self.kernel(*args, **kwargs) if call is None else call(self.kernel, *args, **kwargs)
        return queue.call(self, args, kwargs)


def end_step() -> None:
    """End the step of this thread's queue, if there is one, which runs its operations. Compiled calls begin with this."""
    if fork.is_bad:
        raise fork.error()
    queue = deferring.get()
    if queue is not None:
        queue.boundary()


__all__ = ["Deferrable", "Deferrer", "ByIdentity", "calling", "deferring", "end_step"]
