"""Moves jax arrays from the host to the devices, between devices, and back, and pads them to equal shards.

Note [Uneven dims]. jax supports only equal shards. A dim that its axes do not divide is stored padded at its end (`stored_shape`).
The padding exists only in storage: every read crops it, and every write pads again. In a program the cropped value is constrained
to the same axes, and XLA's partitioner splits it unevenly, the same way as it is stored. Neither cropping nor padding moves
data between devices.

This module does not depend on tensors or storages.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from mesh.job import _agreement, _join
from spmd.base import _counters
from spmd.base._convert import exact_dtypes
from spmd.base._errors import SpmdError, message
from spmd.base._jax import is_tracer, is_tracing
from spmd.device._checks import raise_failed
from spmd.device._trace_lock import memory_is_gone, was_taken
from spmd.device._uploaded import note_sent, sent

Shape = tuple[int, ...]
Sharding = jax.sharding.Sharding | None


def stored_shape(shape: Shape, sharding: Sharding) -> Shape:
    """Shape in which an array of `shape` is stored: each dim is rounded up to a multiple of its number of shards."""
    if not isinstance(sharding, NamedSharding):
        return shape
    padded = list(shape)
    for dim, entry in enumerate(sharding.spec):
        axes = () if entry is None or entry is PartitionSpec.UNCONSTRAINED else entry if isinstance(entry, tuple) else (entry,)
        pieces = math.prod(sharding.mesh.shape[axis] for axis in axes)
        padded[dim] = -(-shape[dim] // pieces) * pieces
    return tuple(padded)


def padded(value: Any, sharding: Any) -> Any:
    """`value` as it is stored under `sharding`: padded with zeros at the ends of its uneven dims."""
    stored = stored_shape(value.shape, sharding)
    if is_tracing():
        return lax.with_sharding_constraint(_pad(value, stored), sharding)
    if not is_tracer(value) and value.sharding.device_set != sharding.device_set:
        value = moved(value, NamedSharding(sharding.mesh, PartitionSpec()))
    return _padder(stored, sharding)(value)


def cropped(value: Any, shape: Shape, sharding: Any) -> Any:
    """A stored array without its padding; a traced value is constrained to `sharding`."""
    whole = lax.slice(value, (0,) * len(shape), shape)
    return lax.with_sharding_constraint(whole, sharding) if is_tracing() and sharding is not None else whole


def laid_out(stored: jax.Array, shape: Shape, sharding: Any) -> jax.Array:
    """`stored`, which holds an array of `shape`, stored under another sharding; data moves directly between devices."""
    wanted = stored_shape(shape, sharding)
    if stored.shape == wanted and (stored.shape == shape or stored.sharding == sharding):
        return stored if stored.sharding == sharding else moved(stored, sharding)
    with exact_dtypes(), jax.ensure_compile_time_eval():
        value = stored if stored.shape == shape else cropped(stored, shape, None)
        return moved(value, sharding) if wanted == shape else padded(value, sharding)


def _pad(value: Any, stored: Shape) -> Any:
    return lax.pad(value, jnp.zeros((), value.dtype), [(0, n - m, 0) for n, m in zip(stored, value.shape, strict=True)])


@functools.cache
def _padder(stored: Shape, sharding: Any) -> Any:
    return jax.jit(lambda value: _pad(value, stored), out_shardings=sharding)


def upload(host: np.ndarray[Any, Any], sharding: Sharding) -> jax.Array:
    """Send a host array to the devices, each shard to its own device only, and count the bytes that each device receives.

    A read-only array whose strides are all zero repeats one value and is not sent: each device fills its own shard.
    """
    with exact_dtypes(), jax.ensure_compile_time_eval():
        stored = stored_shape(host.shape, sharding)
        if host.size > 1 and not host.flags.writeable and not any(host.strides):
            return _filler(stored, sharding)(host.flat[0])
        if sharding is None:
            array = jax.device_put(host)
        else:
            array = jax.make_array_from_callback(stored, sharding, lambda index: _piece(host, index or (), stored))
    note_sent(array, host)
    shard = math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
    _counters.count("upload_bytes", shard * len(array.sharding.addressable_devices))
    _counters.count("uploads")
    return array


def _piece(host: np.ndarray[Any, Any], index: tuple[slice, ...], stored: Shape) -> np.ndarray[Any, Any]:
    piece = host[index]
    if stored == host.shape:
        return piece
    size = tuple(len(range(*s.indices(n))) for s, n in zip(index, stored, strict=True))
    if piece.shape == size:
        return piece
    full = np.zeros(size, host.dtype)
    full[tuple(slice(n) for n in piece.shape)] = piece
    return full


@functools.cache
def _filler(shape: Shape, sharding: Sharding) -> Any:
    return jax.jit(lambda value: jnp.broadcast_to(value, shape), out_shardings=sharding)


def digest_of(host: np.ndarray[Any, Any], sharding: Sharding) -> int | None:
    """Checksum of values that every process of a job should hold in full, so that the job can compare them.

    None if the sharding is local to this process or there is no job.
    """
    if sharding is None or sharding.is_fully_addressable or _join.job() is None:
        return None
    elements = host if any(host.strides) else host.reshape(-1)[:1]  # one repeated value: its digest needs one element
    return _agreement.digest(np.ascontiguousarray(elements).reshape(-1).view(np.uint8))


def copied(value: jax.Array) -> jax.Array:
    """A copy of the array. The values that the host knows of the original are recorded for the copy too."""
    copy = jnp.copy(value)
    note_sent(copy, sent(value))
    return copy


def moved(value: Any, sharding: Any) -> jax.Array:
    """The array resharded to `sharding`, which must divide it evenly; data moves directly between devices.

    In a job of several processes, an array on this process's devices alone is assumed to be equal in all processes, as eager
    results of the same Python code are. Each process then fills its own devices.
    """
    with exact_dtypes(), jax.ensure_compile_time_eval():
        if sharding.is_fully_addressable or not value.is_fully_addressable:
            array = jax.device_put(value, sharding)
            note_sent(array, sent(value))
            return array
        host = np.asarray(value)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def is_readable(value: Any) -> bool:
    """False for a tracer, and for an array with parts only on other processes' devices. None is readable: its value is on the host."""
    return value is None or (not is_tracer(value) and (value.is_fully_addressable or value.is_fully_replicated))


def fetched(value: jax.Array) -> np.ndarray[Any, Any]:
    """Copy the array to the host.

    Raises:
        CheckFailed: a check of an earlier compiled call failed.
        SpmdError: parts of the array are only on other processes' devices.
    """
    if not is_readable(value):
        dims = ", ".join(["None"] * value.ndim)
        raise SpmdError(
            message(
                f"a tensor of shape {value.shape} cannot be read in this process: other hosts hold parts of it",
                f"layout: {getattr(value.sharding, 'spec', value.sharding)}; this host has {len(value.addressable_shards)} of its shards",
                fix=f"read .local_shards, or gather it first, in all processes: spmd.mark_sharding(t.clone(), mesh, ({dims}))",
            )
        )
    raise_failed()
    try:
        return np.asarray(value)
    except RuntimeError as error:
        if was_taken(error):
            raise memory_is_gone() from error
        raise


__all__ = ["copied", "cropped", "digest_of", "fetched", "is_readable", "laid_out", "moved", "padded", "stored_shape", "upload"]
