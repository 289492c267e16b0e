"""Host copies of values that were uploaded: integer and bool arrays, and single floats.

Image sizes, grids, masks and tokens are such arrays. A traced function can read them (`Recorder.known_value`) without waiting for a
device, because an array never changes after its upload. Values that a program computed are not known, except the flags and counters
that it leaves in its state (`KnownInputs.follow`). A single float may be such a flag (`torch.Tensor([0])`). Several floats are data,
for which no program is specialized.
"""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    from spmd.device._storage import Buffer

_MAX_FOLLOWED = 16  # elements of an integer or bool tensor whose writes the host follows: flags and counters
_MAX_ELEMENTS = 1 << 18  # of an array whose values are kept; larger than a batch of tokens
_sent: dict[int, tuple[weakref.ref[Any], np.ndarray[Any, Any]]] = {}  # by id of the array


def note_sent(array: Any, host: np.ndarray[Any, Any] | None) -> None:
    """Record that the array has the values of `host`, which must not be written to any more."""
    if host is not None and _is_kept(host):
        key = id(array)
        _sent[key] = weakref.ref(array, lambda _: _sent.pop(key, None)), host


def sent(array: Any) -> np.ndarray[Any, Any] | None:
    """The values of an array without its padding; None if the host does not know them."""
    found = _sent.get(id(array))
    return found[1] if found is not None and found[0]() is array else None


def host_values(buffer: Buffer) -> np.ndarray[Any, Any] | None:
    """The same for a buffer, whose value may still be on the host."""
    if buffer.value is not None:
        return sent(buffer.value)
    return None if buffer.host is None else kept(buffer.host)


def kept(host: np.ndarray[Any, Any]) -> np.ndarray[Any, Any] | None:
    """The values themselves if they are of a kind that is kept; else None."""
    return host if _is_kept(host) else None


def may_follow(value: Any) -> bool:
    """Whether an array or buffer may be a flag or counter, whose values the host follows."""
    size = math.prod(value.shape)
    return (value.dtype.kind in "biu" and size <= _MAX_FOLLOWED) or (size == 1 and jnp.issubdtype(value.dtype, jnp.floating))


def window(host: np.ndarray[Any, Any] | None, size: tuple[int, ...], stride: tuple[int, ...], offset: int) -> np.ndarray[Any, Any] | None:
    """The values of a view of a storage whose values are `host`; strides and offset are in elements. None if they are not known."""
    if host is None or not host.flags.c_contiguous:
        return None
    strides = tuple(step * host.itemsize for step in stride)
    return np.lib.stride_tricks.as_strided(host.reshape(-1)[offset:], size, strides, writeable=False)


def _is_kept(host: np.ndarray[Any, Any]) -> bool:
    return (host.dtype.kind in "biu" and host.size <= _MAX_ELEMENTS) or (host.size == 1 and jnp.issubdtype(host.dtype, jnp.floating))


__all__ = ["host_values", "kept", "may_follow", "note_sent", "sent", "window"]
