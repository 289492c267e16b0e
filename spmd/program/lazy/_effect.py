"""What an operation does, learned once for all operations of the same description: what it returns, makes, writes and draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import torch

from spmd.base._convert import exact_dtypes, to_torch_dtype
from spmd.device._deferred import Deferrable
from spmd.device._random_stream import default_stream
from spmd.device._storage import Buffer, buffer_of, recording
from spmd.program.lazy._described import Fresh, Ref
from spmd.program.lazy._node import Node
from spmd.program.lazy._replay import New, Replay, Same
from spmd.program.trace._buffer_use import TraceRecorder


@dataclass
class Root:
    """A buffer of a recording: what is known of it without its value."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    annotation: Any = None


@dataclass
class Effect:
    """What one operation does.

    Attributes:
        result: what it returns, with `New`, `Same` and `Ref` in place of tensors.
        made: the buffers it makes.
        written: places of the buffers it writes.
        draws: random keys that it takes.
    """

    result: Any
    made: list[Root]
    written: list[int]
    draws: int

    def at(self, places: Sequence[int]) -> Effect:
        """The same effect where the operation's buffers have these places."""
        return Effect(_moved(self.result, places), self.made, [places[i] for i in self.written], self.draws)


class Effects:
    """What is known of operations, by what they depend on."""

    def __init__(self) -> None:
        self._known: dict[Any, Effect | None] = {}

    def of(self, node: Node, roots: Sequence[Root | Fresh], numbers: list[Any], platform: str) -> Effect | None:
        """The effect of the operation at a node; None if it cannot run later: it needs values, or is refused.

        Args:
            roots: the recording's buffers, by place.
            numbers: the operation's numbers.
        """
        places: dict[int, int] = {}
        key: list[Any] = []
        for part in node.key[: len(node.key) - len(node.taken)]:
            if type(part) is tuple and len(part) == 5 and type(part[0]) is int and isinstance(part[1], torch.Size):
                part = (places.setdefault(part[0], len(places)), *part[1:])
            key.append(part)
        used = [Root(roots[place].shape, roots[place].dtype, roots[place].annotation) for place in places]
        key.extend((root.shape, root.dtype, root.annotation) for root in used)
        known = tuple(key)
        if known not in self._known:
            args = [_moved(arg, places) for arg in node.args]
            kwargs = {name: _moved(arg, places) for name, arg in node.kwargs.items()}
            try:
                self._known[known] = effect_of(node.operation, args, kwargs, numbers, used, platform)
            except Exception:  # run now, it raises what is to be raised, or does what no program can
                self._known[known] = None
        effect = self._known[known]
        return None if effect is None else effect.at(list(places))


def effect_of(
    operation: Deferrable, args: Sequence[Any], kwargs: dict[str, Any], numbers: list[Any], roots: list[Root], platform: str
) -> Effect:
    """Run the kernel on shapes alone. Raises what the kernel raises.

    Args:
        args, kwargs: templates whose places are positions in `roots`.
        platform: that of the program it will be part of.
    """
    found: list[Effect] = []

    def run(values: list[Any], words: Any) -> int:
        replay, start = Replay(), default_stream.draws
        recorder = TraceRecorder(words, {}, start, {}, platform=platform)
        for place, (root, value) in enumerate(zip(roots, values, strict=True)):
            replay.put(place, traced_buffer(value, root), to_torch_dtype(root.dtype))
        before = {replay.buffer(place): place for place in range(len(roots))}
        token = recording.set(recorder)
        try:
            result, given = replay.run(operation, args, kwargs, numbers)
        finally:
            recording.reset(token)
            draws, default_stream.draws = default_stream.draws - start, start
        if any(buffer.shape != roots[place].shape for buffer, place in before.items()) or replay.has_resized():
            raise TypeError("the operation gives an argument another shape")
        made: dict[Buffer, int] = {}
        shown = _described(result, given, before, made)
        new = [Root(b.shape, b.dtype, b.annotation) for b in made]
        found.append(Effect(shown, new, [before[b] for b in recorder.written if b in before], draws))
        return 0

    with exact_dtypes():
        values = [jax.ShapeDtypeStruct(stored_shape(root), root.dtype) for root in roots]
        jax.eval_shape(run, values, default_stream.words())
    return found[0]


def traced_buffer(value: Any, root: Root | Fresh) -> Buffer:
    """A buffer that holds a traced value, as a program's input or a constant of it."""
    return Buffer(value, root.shape, annotation=root.annotation)


def stored_shape(root: Root | Fresh) -> tuple[int, ...]:
    """Shape of the array that holds a buffer: uneven dims are padded."""
    return root.shape if root.annotation is None else tuple(root.annotation.padded_shape(root.shape))


def _described(result: Any, given: list[torch.Tensor], before: dict[Buffer, int], made: dict[Buffer, int]) -> Any:
    """`result` with descriptions in place of its tensors; new buffers are added to `made`."""
    if isinstance(result, torch.Tensor):
        for i, tensor in enumerate(given):
            if tensor is result:
                return Same(i)
        if result.is_cpu:
            raise TypeError("a kernel that runs later returned a CPU tensor")
        buffer = buffer_of(result)
        shown = tuple(result.shape), result.stride(), int(result.storage_offset()), result.dtype
        if buffer in before:
            return Ref(before[buffer], *shown)
        return New(made.setdefault(buffer, len(made)), *shown)
    if isinstance(result, tuple | list):
        items = [_described(item, given, before, made) for item in result]
        return items if isinstance(result, list) else type(result)(*items) if hasattr(result, "_fields") else tuple(items)
    return result


def _moved(result: Any, places: Any) -> Any:
    """`result` with other places: `places[place]`."""
    if type(result) is Ref:
        return result._replace(place=places[result.place])
    if isinstance(result, New | Same):
        return result
    if isinstance(result, tuple | list):
        items = [_moved(item, places) for item in result]
        return items if isinstance(result, list) else type(result)(*items) if hasattr(result, "_fields") else tuple(items)
    return result


__all__ = ["Effect", "Root", "effect_of", "stored_shape", "traced_buffer"]
