"""Pickling, loading and deep copies of device tensors. Files contain plain CPU tensors, which torch reads without this package.

    torch.save(model.state_dict(), path)                 # gathers each tensor on the host
    torch.load(path)                                     # CPU tensors, in any process
    torch.load(path, map_location="jax")                 # device tensors, uploaded when they are used or marked

Tensors that share a storage also share it in a file and in a deep copy. A device tensor of any class is saved as a `torch.Tensor`
or an `nn.Parameter`, because the program that reads a file chooses the mesh.
"""

from __future__ import annotations

import copy
import copyreg
import sys
import weakref
from typing import Any

import jax.numpy as jnp
import torch

from spmd.base._convert import exact_dtypes
from spmd.base._errors import SpmdError, message
from spmd.base._torch import get_tensor_metadata, set_tensor_metadata
from spmd.device._arrays import copied
from spmd.device._copy import to_host
from spmd.device._layout import plain_layouts
from spmd.device._storage import Buffer, buffer_of, recording, wrap, wrap_host, wrap_stored
from spmd.device._trace_lock import retried
from spmd.patches._table import replace

_PRIORITY = 9  # before torch's packages, which start at 10; torch's package for PrivateUse1 needs storages with memory
# Note [One storage, one copy in the file]
# torch.save recognises shared storages by identity, and a pickler reduces one tensor at a time. A buffer's host copy is therefore
# cached as long as the pickler keeps it alive. It is reused only while the buffer still has the value that was copied.
_host_storages: weakref.WeakKeyDictionary[Buffer, tuple[weakref.ref[Any], weakref.ref[Any]]] = weakref.WeakKeyDictionary()


def register() -> None:
    """Register device tensors with pickle, `torch.save`, `torch.load` and `copy.deepcopy`."""
    copyreg.pickle(torch.Tensor, reduce_tensor)  # pyright: ignore[reportArgumentType]
    torch.serialization.register_package(_PRIORITY, _refuse_storage, _storage_on_device)
    replace("torch.UntypedStorage.clone", clone_storage)


def reduce_tensor(tensor: torch.Tensor) -> Any:
    """pickle's reduction of a tensor. A tensor on device 'jax' is reduced as its host copy, others by torch."""
    if tensor.device.type != "jax" or sys._getframe(1).f_code is copy.copy.__code__:  # copy.copy uses the same table
        return tensor.__reduce_ex__(2)
    return host_copy(tensor).__reduce_ex__(2)


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor with the values, strides, flags and attributes of the device tensor, over the one host copy of its storage."""
    if tensor.device.type != "jax":  # a marked tensor that is not on the device yet
        host = tensor.detach().as_subclass(torch.Tensor)
        vars(host).update(_kept_attributes(tensor))
        return host.requires_grad_(tensor.requires_grad)
    buffer = buffer_of(tensor)
    host = torch.empty(0, dtype=tensor.dtype)
    host.set_(retried(_host_storage)(buffer), tensor.storage_offset(), tensor.shape, tensor.stride())
    set_tensor_metadata(host, get_tensor_metadata(tensor))  # pending conjugation and negation
    vars(host).update(_kept_attributes(tensor) | plain_layouts(tensor))
    return host.requires_grad_(tensor.requires_grad)


def _kept_attributes(tensor: torch.Tensor) -> dict[str, Any]:
    """The attributes of a tensor but for those of this package that mean something in this process alone, such as a DeviceMesh."""
    return {name: value for name, value in vars(tensor).items() if not name.startswith("_spmd_")}


def clone_storage(self: torch.UntypedStorage) -> torch.UntypedStorage:
    """`storage.clone()`, which `copy.deepcopy` calls. It copies value and annotation; a dropped value stays dropped."""
    return _cloned(self) if self.device.type == "jax" else _torchs_clone(self)


@retried
def _cloned(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    buffer: Buffer = storage.spmd_buffer  # pyright: ignore[reportAttributeAccessIssue]
    _settle(buffer)
    with exact_dtypes():
        if buffer.value is not None and buffer.annotation is not None:
            new = wrap_stored(copied(buffer.raw()), buffer.shape, buffer.annotation)
        elif buffer.value is not None:
            new = wrap(copied(buffer.get()))
        elif buffer.host is not None:
            new = wrap_host(buffer.host.copy() if buffer.host.flags.writeable else buffer.host)
        else:
            new = wrap(jnp.zeros(buffer.shape, buffer.dropped_dtype))
            buffer_of(new).drop(buffer.dropped or "the tensor has no value")
    buffer_of(new).annotation, buffer_of(new).state_annotation = buffer.annotation, buffer.state_annotation
    return new.untyped_storage()


_torchs_clone = torch.UntypedStorage.clone


def _host_storage(buffer: Buffer) -> torch.UntypedStorage:
    """A CPU storage with the buffer's value; the same one as long as it is alive. See Note [One storage, one copy in the file]."""
    _settle(buffer)
    held: Any = buffer.host if buffer.value is None else buffer.value
    storage_of, value_of = _host_storages.get(buffer, (_nothing, _nothing))
    storage = storage_of()
    if storage is None or held is None or value_of() is not held:
        root = wrap_host(held) if buffer.value is None and held is not None else wrap(buffer.get())
        storage = to_host(root).untyped_storage()
        _host_storages[buffer] = weakref.ref(storage), weakref.ref(held)
    return storage


def _settle(buffer: Buffer) -> None:
    """Run the operations that the buffer waits for. In a trace, also upload a value that is still on the host.

    A trace must not keep host values as constants, because they may have changed before another call.
    """
    buffer.settle()
    if recording.get() is not None and buffer.value is None and buffer.host is not None:
        buffer.raw()


def _nothing() -> None:
    return None


def _refuse_storage(storage: Any) -> None:
    """Hook of torch.save that returns a storage's location. It raises for a bare device storage or one in an unregistered subclass."""
    if storage.device.type == "jax":
        raise SpmdError(
            message(
                "a storage on device 'jax', or a tensor subclass over one, cannot be saved",
                "the subclass controls its pickling, and the storage has no bytes",
                fix="save tensor.cpu(), or tensor.as_subclass(torch.Tensor)",
            )
        )


def _storage_on_device(storage: Any, location: str) -> Any:
    """Hook of `torch.load(..., map_location="jax")`: a device storage for the bytes of a file, which are still on the host."""
    if location.partition(":")[0] != "jax":
        return None
    octets = torch.empty(0, dtype=torch.uint8).set_(storage)
    return wrap_host(octets.numpy().copy()).untyped_storage()
