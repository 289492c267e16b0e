"""Random generators of the host: which objects are some, and the state of each, to be compared."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

GLOBAL_RANDOM = random.random.__self__
_NUMPYS_GLOBAL: Any = np.random.rand.__self__  # type: ignore[attr-defined]


def is_generator(value: Any) -> bool:
    """Whether `value` makes random numbers on the host, and can be asked for its state."""
    kind = type(value)
    if value is GLOBAL_RANDOM or value is _NUMPYS_GLOBAL or value is torch.default_generator:  # `no_host_random` looks at these
        return False
    if issubclass(kind, torch.Generator):
        return value.device.type == "cpu"
    is_pythons = issubclass(kind, random.Random) and not issubclass(kind, random.SystemRandom)
    return is_pythons or issubclass(kind, (np.random.Generator, np.random.RandomState, np.random.BitGenerator))


def state_of(generator: Any) -> Any:
    """The state of a random generator, to be compared."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return repr(generator.get_state())
    return repr(generator.bit_generator.state if isinstance(generator, np.random.Generator) else generator.state)


__all__ = ["GLOBAL_RANDOM", "is_generator", "state_of"]
