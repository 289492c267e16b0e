"""Equal buffers whose values live as one array between the calls of programs that compute on all of them at once.

Note [Stacks of buffers]
    A program with loops over a model's layers reads the weights of all layers as one array [layers, ...]. To stack them in every
    call would copy them all. So after such a call the new values stay stacked, in a buffer of the stack's own, and the layers' buffers
    wait for it, as for operations that run later: whoever reads one, writes to one or traces takes the stack apart first. The next
    call stacks again, if somebody did.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mesh import PartitionSpec, ShardingSpec
from spmd.base._convert import exact_dtypes
from spmd.device._left_values import forget
from spmd.device._storage import Buffer

_queue = attrgetter("queue")
_stacks: weakref.WeakValueDictionary[tuple[int, ...], BufferStack] = weakref.WeakValueDictionary()


class BufferStack:
    """The values of some buffers as one; see Note [Stacks of buffers].

    Attributes:
        members: the buffers, [layers], of one shape, dtype and layout.
        whole: the buffer of the array, [layers, ...]; its value counts while the members wait.
    """

    def __init__(self, members: Sequence[Buffer]) -> None:
        self.members = tuple(members)
        first = self.members[0]
        shape = (len(self.members), *first.shape)
        host = np.broadcast_to(np.zeros((), first.dtype), shape)
        self.whole = Buffer(None, shape, host, None if first.annotation is None else stacked_spec(first.annotation))

    @property
    def is_whole(self) -> bool:
        """Whether the values of all members lie in `whole`."""
        return self.whole.value is not None and all(queue is self for queue in map(_queue, self.members))

    def gather(self) -> None:
        """Stack the members' values, unless they are."""
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
        """Every member that waits has its value again."""
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
        """A member is given another value: from now on each has its own, so that what is replaced is gone."""
        if self.whole.value is not None:
            self.run()

    def dtype_of(self, buffer: Buffer) -> np.dtype[Any]:
        """The members' dtype."""
        return self.whole.dtype

    def annotate(self, buffer: Buffer, spec: ShardingSpec) -> None:
        """Another layout of one member: it leaves the stack."""
        self.run()
        buffer.place(spec.to_jax())


def stack_of(members: Sequence[Buffer]) -> BufferStack:
    """The stack of these buffers, which is one for all programs."""
    key = tuple(map(id, members))
    found = _stacks.get(key)
    if found is None:
        found = _stacks[key] = BufferStack(members)
    return found


def take_apart() -> None:
    """Give all buffers values of their own, before a trace looks at them."""
    for stack in list(_stacks.values()):
        if stack.is_whole:
            stack.run()


def stacked_spec(spec: ShardingSpec) -> ShardingSpec:
    """Of a stack of tensors that lie by `spec`: the new dim is not split."""
    return ShardingSpec(spec.mesh, PartitionSpec(None, *spec.partition_spec))


def _stack(values: list[Any]) -> Any:
    return jnp.stack(values)


def _parts(stack: Any) -> list[Any]:
    return list(stack)


__all__ = ["BufferStack", "stack_of", "stacked_spec", "take_apart"]
