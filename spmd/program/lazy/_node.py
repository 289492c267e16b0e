"""The tree of all recorded operations. Each path from the root is a sequence of operations in the order in which they were called.

The current recording is at a node. If the next operation followed here before, it is found among the children by its key, so only its
key has to be computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from spmd.device._deferred import Deferrable
from spmd.program.lazy._described import External

if TYPE_CHECKING:
    from spmd.program.lazy._effect import Effect
    from spmd.program.lazy._region import Region


class Node:
    """One operation in a sequence.

    Attributes:
        parent: the previous operation; None at the root.
        key: everything that the operation depends on except values.
        operation, args, kwargs: the call, with templates in place of tensors and numbers.
        effect: its effect, with the places of the recording.
        inputs: (place, description) of each buffer from before the recording that this operation is the first to use.
        first_made: the place of the first buffer that it creates.
        first_number: the position of its first Python number among all numbers of the recording.
        numbers: its Python numbers when it was first recorded.
        has_varied: whether its numbers were different later.
        children: the operations that followed, by key; None for an operation that cannot be deferred.
        latest: the child that was recorded last.
        regions: the programs for the path to this node, newest first.
        sets_stream: whether the random state was set between the previous draw and this operation, so the next draw uses the new state.
        line: `file:line` of the user's code where the operation was first recorded.
        count: number of operations on the path to this node.
    """

    __slots__ = (
        *("args", "children", "count", "effect", "first_made", "first_number", "has_varied", "inputs", "key", "kwargs"),
        *("latest", "line", "numbers", "operation", "parent", "regions", "sets_stream"),
    )

    def __init__(self, parent: Node | None, key: tuple[Any, ...]) -> None:
        self.parent = parent
        self.key = key
        self.count = 0 if parent is None else parent.count + 1
        self.children: dict[tuple[Any, ...], Node | None] = {}
        self.latest: Node | None = None
        self.regions: list[Region] = []
        self.operation: Deferrable
        self.args: list[Any]
        self.kwargs: dict[str, Any]
        self.effect: Effect
        self.inputs: list[tuple[int, External]] = []
        self.first_made = self.first_number = 0
        self.numbers: list[int | float] = []
        self.has_varied = False
        self.line = ""
        self.sets_stream = False

    def path(self) -> Iterator[Node]:
        """The operations from the first of the sequence to this one."""
        found: list[Node] = []
        node = self
        while node.parent is not None:
            found.append(node)
            node = node.parent
        return reversed(found)


def difference(before: Node, operation: Deferrable, key: tuple[Any, ...]) -> str:
    """How an operation differs from `before`, the one that was recorded at this point last time."""
    if before.operation is not operation:
        return f"{operation.name} was called instead of {before.operation.name}"
    for was, now in zip(before.key[2:], key[2:], strict=False):
        if was == now:
            continue
        if isinstance(was, tuple) and isinstance(now, tuple) and len(was) == len(now) == 5:
            names = ("the tensor", "shape", "strides", "offset", "dtype")
            name, old, new = next((n, a, b) for n, a, b in zip(names, was, now, strict=True) if a != b)
            if name == "the tensor":
                return f"{operation.name} was called with another tensor"
            return f"the {name} of a tensor argument of {operation.name} changed from {_shown(old)} to {_shown(new)}"
        return f"an argument of {operation.name} changed from {_shown(was)} to {_shown(now)}"
    return f"the arguments of {operation.name}, the default dtype or the random state changed"


def _shown(value: Any) -> str:
    if isinstance(value, torch.Size):
        return str(tuple(value))
    if isinstance(value, tuple) and value and value[0] == "number":
        return f"a number of type {value[1].__name__}"
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], type):
        return repr(value[1])
    return repr(value)


__all__ = ["Node", "difference"]
