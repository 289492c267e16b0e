"""Whether the caller is the user's program, which sees torch_xla's API, or a library (this package, torch, jax), which sees ours."""

from __future__ import annotations

import os.path
import sys

import jax
import torch

import mesh
import spmd.base

_SPMD = os.path.dirname(os.path.dirname(os.path.abspath(str(spmd.base.__file__)))) + os.sep
_OURS = (_SPMD, *(os.path.dirname(os.path.abspath(str(module.__file__))) + os.sep for module in (mesh, torch, jax)))


def is_user(depth: int) -> bool:
    """True if the code `depth` frames above the caller is not ours, torch's or jax's. `__torch_function__` frames are skipped."""
    frame = sys._getframe(depth + 1)
    while frame.f_code.co_name == "__torch_function__" and frame.f_back is not None:
        frame = frame.f_back
    return not frame.f_code.co_filename.startswith(_OURS)


def is_package(name: str, depth: int) -> bool:
    """True if the code `depth` frames above the caller belongs to the package `name`."""
    return str(sys._getframe(depth + 1).f_globals.get("__name__", "")).partition(".")[0] == name
