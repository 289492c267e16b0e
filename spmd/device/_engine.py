"""The autograd engine for this device: backward runs on the calling thread, and exceptions in gradient hooks reach the caller.

    w.register_hook(hook)      # also hooks of nodes, accumulators, modules and saved tensors: C++ calls them
    loss.backward()            # raises the exception of `hook`, with its traceback

Note [Exceptions in gradient hooks]. When a hook raises, C++ leaves Python's error indicator set and unwinds. PyTorch gives every
device of this kind streams, so the unwinding destroys a stream guard, whose destructor calls our device guard's `type_` in Python.
Python treats a call that succeeds while the indicator is set as an error, and an error in a destructor ends the process. `type_`
therefore clears the indicator and keeps the exception. The engine then stops as for any exception, but `run_backward` returns
without one, and Python raises SystemError. `Engine.run_backward` catches it and raises the exception that was kept.

The kept exceptions are keyed by thread. Backward must therefore run on the calling thread: with multithreading on, all backwards
share one thread of the engine. CPU tensors also run backward on the calling thread, so hooks see that thread's state.
"""

from __future__ import annotations

import ctypes
from threading import get_ident
from typing import Any

from spmd.base._torch import DummyDeviceGuard, ImperativeEngine, is_multithreading_enabled, set_multithreading_enabled
from spmd.patches._table import current, replace

# A function of `ctypes.pythonapi` raises the pending error if the error indicator is set after the call.
_raise_what_is_set: Any = ctypes.PYFUNCTYPE(ctypes.c_void_p)(("PyErr_Occurred", ctypes.pythonapi))
_PRIVATE_USE_1: Any = DummyDeviceGuard().type_()
_raised: dict[int, BaseException] = {}  # by thread: exceptions kept by `type_`, not yet raised by `run_backward`


class DeviceGuard(DummyDeviceGuard):
    """Device guard that keeps a pending exception when C++ calls `type_`. See Note [Exceptions in gradient hooks]."""

    def type_(self) -> Any:
        try:
            _raise_what_is_set()
        except BaseException as error:
            trace = error.__traceback__
            _raised[get_ident()] = error.with_traceback(None if trace is None else trace.tb_next)  # without this frame
        return _PRIVATE_USE_1


class Engine(ImperativeEngine):
    """PyTorch's engine, run on the calling thread; it raises the exceptions of hooks."""

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        thread, threads_before = get_ident(), is_multithreading_enabled()
        _raised.pop(thread, None)
        set_multithreading_enabled(False)
        try:
            return super().run_backward(*args, **kwargs)
        except SystemError:
            raised = _raised.pop(thread, None)
            if raised is None:  # also for backwards nested 60 deep, which run on other threads; CPU tensors raise SystemError there too
                raise
        finally:
            set_multithreading_enabled(threads_before)
        raise raised  # outside the except block it keeps its own __context__


def register() -> None:
    """Install `Engine` as PyTorch's autograd engine."""
    engine = current("torch.autograd.Variable._execution_engine")
    assert type(engine) is ImperativeEngine, f"the autograd engine is {type(engine)}: another package has replaced it"
    replace("torch.autograd.Variable._execution_engine", Engine())


__all__ = ["DeviceGuard", "Engine", "register"]
