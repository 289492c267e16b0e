"""What the host can say of a traced value: one that follows from constants, or from inputs that the host knows (see `_uploaded`)."""

from __future__ import annotations

from typing import Any

import numpy as np

from spmd.base._convert import exact_dtypes
from spmd.base._jax import known_value
from spmd.device._storage import recording


def host_answer(value: Any) -> np.ndarray[Any, Any] | None:
    """A traced value on the host; None if only the program will have it, or nothing is traced.

    Where inputs have part in it, the program holds for calls in which the same comes out.
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
