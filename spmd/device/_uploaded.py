"""What the host still knows of arrays on the devices: the values of integers and bools that it sent, and of single floats.

Sizes of images, grids, masks and tokens are such arrays. A traced function may have them (`Recorder.known_value`) without a wait for
a device: an array never changes, so it holds what was sent. What a program computed is not known, but for the
flags and counters that it leaves (`KnownInputs.follow`). A float alone may be such a flag (`torch.Tensor([0])`); several are data: no
program is made for them.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    from spmd.device._storage import Buffer

_MOST = 1 << 18  # elements of an array that is remembered: more than a batch of tokens has
_sent: dict[int, tuple[weakref.ref[Any], np.ndarray[Any, Any]]] = {}  # by id of the array


def note_sent(array: Any, host: np.ndarray[Any, Any] | None) -> None:
    """The array holds `host`, which nobody writes to any more."""
    if host is not None and _is_kept(host):
        key = id(array)
        _sent[key] = weakref.ref(array, lambda _: _sent.pop(key, None)), host


def sent(array: Any) -> np.ndarray[Any, Any] | None:
    """The values that an array holds, without its padding; None if the host does not know them."""
    found = _sent.get(id(array))
    return found[1] if found is not None and found[0]() is array else None


def host_values(buffer: Buffer) -> np.ndarray[Any, Any] | None:
    """The same of a buffer, whose value may still be on the host."""
    if buffer.value is not None:
        return sent(buffer.value)
    return buffer.host if buffer.host is not None and _is_kept(buffer.host) else None


def window(host: np.ndarray[Any, Any] | None, size: tuple[int, ...], stride: tuple[int, ...], offset: int) -> np.ndarray[Any, Any] | None:
    """The values that a view shows of what a storage holds (sizes, strides and offset in elements)."""
    if host is None or not host.flags.c_contiguous:
        return None
    strides = tuple(step * host.itemsize for step in stride)
    return np.lib.stride_tricks.as_strided(host.reshape(-1)[offset:], size, strides, writeable=False)


def _is_kept(host: np.ndarray[Any, Any]) -> bool:
    return (host.dtype.kind in "biu" and host.size <= _MOST) or (host.size == 1 and jnp.issubdtype(host.dtype, jnp.floating))


__all__ = ["host_values", "note_sent", "sent", "window"]
