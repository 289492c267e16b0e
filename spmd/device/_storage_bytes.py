"""Constructor and byte access of `torch.UntypedStorage` for device 'jax'; torch's C++ would read memory that does not exist.

torch.UntypedStorage(16, device="jax")              # a DataLoader's worker creates one
x.untyped_storage()[0], x.untyped_storage().fill_(0)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from spmd.base._errors import SpmdError, called_at, message
from spmd.patches._table import current, replace


def register() -> None:
    """Patch `torch.UntypedStorage` so that storages of device 'jax' can be created, read and written."""
    replace("torch.UntypedStorage.__new__", new)
    for name, own in (("__getitem__", get), ("__setitem__", put), ("fill_", fill_), ("copy_", copy_), ("_byteswap", byteswap)):
        target = f"torch.UntypedStorage.{name}"
        replace(target, _ours_on_device(current(target), own))


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """A uint8 tensor over the whole storage; writing to it writes to the storage."""
    return torch.empty(0, dtype=torch.uint8, device="jax").set_(storage)


def new(cls: type[torch.UntypedStorage], *args: Any, device: Any = None, **kwargs: Any) -> torch.UntypedStorage:
    """`torch.UntypedStorage(size)`, whose bytes are zero, or `torch.UntypedStorage(bytes)`. torch checks the arguments, on the CPU."""
    if device is None or torch.device(device).type != "jax":
        return _torchs_new(cls, *args, **kwargs) if device is None else _torchs_new(cls, *args, device=device, **kwargs)
    host = _torchs_new(cls, *args, **kwargs)
    if not args or isinstance(args[0], (int, torch.Tensor)):
        return torch.zeros(host.nbytes(), dtype=torch.uint8, device="jax").untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(host).to("jax").untyped_storage()


def get(self: torch.UntypedStorage, index: Any) -> int:
    """Read one byte.

    Raises:
        SpmdError: the index is a slice, which would have to be a storage inside another one.
        IndexError, TypeError: the index is out of range, or is not an int.
    """
    if isinstance(index, slice):
        raise SpmdError(
            message(
                "a storage on device 'jax' cannot be sliced: a part of a storage is not a storage of its own",
                *called_at(),
                fix="slice a tensor: torch.empty(0, dtype=torch.uint8, device='jax').set_(storage)[start:stop]",
            )
        )
    if not isinstance(index, int):
        raise TypeError(f"can't index a torch.UntypedStorage with {type(index).__name__}")
    if not -self.nbytes() <= index < self.nbytes():
        raise IndexError(f"index {index} out of range for storage of size {self.nbytes()}")
    return int(bytes_of(self)[index])


def put(self: torch.UntypedStorage, index: Any, value: Any) -> None:
    """Write the lowest byte of an int to one byte or to a slice of them.

    Raises:
        RuntimeError: index and value are not ints, the index is out of range, or the slice has a step.
    """
    if not isinstance(value, int):
        raise RuntimeError(f"can only set storage content with a int types, but got {type(value).__name__} instead")
    if isinstance(index, slice):
        start, stop, step = index.indices(self.nbytes())
        if step != 1:
            raise RuntimeError(f"Trying to slice with a step of {step}, but only a step of 1 is supported")
        index = slice(start, stop)
    elif not isinstance(index, int):
        raise RuntimeError(f"can't index a torch.UntypedStorage with {type(index).__name__}")
    elif not -self.nbytes() <= index < self.nbytes():
        raise RuntimeError("out of bounds")
    bytes_of(self)[index] = value & 0xFF


def fill_(self: torch.UntypedStorage, value: Any) -> torch.UntypedStorage:
    """Set every byte to the lowest byte of an int."""
    if not isinstance(value, int):
        raise RuntimeError(f"fill_ expects int, but got {type(value).__name__}")
    bytes_of(self).fill_(value & 0xFF)
    return self


def copy_(self: torch.UntypedStorage, source: Any, non_blocking: bool | None = None) -> torch.UntypedStorage:
    """Copy the bytes of a storage of the same size, on any device."""
    if not isinstance(source, torch.UntypedStorage):
        raise TypeError(f"copy_(): argument 'src' (position 1) must be torch.Storage, not {type(source).__name__}")
    if self.nbytes() != source.nbytes():
        raise RuntimeError(f"size does not match, self was {self.nbytes()} bytes but src was {source.nbytes()} bytes")
    theirs = torch.empty(0, dtype=torch.uint8, device=source.device).set_(source)
    torch.empty(0, dtype=torch.uint8, device=self.device).set_(self).copy_(theirs)
    return self


def byteswap(self: torch.UntypedStorage, itemsize: int) -> None:
    """Reverse the bytes of every element of `itemsize` bytes."""
    whole = bytes_of(self)
    whole.copy_(whole.view(-1, itemsize).flip(1).reshape(-1))


def _ours_on_device(torchs_own: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(torchs_own)
    def method(self: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
        is_ours = getattr(self, "spmd_buffer", None) is not None or any(getattr(a, "spmd_buffer", None) is not None for a in args)
        return (ours if is_ours else torchs_own)(self, *args, **kwargs)

    return method


_torchs_new: Any = torch.UntypedStorage.__new__

__all__ = ["bytes_of", "register"]
