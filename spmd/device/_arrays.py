"""jax arrays on their way: from the host to the devices, between devices, and back; and the padding that makes shards equal.

Note [Uneven dims]. jax lays an array out in equal shards only. A dim that its axes do not divide is stored padded at its end
(`stored_shape`), and only in storage: whoever reads the value gets it without the padding, and whoever writes it pads it again.
In a program the value between the two is constrained to the same axes, which XLA's partitioner splits unevenly as it is stored:
neither the cut nor the padding moves anything between devices.

It knows no tensor and no storage.
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
    """Shape in which an array of `shape` is stored: each dim a multiple of the number of its pieces."""
    if not isinstance(sharding, NamedSharding):
        return shape
    padded = list(shape)
    for dim, entry in enumerate(sharding.spec):
        axes = () if entry is None or entry is PartitionSpec.UNCONSTRAINED else entry if isinstance(entry, tuple) else (entry,)
        pieces = math.prod(sharding.mesh.shape[axis] for axis in axes)
        padded[dim] = -(-shape[dim] // pieces) * pieces
    return tuple(padded)


def padded(value: Any, sharding: Any) -> Any:
    """`value` as it is stored under `sharding`: zeros added at the ends of its uneven dims."""
    stored = stored_shape(value.shape, sharding)
    if is_tracing():
        return lax.with_sharding_constraint(_pad(value, stored), sharding)
    if not is_tracer(value) and value.sharding.device_set != sharding.device_set:
        value = moved(value, NamedSharding(sharding.mesh, PartitionSpec()))
    return _padder(stored, sharding)(value)


def cropped(value: Any, shape: Shape, sharding: Any) -> Any:
    """A stored array without its padding; `sharding`: how its traced value stays split."""
    whole = lax.slice(value, (0,) * len(shape), shape)
    return lax.with_sharding_constraint(whole, sharding) if is_tracing() and sharding is not None else whole


def laid_out(stored: jax.Array, shape: Shape, sharding: Any) -> jax.Array:
    """The array of `shape` that is stored as `stored`, stored under another sharding: between devices directly."""
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
    """Send a host array to the devices, each shard to its own device only; counts the bytes that each device got.

    One value repeated without memory (a read-only array without strides) is not sent: each device fills its own shard.
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
    """Of values that every process of a job holds whole: a checksum for the job to compare. None alone."""
    if sharding is None or sharding.is_fully_addressable or _join.job() is None:
        return None
    held = host if any(host.strides) else host.reshape(-1)[:1]  # one value repeated has no memory to go through
    return _agreement.digest(np.ascontiguousarray(held).reshape(-1).view(np.uint8))


def copied(value: jax.Array) -> jax.Array:
    """An array of its own with the same values; the host knows of it what it knows of the other."""
    copy = jnp.copy(value)
    note_sent(copy, sent(value))
    return copy


def moved(value: Any, sharding: Any) -> jax.Array:
    """The array laid out by `sharding`, which divides it evenly: between devices directly.

    In a job of several processes, what lies on this process's devices alone is taken as equal in all of them (as eager
    results are that the same Python made everywhere), and each fills its own devices.
    """
    with exact_dtypes(), jax.ensure_compile_time_eval():
        if sharding.is_fully_addressable or not value.is_fully_addressable:
            array = jax.device_put(value, sharding)
            note_sent(array, sent(value))
            return array
        host = np.asarray(value)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def is_readable(value: Any) -> bool:
    """False for a tracer, and for an array of which parts lie on other processes' devices only; None is still on the host."""
    return value is None or (not is_tracer(value) and (value.is_fully_addressable or value.is_fully_replicated))


def fetched(value: jax.Array) -> np.ndarray[Any, Any]:
    """The array on the host.

    Raises:
        CheckFailed: a compiled call before this made a check that failed.
        SpmdError: parts of it lie on other processes' devices only.
    """
    if not is_readable(value):
        dims = ", ".join(["None"] * value.ndim)
        raise SpmdError(
            message(
                f"a tensor of shape {value.shape} cannot be read here: parts of it lie on other hosts",
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
