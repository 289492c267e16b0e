"""Traced values that are known on the host, because they follow from constants or from inputs that the host knows (see `_uploaded`)."""

from __future__ import annotations

from typing import Any

import numpy as np

from spmd.base._convert import exact_dtypes
from spmd.base._jax import known_value
from spmd.device._storage import recording


def host_answer(value: Any) -> np.ndarray[Any, Any] | None:
    """The value of a traced array on the host; None if only the program can compute it, or nothing is being traced.

    If the value depends on inputs, the program gets a guard: it serves only calls with the same value.
    """
    recorder = recording.get()
    if recorder is None:
        return None
    with exact_dtypes():
        known = known_value(value, recorder.is_state)
        if known is None:
            known = recorder.known_value(value)
        return None if known is None else np.asarray(known)


__all__ = ["host_answer"]
