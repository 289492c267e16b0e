"""Branches on a device value of which one side only raises. The trace takes the other side, and the program checks the value.

if not torch._is_all_true(valid):          # torch.distributions; `assert loss > 0`; gaussian_nll_loss
    raise ValueError(...)
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from spmd.base._branches import side_that_raises
from spmd.base._convert import exact_dtypes
from spmd.base._errors import user_line
from spmd.base._torch import current_autograd_node
from spmd.device._checks import Check
from spmd.device._storage import load, recording

# Frames between the branch and this module: our own files, torch's modes, and methods of symbolic numbers and of sharded tensors.
_SKIPPED_FILES = (
    __file__,
    __file__.replace("_asserted", "_numbers"),
    __file__.replace("_asserted", "_copy"),
    f"{torch.__path__[0]}/utils/_device.py",
    f"{torch.__path__[0]}/overrides.py",
)
_SKIPPED_FUNCTIONS = ("__bool__", "__torch_function__")


def answered(is_true: Callable[[], Any]) -> bool | None:
    """The truth value that the trace assumes for a branch; None if neither side only raises, or nothing can be checked here.

    Args:
        is_true: returns the 0-dim bool that the program computes.
    """
    recorder = recording.get()
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and (frame.f_code.co_filename in _SKIPPED_FILES or frame.f_code.co_name in _SKIPPED_FUNCTIONS):
        frame = frame.f_back
    if recorder is None or frame is None:
        return None
    if frame.f_code.co_name == "run_backward" and torch.is_anomaly_enabled():  # C++ asks whether a gradient holds NaN
        what = f"Function '{current_autograd_node().name()}' returned nan values"
        truth, check = True, Check(RuntimeError, what, user_line())
    else:
        side = side_that_raises(frame)
        if side is None:
            return None
        truth, check = side.truth, Check(side.kind, side.text, user_line())
    with exact_dtypes():
        flag = is_true() if truth else ~is_true()
    return (not truth) if recorder.expect(flag, check) else None


def assert_async(self: torch.Tensor, assert_msg: str = "Expected Tensor with single nonzero value, but got zero") -> None:
    """`torch._assert_async`: checked by the program in a trace, and immediately in eager code."""
    recorder = recording.get()
    with exact_dtypes():
        is_recorded = recorder is not None and recorder.expect(load(self).reshape(()) == 0, Check(RuntimeError, assert_msg, user_line()))
    if not is_recorded and not self:
        raise RuntimeError(assert_msg)


__all__ = ["answered", "assert_async"]
