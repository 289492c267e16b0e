"""The device's random stream. Every key is derived from a seed and a number of draws, which are both on the host.

The n-th draw after `torch.manual_seed(s)` uses the key fold_in(s, n), independent of the mesh and the number of devices. The seed
and the number of draws at the start of a traced program are inputs of the program, so one executable serves every call. Each call
advances the number by the draws of the program.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import torch

from mesh.job import _join
from spmd.base._errors import SpmdError, TraceError, called_at, message
from spmd.base._jax import is_tracing
from spmd.device._storage import recording

_WORDS = 4  # (seed high, seed low, count high, count low), 32 bits each


class RandomStream:
    """A seed and the number of draws since it was set.

    Attributes:
        seed: 64-bit unsigned integer.
        draws: number of keys drawn since the seed was set.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed % 2**64
        self.draws = 0

    def words(self) -> np.ndarray[Any, Any]:
        """The state as uint32[4]: seed and draws, high word first."""
        return np.array([self.seed >> 32, self.seed & 0xFFFFFFFF, self.draws >> 32, self.draws & 0xFFFFFFFF], np.uint32)

    def get_state(self) -> torch.Tensor:
        """The state as a CPU byte tensor of 16 elements, in the style of `torch.get_rng_state`."""
        return torch.from_numpy(self.words().view(np.uint8).copy())

    def set_state(self, state: torch.Tensor) -> None:
        """Restore a state from `get_state`.

        Raises:
            SpmdError: the tensor is not such a state.
        """
        require_state(state)
        self.set_words(state.cpu().numpy().view(np.uint32))

    def set_words(self, words: np.ndarray[Any, Any]) -> None:
        """Restore a state from `words`."""
        high_seed, low_seed, high, low = map(int, words)
        self.seed, self.draws = high_seed << 32 | low_seed, high << 32 | low


def require_state(state: torch.Tensor) -> None:
    """Raise SpmdError if a tensor is not a random state of the device."""
    if state.dtype != torch.uint8 or state.numel() != 4 * _WORDS:
        raise SpmdError(
            message(
                "this is not a random state of device 'jax'",
                f"expected 16 bytes (uint8), got {state.numel()} elements of {state.dtype}",
                fix="pass the result of torch.jax.get_rng_state()",
            )
        )


default_stream = RandomStream(torch.initial_seed())


def share_seed() -> None:
    """Use process 0's seed in all processes of a job. PyTorch seeds each process differently until `torch.manual_seed`."""
    torch.manual_seed(int(_join.shared("torch seed", str(torch.initial_seed()))))


def next_key() -> Any:
    """Key data (uint32[2]) of the stream's next draw. Advances the stream.

    Raises:
        TraceError: called in a function that JAX traces outside `spmd.compile`.
    """
    recorder = recording.get()
    if recorder is None:
        if is_tracing():
            raise TraceError(
                message(
                    "random numbers are drawn in a function that JAX traces, so every call would use the same numbers",
                    *called_at(),
                    fix="fn, params, buffers = spmd.functionalize(module_or_function), whose key is an argument",
                )
            )
        words: Any = default_stream.words()
        key = key_of_words(words)
    else:
        words, start = recorder.random_state()
        key = _key(words[:2], words[2:], default_stream.draws - start)
    default_stream.draws += 1
    return key


def advanced(words: Any, draws: int) -> Any:
    """The state (uint32[4]) after `draws` more draws, computed on the device."""
    low = words[3] + np.uint32(draws)
    high = words[2] + (low < words[3]).astype(np.uint32)
    return words.at[2].set(high).at[3].set(low)


def _key(seed: Any, draws: Any, ahead: int) -> Any:
    """Key data for the draw number `draws + ahead`, folded in as 64 bits.

    Args:
        seed: uint32[2], high word first.
        draws: uint32[2], high word first.
        ahead: number of draws to add.
    """
    low = draws[1] + np.uint32(ahead % 2**32)
    high = draws[0] + (low < draws[1]).astype(np.uint32)
    key = jax.random.fold_in(jax.random.fold_in(typed_key(seed), high), low)
    return jax.random.key_data(key)


def typed_key(data: Any) -> Any:
    """The key of `jax.random` for key data (uint32[2]): one of threefry, also where `jax_default_prng_impl` names another."""
    return jax.random.wrap_key_data(data, impl="threefry2x32")


@jax.jit
def key_of_words(words: Any) -> Any:
    """Key data (uint32[2]) of the next draw after a state (uint32[4])."""
    return _key(words[:2], words[2:], 0)
