"""Effects of an operation: its results, new buffers, writes and random draws, found once per key by running it on shapes."""

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
from spmd.program.lazy._described import External, Ref
from spmd.program.lazy._node import Node
from spmd.program.lazy._replay import Argument, New, Replay
from spmd.program.trace._buffer_use import TraceRecorder


@dataclass
class Root:
    """The shape, dtype and sharding of a buffer in a recording."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    annotation: Any = None


@dataclass
class Effect:
    """The effects of one operation.

    Attributes:
        result: its result, with `New`, `Argument` and `Ref` in place of tensors.
        made: the buffers that it creates.
        written: places of the buffers that it writes.
        draws: number of random keys that it draws.
    """

    result: Any
    made: list[Root]
    written: list[int]
    draws: int

    def at(self, places: Sequence[int]) -> Effect:
        """The same effect for other buffers: place i becomes `places[i]`."""
        return Effect(_with_places(self.result, places), self.made, [places[i] for i in self.written], self.draws)


class Effects:
    """A cache of effects, by key."""

    def __init__(self) -> None:
        self._known: dict[Any, Effect | None] = {}

    def of(self, node: Node, roots: Sequence[Root | External], numbers: list[Any], platform: str) -> Effect | None:
        """The effect of the operation at a node. None if it cannot be deferred, because it needs values or raises.

        Args:
            roots: the buffers of the recording, by place.
            numbers: the Python numbers of the operation.
            platform: platform of the program that it will be part of.
        """
        places: dict[int, int] = {}
        key: list[Any] = []
        for part in node.key[: len(node.key) - len(node.inputs)]:
            if type(part) is tuple and len(part) == 5 and type(part[0]) is int and isinstance(part[1], torch.Size):
                part = (places.setdefault(part[0], len(places)), *part[1:])
            key.append(part)
        used = [Root(roots[place].shape, roots[place].dtype, roots[place].annotation) for place in places]
        key.extend((root.shape, root.dtype, root.annotation) for root in used)
        known = tuple(key)
        if known not in self._known:
            args = [_with_places(arg, places) for arg in node.args]
            kwargs = {name: _with_places(arg, places) for name, arg in node.kwargs.items()}
            try:
                self._known[known] = effect_of(node.operation, args, kwargs, numbers, used, platform)
            except Exception:  # the operation then runs eagerly, and either raises its own error or succeeds
                self._known[known] = None
        effect = self._known[known]
        return None if effect is None else effect.at(list(places))


def effect_of(
    operation: Deferrable, args: Sequence[Any], kwargs: dict[str, Any], numbers: list[Any], roots: list[Root], platform: str
) -> Effect:
    """Run the kernel on shapes (`jax.eval_shape`). Exceptions of the kernel propagate.

    Args:
        args, kwargs: templates whose places are indices into `roots`.
        platform: platform of the program that the operation will be part of.

    Raises:
        TypeError: the kernel returns a CPU tensor or resizes an argument.
    """
    found: list[Effect] = []

    def run(values: list[Any], words: Any) -> int:
        replay, start = Replay(), default_stream.draws
        recorder = TraceRecorder(words, start, {}, platform=platform)
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
            raise TypeError("the operation resizes an argument")
        made: dict[Buffer, int] = {}
        shown = _with_references(result, given, before, made)
        new = [Root(b.shape, b.dtype, b.annotation) for b in made]
        found.append(Effect(shown, new, [before[b] for b in recorder.written if b in before], draws))
        return 0

    with exact_dtypes():
        values = [jax.ShapeDtypeStruct(stored_shape(root), root.dtype) for root in roots]
        jax.eval_shape(run, values, default_stream.words())
    return found[0]


def traced_buffer(value: Any, root: Root | External) -> Buffer:
    """A buffer with a traced value, for an input or a constant of a program."""
    return Buffer(value, root.shape, annotation=root.annotation)


def stored_shape(root: Root | External) -> tuple[int, ...]:
    """Shape of a buffer's array, in which uneven dims are padded."""
    return root.shape if root.annotation is None else tuple(root.annotation.padded_shape(root.shape))


def _with_references(result: Any, given: list[torch.Tensor], before: dict[Buffer, int], made: dict[Buffer, int]) -> Any:
    """`result` with `New`, `Argument` and `Ref` in place of tensors. New buffers are added to `made`."""
    if isinstance(result, torch.Tensor):
        for i, tensor in enumerate(given):
            if tensor is result:
                return Argument(i)
        if result.is_cpu:
            raise TypeError("a deferred kernel returned a CPU tensor")
        buffer = buffer_of(result)
        shown = tuple(result.shape), result.stride(), int(result.storage_offset()), result.dtype
        if buffer in before:
            return Ref(before[buffer], *shown)
        return New(made.setdefault(buffer, len(made)), *shown)
    if isinstance(result, tuple | list):
        items = [_with_references(item, given, before, made) for item in result]
        return items if isinstance(result, list) else type(result)(*items) if hasattr(result, "_fields") else tuple(items)
    return result


def _with_places(result: Any, places: Any) -> Any:
    """`result` with place p of each `Ref` replaced by `places[p]`."""
    if type(result) is Ref:
        return result._replace(place=places[result.place])
    if isinstance(result, New | Argument):
        return result
    if isinstance(result, tuple | list):
        items = [_with_places(item, places) for item in result]
        return items if isinstance(result, list) else type(result)(*items) if hasattr(result, "_fields") else tuple(items)
    return result


__all__ = ["Effect", "Root", "effect_of", "stored_shape", "traced_buffer"]
