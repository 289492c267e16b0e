"""`torch.Generator(device="jax")`: a separate random stream that random operators take as `generator=`.

Its n-th draw after `manual_seed(s)` equals the device stream's n-th draw after `torch.manual_seed(s)`. The seed and the number of
draws are a device tensor. A compiled function that draws from a generator therefore reads and updates it like any other state.

    rng = torch.Generator(device="jax").manual_seed(0)
    x = torch.randn(4, device="jax", generator=rng)

C++ cannot create a generator for a device written in Python. `DeviceGenerator` is a subclass whose C++ part is a CPU generator.
Operators receive a new Python wrapper around the C++ part, so the address of that part identifies the generator. A CPU operator
cannot be prevented from accepting it; it draws from the CPU generator, which `manual_seed` seeds too.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import jax
import torch

from spmd.base._convert import exact_dtypes
from spmd.base._errors import SpmdError, TraceError, called_at, message
from spmd.device import _random_stream
from spmd.device._arrays import fetched
from spmd.device._host_answers import host_answer
from spmd.device._host_copies import is_host_copy
from spmd.device._only_device import require_only_device
from spmd.device._storage import load, recording, store, wrap_host
from spmd.device._uploaded import note_sent


class DeviceGenerator(torch.Generator):
    """A generator on device 'jax', as returned by `torch.Generator(device="jax")`."""

    _words: torch.Tensor

    def __new__(cls) -> DeviceGenerator:
        made = super().__new__(cls)
        _by_address[_address(made)] = made
        return made

    def __init__(self) -> None:
        self._words = wrap_host(_random_stream.RandomStream(super().initial_seed()).words())  # torch's default seed, always the same

    @property
    def device(self) -> torch.device:  # pyright: ignore[reportIncompatibleVariableOverride]
        return torch.device("jax", 0)

    def manual_seed(self, seed: int) -> DeviceGenerator:
        """Restart the stream from `seed` (64 bits)."""
        self._set(_random_stream.RandomStream(seed))
        return self

    def seed(self) -> int:
        """Restart the stream from a seed drawn by the operating system, and return that seed."""
        self.manual_seed(torch.Generator().seed())
        return self.initial_seed()

    def initial_seed(self) -> int:
        words = load(self._words)
        with exact_dtypes():
            high, low = map(int, fetched(words)[:2] if recording.get() is None else _known_seed(words[:2]))
        return high << 32 | low

    def get_state(self) -> torch.Tensor:
        """Seed and number of draws, as a CPU byte tensor of 16 elements like that of `torch.jax.get_rng_state`."""
        return self._words.cpu().view(torch.uint8)

    def set_state(self, _new_state: torch.Tensor) -> DeviceGenerator:
        """Continue from a state returned by `get_state`.

        Raises:
            SpmdError: the tensor is not such a state.
        """
        _random_stream.require_state(_new_state)
        if is_host_copy(_new_state):
            self._words.copy_(_new_state.view(torch.uint32))
            return self
        stream = _random_stream.RandomStream(0)
        stream.set_state(_new_state)
        self._set(stream)
        return self

    def clone_state(self) -> DeviceGenerator:
        """A new generator with the current state of this one."""
        return DeviceGenerator().set_state(self.get_state())

    def __reduce__(self) -> Any:
        return torch.Generator, (self.device,), self.get_state()

    def __setstate__(self, state: Any) -> None:
        self.set_state(state)

    def __repr__(self) -> str:
        return f"torch.Generator(device='{self.device}')"

    def _set(self, stream: _random_stream.RandomStream) -> None:
        super().manual_seed(stream.seed)
        with exact_dtypes():
            words = jax.numpy.asarray(stream.words())
            note_sent(words, stream.words())
            store(self._words, words)

    def _next_key(self) -> Any:
        with exact_dtypes():
            key, words = _drawn(load(self._words))
            store(self._words, words)
        return key


def made(cls: type, /, *args: Any, **kwargs: Any) -> Any:
    """`__call__` of `torch.Generator`'s metaclass: a `DeviceGenerator` for device 'jax', otherwise torch's own generator."""
    device = kwargs.get("device", args[0] if args else None)
    if cls is torch.Generator and device is not None and torch.device(device).type == "jax":
        require_only_device(torch.device(device).index)
        return DeviceGenerator()
    return type.__call__(cls, *args, **kwargs)


def next_key(generator: Any = None) -> Any:
    """Key data (uint32[2]) of the next draw from `generator`, or from the device's default stream if it is None. Advances the stream.

    Raises:
        SpmdError: the generator belongs to another device.
    """
    if generator is None:
        return _random_stream.next_key()
    own = _by_address.get(_address(generator))
    if own is None:
        raise SpmdError(
            message(
                f"device 'jax' cannot draw from a generator on {generator.device}",
                *called_at(),
                fix=f"make it with torch.Generator(device='jax').manual_seed({generator.initial_seed()})",
            )
        )
    return own._next_key()


def _known_seed(seed: Any) -> Any:
    """The seed of a traced state. Each seed has a program of its own."""
    if (known := host_answer(seed)) is None:
        raise TraceError(
            message(
                "the seed of a generator of device 'jax' was read",
                *called_at(),
                "it is known only when the compiled program runs",
                fix="seed = generator.initial_seed(), before the call",
            )
        )
    return known


def _address(generator: torch.Generator) -> int:
    """Address of the C++ part, which all Python wrappers of a generator share."""
    return generator._cdata  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType]


@jax.jit
def _drawn(words: Any) -> tuple[Any, Any]:
    return _random_stream.key_of_words(words), _random_stream.advanced(words, 1)


_by_address: WeakValueDictionary[int, DeviceGenerator] = WeakValueDictionary()

__all__ = ["DeviceGenerator", "made", "next_key"]
