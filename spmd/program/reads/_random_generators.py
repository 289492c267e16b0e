"""Random generators: recognizes them, records those that a library receives, and reads the states of those of the host, to compare."""

from __future__ import annotations

import random
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from spmd.device._backend import DeviceModule
from spmd.device._generator import DeviceGenerator

if TYPE_CHECKING:
    from spmd.program.reads._questions import Question
    from spmd.program.reads._recorder import Recording

GLOBAL_RANDOM = random.random.__self__
_NUMPYS_GLOBAL: Any = np.random.rand.__self__  # type: ignore[attr-defined]


def is_generator(value: Any) -> bool:
    """Whether `value` is a random generator of the host whose state can be read."""
    kind = type(value)
    if value is GLOBAL_RANDOM or value is _NUMPYS_GLOBAL or value is torch.default_generator:  # `no_host_random` checks these
        return False
    if issubclass(kind, torch.Generator):
        return value.device.type == "cpu"
    is_python = issubclass(kind, random.Random) and not issubclass(kind, random.SystemRandom)
    return is_python or issubclass(kind, (np.random.Generator, np.random.RandomState, np.random.BitGenerator, np.random.SeedSequence))


def note_generator(recording: Recording, value: Any) -> bool:
    """Record that a library receives a value, if it is a random generator. Returns whether it is one."""
    if type(value) is DeviceGenerator:
        recording.load_attr(value, "_words")  # all that it holds
        return True
    if is_generator(value):
        recording.generators.setdefault(id(value), (value, state_of(value)))
        return True
    return False


def state_of(generator: Any) -> Any:
    """The state of a random generator, to compare."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.SeedSequence):
        return repr(generator.state)
    if isinstance(generator, np.random.RandomState):
        return repr(generator.get_state())
    bits = generator.bit_generator if isinstance(generator, np.random.Generator) else generator
    return repr(bits.state), getattr(bits.seed_seq, "n_children_spawned", 0)


def question_of_generator(name: str, owner: Any) -> Question | None:
    """The question that a method of a random generator asks: its state, or the seed of one of torch; None for other methods."""
    is_of_torch = isinstance(owner, torch.Generator) and type(owner) is not DeviceGenerator
    if name == "initial_seed" and (is_of_torch or isinstance(owner, DeviceModule)):
        return (id(owner), name), f"{name}()", owner.initial_seed
    if name in ("getstate", "get_state") and (is_of_torch or isinstance(owner, (random.Random, np.random.RandomState))):
        return (id(owner), name), f"{type(owner).__name__}.{name}()", partial(_exact_state, owner)
    return None


def _exact_state(generator: Any) -> tuple[Any, ...]:
    """The whole state of a generator that a function has read, as plain values."""
    if isinstance(generator, torch.Generator):
        return (generator.get_state().numpy().tobytes(),)
    if isinstance(generator, random.Random):
        return generator.getstate()
    name, key, *rest = generator.get_state(legacy=True)
    return name, key.tobytes(), *rest  # type: ignore[union-attr]


__all__ = ["GLOBAL_RANDOM", "is_generator", "note_generator", "question_of_generator", "state_of"]
