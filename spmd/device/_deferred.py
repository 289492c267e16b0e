"""Operations that run later: a kernel may be handed to a queue, which answers with tensors that have no value yet.

    token = deferring.set(queue)      # from here on `queue.call(operation, args, kwargs)` is asked instead of running kernels
    y = x * 2                         # y's buffer waits for the queue
    y.cpu()                           # whoever reads a value runs what waits: `queue.run()`

It knows what a kernel is, and nothing of how a queue runs them (see `spmd/program/lazy`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

from spmd.base._fork import fork
from spmd.device._saved_results import keeping
from spmd.device._storage import recording

Kernel = Callable[..., Any]


class Deferrer(Protocol):
    """Takes operations."""

    def call(self, operation: Deferrable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What `operation.kernel(*args, **kwargs)` returns, now or later."""
        ...

    def boundary(self) -> None:
        """End a step: run the recorded operations."""
        ...


class ByIdentity(NamedTuple):
    """An argument of a deferrable kernel that stands for itself: an object without values of tensors, compared by identity."""

    value: Any


deferring: ContextVar[Deferrer | None] = ContextVar("deferring", default=None)


class Deferrable:
    """A kernel that a queue may run later.

    Attributes:
        name: of the ATen operator.
        kernel: takes device tensors, returns device tensors or containers of them; what else it returns follows from shapes, dtypes
            and the arguments that are no tensors.
        is_number: whether the argument of that position or name, a Python number, may be an array instead.
        writes: it is an in-place form: its numbers are those of an update, which change from step to step.
        needs_values: whether a call with these arguments must run now: its result's shape depends on values.
        check: called with the arguments of every call, raises what values that the host knows make wrong.
    """

    __slots__ = ("check", "is_number", "kernel", "name", "needs_values", "writes")

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
        self.is_number = is_number
        self.writes = writes
        self.needs_values = needs_values
        self.check = check

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the kernel, or hand it to the queue."""
        if fork.is_bad:
            raise fork.error()
        queue = deferring.get()
        if queue is None or recording.get() is not None or keeping.get() is not None:
            return self.kernel(*args, **kwargs)
        return queue.call(self, args, kwargs)


def end_step() -> None:
    """Run what this thread's queue holds, if there is one; compiled calls begin with this."""
    if fork.is_bad:
        raise fork.error()
    queue = deferring.get()
    if queue is not None:
        queue.boundary()


__all__ = ["Deferrable", "Deferrer", "ByIdentity", "deferring", "end_step"]
