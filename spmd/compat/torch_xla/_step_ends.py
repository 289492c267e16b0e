"""Step boundaries: operations since the last one run as one program, then step closures run."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from spmd.base import _counters
from spmd.base._errors import TraceError, called_at, message
from spmd.device._deferred import end_step
from spmd.device._storage import recording
from spmd.program.lazy._session import Lazy

_closures: list[Callable[[], Any]] = []
_async_closures: list[Callable[[], Any]] = []
_pool = ThreadPoolExecutor(1, "torch_xla.step_closures")
_running: list[Future[Any]] = []
_lazy: list[Lazy] = []


def record() -> None:
    """Defer operations to the end of their step from now on, as torch_xla does."""
    if not _lazy:
        _lazy.append(Lazy())
        _lazy[0].start()


def run_eagerly() -> None:
    """Run operations immediately from now on."""
    if _lazy:
        _lazy.pop().stop()


def is_eager() -> bool:
    return not _lazy


def mark_step(wait: bool = False, reset_scope: bool = True) -> None:
    """`xm.mark_step`, `torch_xla.sync`: end a step. With `wait`, block until the devices have finished it.

    The exception of an asynchronous closure is raised at the end of the next step.
    """
    if recording.get() is not None:  # inside a compiled step, which ends with its program
        return
    _counters.count("MarkStep")
    end_step()
    now, later = _closures[:], _async_closures[:]
    _closures.clear()
    _async_closures.clear()
    ended = [future for future in _running if future.done()]
    _running[:] = [*(future for future in _running if future not in ended), *(_pool.submit(closure) for closure in later)]
    for closure in now:
        closure()
    if wait:
        wait_device_ops()
    for future in ended:
        future.result()


def wait_device_ops(devices: Any = ()) -> None:
    """`xm.wait_device_ops`: block until the devices have finished everything that was dispatched."""
    torch.get_device_module("jax").synchronize()


def add_step_closure(closure: Callable[..., Any], args: tuple[Any, ...] = (), run_async: bool = False) -> None:
    """`xm.add_step_closure`: call `closure(*args)` at the end of the step; with `run_async` in another thread.

    Raises:
        TraceError: in a compiled function, whose Python code does not run in every step.
    """
    if recording.get() is not None:
        raise TraceError(
            message(
                "a compiled function adds a step closure, which would run only once, not in every step",
                *called_at(),
                fix="return the values from the compiled function and add the closure after it",
            )
        )
    (_async_closures if run_async else _closures).append(lambda: closure(*args))
