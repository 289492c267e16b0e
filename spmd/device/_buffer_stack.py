"""Stacks of buffers of the same shape, dtype and layout, whose values stay one array between calls of programs that loop over layers.

Note [Stacks of buffers]
    A program with loops over a model's layers reads the weights of all layers as one array [layers, ...]. Stacking them in every
    call would copy them all. After such a call the new values therefore stay stacked in a buffer of the stack. The layers' buffers
    are pending, like results of deferred operations: reading or writing one of them, or tracing, first unstacks all of them. The
    next call stacks them again if they were unstacked.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from mesh import PartitionSpec, ShardingSpec
from spmd.base._convert import exact_dtypes
from spmd.device._left_values import forget
from spmd.device._storage import Buffer

_queue = attrgetter("queue")
_stacks: weakref.WeakValueDictionary[tuple[int, ...], BufferStack] = weakref.WeakValueDictionary()


class BufferStack:
    """Several buffers whose values are stored as one array; see Note [Stacks of buffers].

    Attributes:
        members: one buffer per layer, all of the same shape, dtype and layout.
        whole: buffer of the stacked array [layers, ...]; its value is valid while the members are pending.
    """

    def __init__(self, members: Sequence[Buffer]) -> None:
        self.members = tuple(members)
        first = self.members[0]
        shape = (len(self.members), *first.shape)
        host = np.broadcast_to(np.zeros((), first.dtype), shape)
        self.whole = Buffer(None, shape, host, None if first.annotation is None else stacked_spec(first.annotation))

    @property
    def is_whole(self) -> bool:
        """Whether `whole` holds the values of all members."""
        return self.whole.value is not None and all(queue is self for queue in map(_queue, self.members))

    def member_sharding(self) -> jax.sharding.Sharding | None:
        """The sharding of each unmarked member, from that of the stack. None if that splits its first dim."""
        found = None if self.whole.value is None else self.whole.value.sharding
        if not isinstance(found, NamedSharding) or found.spec[:1] not in ((), (None,)):
            return None
        return NamedSharding(found.mesh, jax.sharding.PartitionSpec(*found.spec[1:]))

    def gather(self) -> None:
        """Stack the members' values into `whole`, unless they are stacked already."""
        if self.is_whole:
            return
        values = [b.raw() for b in self.members]
        spec = self.whole.annotation
        sharding = None if spec is None else spec.to_jax()
        with exact_dtypes():
            self.whole.value = jax.jit(_stack, out_shardings=sharding)(values)
        self.whole.host = None
        for place, buffer in enumerate(self.members):
            buffer.value = buffer.host = buffer.digest = None
            buffer.reads.clear()
            buffer.queue, buffer.place_in_queue = self, place

    def run(self) -> None:
        """Unstack: give every pending member its own value again."""
        value, spec = self.whole.value, self.members[0].annotation
        self.whole.value = None
        forget(self.whole.left_by)
        sharding = None if spec is None else spec.to_jax()
        with exact_dtypes(), jax.ensure_compile_time_eval():
            parts = jax.jit(_parts, out_shardings=sharding)(value)
        for buffer, part in zip(self.members, parts, strict=True):
            if buffer.queue is self:
                buffer.value, buffer.queue = part, None

    def leave(self, buffer: Buffer) -> None:
        """Unstack because a member got another value, so that the memory of its old value is freed."""
        if self.whole.value is not None:
            self.run()

    def dtype_of(self, buffer: Buffer) -> np.dtype[Any]:
        """The dtype of `buffer`, which all members share."""
        return self.whole.dtype

    def annotate(self, buffer: Buffer, spec: ShardingSpec) -> None:
        """Unstack, and give one member another layout."""
        self.run()
        buffer.place(spec.to_jax())


def stack_of(members: Sequence[Buffer]) -> BufferStack:
    """The stack of these buffers; all programs share it."""
    key = tuple(map(id, members))
    found = _stacks.get(key)
    if found is None:
        found = _stacks[key] = BufferStack(members)
    return found


def take_apart() -> None:
    """Unstack all buffers, before a trace reads them."""
    for stack in list(_stacks.values()):
        if stack.is_whole:
            stack.run()


def stacked_spec(spec: ShardingSpec) -> ShardingSpec:
    """Layout of a stack of tensors whose layout is `spec`: the new first dim is not split."""
    return ShardingSpec(spec.mesh, PartitionSpec(None, *spec.partition_spec))


def _stack(values: list[Any]) -> Any:
    return jnp.stack(values)


def _parts(stack: Any) -> list[Any]:
    return list(stack)


__all__ = ["BufferStack", "stack_of", "stacked_spec", "take_apart"]
