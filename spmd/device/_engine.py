"""The autograd engine as it is for this device: backward runs on the thread that called it, and an exception in a gradient
hook comes out there.

    w.register_hook(hook)      # of a tensor, a node, an accumulator, a module, saved tensors: C++ calls it
    loss.backward()            # raises what `hook` raises, with its traceback

Note [Exceptions in gradient hooks]. C++ leaves Python's error indicator set when a hook raises, and unwinds. A stream guard
stands in the way (PyTorch gives every device of this kind streams), whose destructor asks our device guard for the device's
type, in Python. A call that succeeds while the indicator is set is an error to Python, and an error in a destructor ends the
process. So `type_` takes the exception away first. The engine then stops as it does for any exception, only that
`run_backward` finds none and Python says SystemError; there the exception that was kept is raised.

Which backward an exception belongs to is known by its thread: with multithreading on, all backwards share one of the engine's
own. Backward on the caller's thread is also what CPU tensors have, so that hooks see the thread's own state.
"""

from __future__ import annotations

import ctypes
from threading import get_ident
from typing import Any

from spmd.base._torch import DummyDeviceGuard, ImperativeEngine, is_multithreading_enabled, set_multithreading_enabled
from spmd.patches._table import current, replace

# Of ctypes' functions of Python itself: when the error indicator is set after the call, the call raises that error.
_raise_what_is_set: Any = ctypes.PYFUNCTYPE(ctypes.c_void_p)(("PyErr_Occurred", ctypes.pythonapi))
_PRIVATE_USE_1: Any = DummyDeviceGuard().type_()
_raised: dict[int, BaseException] = {}  # by thread: taken from C++, not yet raised by the backward it belongs to


class DeviceGuard(DummyDeviceGuard):
    """What C++ asks for the type of its current device. See Note [Exceptions in gradient hooks]."""

    def type_(self) -> Any:
        try:
            _raise_what_is_set()
        except BaseException as error:
            trace = error.__traceback__
            _raised[get_ident()] = error.with_traceback(None if trace is None else trace.tb_next)  # without this frame
        return _PRIVATE_USE_1


class Engine(ImperativeEngine):
    """PyTorch's engine, on the caller's thread, raising what a hook raised."""

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        thread, threads_before = get_ident(), is_multithreading_enabled()
        _raised.pop(thread, None)
        set_multithreading_enabled(False)
        try:
            return super().run_backward(*args, **kwargs)
        except SystemError:
            raised = _raised.pop(thread, None)
            if raised is None:  # also of backwards in backwards, 60 deep, which run on other threads: so it is with CPU tensors
                raise
        finally:
            set_multithreading_enabled(threads_before)
        raise raised  # out here it keeps its own context


def register() -> None:
    """Make this PyTorch's engine."""
    engine = current("torch.autograd.Variable._execution_engine")
    assert type(engine) is ImperativeEngine, f"the autograd engine is {type(engine)}: another package has replaced it"
    replace("torch.autograd.Variable._execution_engine", Engine())


__all__ = ["DeviceGuard", "Engine", "register"]
