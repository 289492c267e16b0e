"""The random streams of a process as one array: torch's on the CPU, Python's, numpy's; the device's own is beside it.

The device's stream (a seed and a count of draws) is the job's; the host's streams are each process's own.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from spmd.base._errors import CheckpointError, message
from spmd.device._random_stream import default_stream

_WORDS = 624  # of a Mersenne twister


class RandomState:
    """State object for the random streams: saved and restored with every checkpoint."""

    per_process = True

    def state_dict(self) -> dict[str, Any]:
        """The streams now."""
        return {"host": host_streams(), "device": default_stream.words()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the streams from `state`."""
        set_host_streams(state["host"])
        default_stream.set_state(torch.from_numpy(np.asarray(state["device"], np.uint32).view(np.uint8).copy()))


def host_streams() -> dict[str, Any]:
    """torch's, Python's and numpy's global streams on the host."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "python": (version, np.array(words, np.uint32), gauss),
        "numpy": (str(name), np.array(keys, np.uint32), int(position), int(has_gauss), float(cached)),
    }


def set_host_streams(state: dict[str, Any]) -> None:
    """Continue the host's streams from what `host_streams` returned.

    Raises:
        CheckpointError: it is no such state.
    """
    try:
        version, words, gauss = state["python"]
        name, keys, position, has_gauss, cached = state["numpy"]
        if len(words) != _WORDS + 1 or len(keys) != _WORDS:
            raise ValueError(f"{len(words)} and {len(keys)} words")
        torch.set_rng_state(state["torch"])
        random.setstate((version, tuple(int(word) for word in words), gauss))
        np.random.set_state((name, keys, position, has_gauss, cached))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            message(
                "the checkpoint's host random state does not match this process",
                str(error)[:200],
                fix="restore with the versions of Python and torch that saved the checkpoint",
            )
        ) from error


__all__ = ["RandomState", "host_streams", "set_host_streams"]
