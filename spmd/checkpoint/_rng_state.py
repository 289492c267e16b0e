"""The random streams of a process as plain state: torch's CPU stream, Python's and numpy's, and the stream of the device.

The device's stream (a seed and a count of draws) is the same on all processes of a job. Each process has its own host streams.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from spmd.base._errors import CheckpointError, message
from spmd.device._random_stream import default_stream

_WORDS = 624  # words of a Mersenne twister's state


class RandomState:
    """State object for the random streams. It is saved and restored with every checkpoint."""

    per_process = True

    def state_dict(self) -> dict[str, Any]:
        """The present state of the streams."""
        return {"host": host_streams(), "device": default_stream.words()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the streams from `state`."""
        set_host_streams(state["host"])
        default_stream.set_state(torch.from_numpy(np.asarray(state["device"], np.uint32).view(np.uint8).copy()))


def host_streams() -> dict[str, Any]:
    """The state of the global host streams of torch, Python and numpy."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "python": (version, np.array(words, np.uint32), gauss),
        "numpy": (str(name), np.array(keys, np.uint32), int(position), int(has_gauss), float(cached)),
    }


def set_host_streams(state: dict[str, Any]) -> None:
    """Continue the host streams from a state that `host_streams` returned.

    Raises:
        CheckpointError: `state` is malformed, or is not accepted by these versions of Python, torch and numpy.
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
