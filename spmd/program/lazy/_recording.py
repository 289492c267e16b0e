"""A recording: the operations since the last step boundary. None of them has run; their results are pending tensors.

Note [Recordings]
An operation on device tensors is not run but described by a key: the kernel, the arguments that are not tensors and, for each tensor,
the index of its buffer in the recording and its view of that buffer. If an operation with the same key followed at this point before, its
result is known: pending tensors of known shapes on new buffers. Otherwise the kernel runs on shapes alone, once per key.
A step boundary or the read of a value runs all pending operations as one program. A program that was compiled for the same path through
the tree of operations (`_node`) is used again if it returns all buffers that are still alive.
For a buffer from before the recording, the program takes the array that it had at its first use. Arrays are immutable: a write
replaces the array of the buffer.
A Python number among the arguments is a constant of the first program. If it changes, it is an input of the next program. Numbers of
in-place operations, which are mostly optimizer updates, are inputs from the start.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mesh import ShardingSpec
from spmd.base._convert import to_torch_dtype
from spmd.base._errors import user_line
from spmd.device._deferred import Deferrable
from spmd.device._random_stream import default_stream
from spmd.device._storage import Buffer
from spmd.program.lazy._described import External, KeyBuilder, NotDeferrable, Ref, external, on_device, template
from spmd.program.lazy._effect import Effect, Root
from spmd.program.lazy._node import Node
from spmd.program.lazy._replay import Argument, New, tensor_over, window

if TYPE_CHECKING:
    from spmd.program.lazy._session import Lazy


class Input:
    """The array or host value that a buffer from before the recording had at its first use."""

    __slots__ = ("host", "place", "value")

    def __init__(self, place: int, buffer: Buffer) -> None:
        self.place, self.value, self.host = place, buffer.value, buffer.host


class Recording:
    """A sequence of pending operations.

    Attributes:
        node: the last operation, in the tree of all recorded operations.
        buffers: every buffer that the operations use. The index of a buffer is its place.
        roots: the description of each buffer.
        inputs: the values of buffers from before the recording.
        numbers: the Python numbers of the operations, in order.
        layouts: shardings that were given to buffers during the recording, by place.
        words: the random state at the first draw, and at each draw after the user set the state.
        draws: total number of random keys drawn.
    """

    def __init__(self, session: Lazy) -> None:
        self.session = session
        self.node = session.root
        self.buffers: list[weakref.ref[Buffer]] = []
        self.roots: list[External | Root] = []
        self.inputs: list[Input] = []
        self.numbers: list[int | float] = []
        self.layouts: dict[int, ShardingSpec] = {}
        self.words: list[np.ndarray[Any, Any]] = []
        self.draws = 0
        self._stream: tuple[int, int] | None = None  # seed and count where the last draw left them
        self._new: list[tuple[Buffer, External]] = []

    def call(self, operation: Deferrable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record an operation.

        Returns:
            Its result, whose tensors are pending.

        Raises:
            NotDeferrable: the operation must run now.
        """
        try:
            described = self._key_builder(operation, args, kwargs)
            if described.has_host:
                self._forget_new()
                args, kwargs = on_device(operation, args, kwargs)
                described = self._key_builder(operation, args, kwargs)
            if operation.check is not None:
                operation.check(args, kwargs)
            if self._stream is not None and self._stream != (default_stream.seed, default_stream.draws):
                described.key.append("another random state")
            key = tuple(described.key)
            child = self.node.children.get(key)
            if child is None and key not in self.node.children:
                child = self._new_node(operation, key, args, kwargs, described.numbers)
            if child is None:
                raise NotDeferrable
        except BaseException:
            self._forget_new()
            raise
        effect = child.effect
        if effect.draws:
            self._note_draws(effect.draws)
        self._add_new()
        if described.numbers != child.numbers:
            child.has_varied = True
        self.numbers.extend(described.numbers)
        self.node.latest = child
        self.node = child
        return self._result(effect, args, kwargs)

    def _key_builder(self, operation: Deferrable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> KeyBuilder:
        described = KeyBuilder(operation, self._place_of)
        add = described.add
        for i, arg in enumerate(args):
            add(i, arg)
        for name, arg in kwargs.items():
            described.key.append(name)
            add(name, arg)
        if self._new:
            described.key.extend((b.place_in_queue, found) for b, found in self._new)
        return described

    def _place_of(self, buffer: Buffer) -> int:
        """The index of a buffer in the recording. A buffer from before the recording is added."""
        if buffer.queue is not self:
            if buffer.is_waiting:  # pending in another recording: `raw` runs it
                buffer.raw()
            buffer.place_in_queue = len(self.buffers) + len(self._new)
            buffer.queue = self
            self._new.append((buffer, external(buffer)))
        return buffer.place_in_queue

    def _forget_new(self) -> None:
        for buffer, _ in self._new:
            buffer.queue = None
        self._new.clear()

    def _add_new(self) -> None:
        for buffer, found in self._new:
            self.buffers.append(weakref.ref(buffer))
            self.roots.append(found)
            if found.fill is None:
                self.inputs.append(Input(buffer.place_in_queue, buffer))
        self._new.clear()

    def _new_node(self, operation: Deferrable, key: tuple[Any, ...], args: Any, kwargs: Any, numbers: list[int | float]) -> Node | None:
        """A new node for an operation that did not follow at this point before. None if it cannot be deferred."""
        self.session.note_divergence(self.node, operation, key)
        count = [0]
        node = Node(self.node, key)
        node.operation = operation
        node.args = [template(arg, i, operation, count) for i, arg in enumerate(args)]
        node.kwargs = {name: template(arg, name, operation, count) for name, arg in kwargs.items()}
        node.first_number, node.first_made = len(self.numbers), len(self.buffers) + len(self._new)
        node.inputs = [(b.place_in_queue, found) for b, found in self._new]
        node.numbers = numbers
        node.line = user_line()
        node.sets_stream = "another random state" in key
        roots = [*self.roots, *(found for _, found in self._new)]
        effect = None if operation.needs_values(args, kwargs) else self.session.effects.of(node, roots, numbers)
        self.node.children[key] = None if effect is None else node
        if effect is None:
            return None
        node.effect = effect
        self.session.num_nodes += 1
        return node

    def _note_draws(self, draws: int) -> None:
        if self._stream != (default_stream.seed, default_stream.draws):
            self.words.append(default_stream.words())
        self.draws += draws
        default_stream.draws += draws
        self._stream = (default_stream.seed, default_stream.draws)

    def forget(self) -> None:
        """Release the buffers and arrays after the recording has run."""
        for ref in self.buffers:
            buffer = ref()
            if buffer is not None and buffer.queue is self:
                buffer.queue = None
        self.buffers, self.inputs, self.roots = [], [], []

    def _result(self, effect: Effect, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for place in effect.written:
            buffer = self.buffers[place]()
            assert buffer is not None, "an argument of the operation keeps it alive"
            buffer.value = buffer.host = buffer.digest = None
            buffer.reads.clear()
        made = effect.made
        if not made:
            return self._tensors_for(effect.result, (), args, kwargs)
        if len(made) == 1 and type(effect.result) is New:  # fast path for nearly all operations
            return window(self._pending_tensor(made[0]), effect.result)
        bases = [self._pending_tensor(root) for root in made]
        return self._tensors_for(effect.result, bases, args, kwargs)

    def _pending_tensor(self, root: Root) -> torch.Tensor:
        """A pending tensor on a new buffer."""
        buffer = Buffer(None, root.shape, annotation=root.annotation)
        buffer.queue, buffer.place_in_queue = self, len(self.buffers)
        self.buffers.append(weakref.ref(buffer))
        self.roots.append(root)
        return tensor_over(buffer, to_torch_dtype(root.dtype))

    def _tensors_for(self, result: Any, bases: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        cls = type(result)
        if cls is New:
            return window(bases[result.made], result)
        if cls is Argument:
            return _tensors(args, kwargs)[result.given]
        if cls is Ref:
            owner = next(t for t in _tensors(args, kwargs) if t.untyped_storage().spmd_buffer.place_in_queue == result.place)  # pyright: ignore[reportAttributeAccessIssue]
            return window(owner, result)
        if cls is list or cls is tuple:
            return cls(self._tensors_for(item, bases, args, kwargs) for item in result)
        if isinstance(result, tuple):
            return cls(*(self._tensors_for(item, bases, args, kwargs) for item in result))
        return result

    def annotate(self, buffer: Buffer, spec: Any) -> None:
        """Constrain the sharding of the value that a pending buffer will have."""
        self.session.annotate(self, buffer, spec)

    def leave(self, buffer: Buffer) -> None:
        """Do nothing, because recorded operations may read the buffer's present value."""

    def dtype_of(self, buffer: Buffer) -> np.dtype[Any]:
        """The dtype that the value of a pending buffer will have."""
        return self.roots[buffer.place_in_queue].dtype

    def run(self) -> None:
        """Run the pending operations."""
        self.session.run(self)


def _tensors(args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The device tensors among the arguments, in the order in which templates name them."""
    found: list[torch.Tensor] = []
    for arg in (*args, *kwargs.values()):
        if isinstance(arg, torch.Tensor):
            if not arg.is_cpu:
                found.append(arg)
        elif isinstance(arg, list | tuple):
            found.extend(_tensors(arg, {}))
    return found


__all__ = ["Recording", "Input"]
