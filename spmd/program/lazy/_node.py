"""What was recorded so far, as a tree: each path from the root is a sequence of operations that came in this order.

A recording stands at a node. An operation that came next before is found by its key; then nothing is made of it but its key.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from spmd.device._deferred import Deferrable
from spmd.program.lazy._described import Fresh

if TYPE_CHECKING:
    from spmd.program.lazy._effect import Effect
    from spmd.program.lazy._region import Region


class Node:
    """One operation at its place in a sequence.

    Attributes:
        parent: the operation before it; None at the root.
        key: what it depends on.
        operation, args, kwargs: what to run, with templates in place of tensors and numbers.
        effect: what it does, by the recording's places.
        taken: (place, description) of each buffer from before the recording that it is the first to use.
        first_made: the place of the first buffer that it makes.
        first_number: the position of its first Python number.
        numbers: its Python numbers when it was recorded first.
        has_varied: they were others since.
        children: the operations that came next, by key; None instead of a node for one that cannot run later.
        latest: the child that came last.
        regions: the programs that end here, newest first.
        sets_stream: somebody set the random state since the last draw; the first draw from here on begins with another.
        line: `file:line` of the user's code, where it was recorded first.
        count: how many operations the path to it has.
    """

    __slots__ = (
        *("args", "children", "count", "effect", "first_made", "first_number", "has_varied", "key", "kwargs"),
        *("latest", "line", "numbers", "operation", "parent", "regions", "sets_stream", "taken"),
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
        self.taken: list[tuple[int, Fresh]] = []
        self.first_made = self.first_number = 0
        self.numbers: list[int | float] = []
        self.has_varied = False
        self.line = ""
        self.sets_stream = False

    def path(self) -> Iterator[Node]:
        """The operations from the first to this one."""
        found: list[Node] = []
        node = self
        while node.parent is not None:
            found.append(node)
            node = node.parent
        return reversed(found)


def difference(before: Node, operation: Deferrable, key: tuple[Any, ...]) -> str:
    """In what an operation differs from the one that came at its place before."""
    if before.operation is not operation:
        return f"{operation.name} came where {before.operation.name} had come"
    for was, now in zip(before.key[2:], key[2:], strict=False):
        if was == now:
            continue
        if isinstance(was, tuple) and isinstance(now, tuple) and len(was) == len(now) == 5:
            names = ("the tensor", "shape", "strides", "offset", "dtype")
            name, old, new = next((n, a, b) for n, a, b in zip(names, was, now, strict=True) if a != b)
            if name == "the tensor":
                return f"{operation.name} took another tensor"
            return f"{operation.name} took a tensor of {name} {_shown(old)} and takes one of {_shown(new)}"
        return f"an argument of {operation.name} was {_shown(was)} and is {_shown(now)}"
    return f"the arguments of {operation.name}"


def _shown(value: Any) -> str:
    if isinstance(value, torch.Size):
        return str(tuple(value))
    if isinstance(value, tuple) and value and value[0] == "number":
        return f"a number ({value[1].__name__})"
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], type):
        return repr(value[1])
    return repr(value)


__all__ = ["Node", "difference"]
