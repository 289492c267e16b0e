"""Takes the result of a trace, and the values that it writes to Python objects, into parts from which every call creates them anew.

Every call creates the containers, objects and functions that the trace created, with the same identities: one list under two names stays
one list. Objects from before the trace are used as they are, and placeholders of arguments become the caller's objects. Tensors
are leaves; `_results` handles them. Their attributes are taken apart like what containers hold.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple

import torch

from spmd.device._number_arithmetic import in_python
from spmd.program.reads import ABSENT, PLAIN, NumbersNeeded, Pending, Varying
from spmd.program.trace._array_parts import SharedMemory
from spmd.program.trace._object_parts import ObjectParts, copied_parts, holds_varying, is_proxy, parts_of
from spmd.program.trace._one_call import OneCall, is_made_class, title_of, title_of_uncopied
from spmd.program.trace._result_attributes import GradientOf, attribute_parts, gradient_parts


class Node(NamedTuple):
    """One container or object, or the attributes of a tensor.

    Attributes:
        blank: creates it empty; None if it can only be created with its parts.
        fill: (empty container or None, parts) -> the container.
        parts: its parts, each the number of a leaf, or ~number of a node.
    """

    blank: Callable[[], Any] | None
    fill: Callable[[Any, list[Any]], Any]
    parts: tuple[int, ...]


class OutputTree:
    """Values taken into leaves and nodes.

    Attributes:
        leaves: tensors, plain values, and objects that existed before the trace.
        nodes: the containers and objects, in the order in which they were found.
        one_call: the objects in them that no call can create anew.
        pending: the values among them that a call computes when it ends.
        shared: the objects from the trace that all calls share, or copy as they are: they are not taken apart.
    """

    def __init__(self, is_before: Callable[[Any], bool], is_stacked: bool, stand_ins: Container[int] = ()) -> None:
        """
        Args:
            is_before: whether an object existed before the trace.
            is_stacked: a call gives the numbers of several steps.
            stand_ins: ids of values of the trace in the place of older ones. See `LiftedNumbers`.
        """
        self.leaves: list[Any] = []
        self.nodes: list[Node] = []
        self.one_call = OneCall()
        self.shared: list[Any] = []
        self.pending: list[Pending] = []
        self._is_before, self._is_stacked, self._memory = is_before, is_stacked, SharedMemory(is_before)
        self._stand_ins = stand_ins
        self._numbers: dict[int, Any] = {}  # by id of its node
        self._refs: dict[int, int] = {}
        self._kept: list[Any] = []
        self._whole: list[int] = []  # numbers of the nodes, each after its parts

    def take(self, value: Any, is_new: bool = False) -> int:
        """Take a value apart.

        Args:
            value: the value.
            is_new: it is a container that the trace machinery created, which is taken apart in any case.

        Returns:
            The number of its leaf, or ~number of its node.

        Raises:
            NumbersNeeded: it contains numbers that vary, and no call can create an object of its kind.
        """
        if not is_proxy(value) and isinstance(value, torch.Tensor):
            return self._tensor(value)
        if not is_proxy(value) and isinstance(value, (*PLAIN, Varying, GradientOf)) and not isinstance(value, slice):
            return self._leaf(value)
        number: Any = value if type(value) in (torch.SymFloat, torch.SymBool) and id(value) not in self._stand_ins else None
        if number is not None:
            value = number = self._numbers.setdefault(id(number.node), number)
        if id(value) in self._refs:
            return self._refs[id(value)]
        self._kept.append(value)
        if number is not None:
            found = None if self._is_stacked else in_python(number)
            if found is not None:
                return self._node(value, (None, lambda _, parts, fn=found[0]: fn(*parts), found[1]))
            ref = self._refs[id(value)] = self._leaf(value)
            return ref
        self.pending += [value] if type(value) is Pending else []
        is_before = not is_new and self._is_before(value)
        if not is_before:
            self._memory.note(value)
        found = None if is_before else parts_of(value)
        if not is_before and is_made_class(cls := type(value)) and not self._is_before(cls):
            self.take(cls)
        if found is None and not is_before:
            if holds_varying(value, self._is_before):
                raise NumbersNeeded
            self.shared.append(value)
            found = self._of_one_call(title_of(value), value) or copied_parts(value) or self._of_one_call(title_of_uncopied(value), value)
        if found is None:
            ref = self._refs[id(value)] = self._leaf(value)
            return ref
        return self._node(value, found)

    def take_gradient(self, leaf: torch.Tensor) -> None:
        """Take the attributes of the gradient of `leaf` apart, if the trace made it."""
        found = None if leaf.grad is None or self._is_before(leaf.grad) else gradient_parts(leaf)
        if found is not None:
            self._add(found)

    def _tensor(self, value: torch.Tensor) -> int:
        if id(value) in self._refs:
            return self._refs[id(value)]
        ref = self._refs[id(value)] = self._leaf(value)
        if self._is_before(value):
            return ref
        self._memory.note(value)
        found = attribute_parts(value)
        if found is not None:
            self._add(found)
        return ref

    def _node(self, value: Any, found: ObjectParts) -> int:
        self._refs[id(value)] = ~len(self.nodes)
        self._add(found)
        return self._refs[id(value)]

    def _add(self, found: ObjectParts) -> None:
        blank, fill, parts = found
        number = len(self.nodes)
        self.nodes.append(Node(blank, fill, ()))
        self.nodes[number] = Node(blank, fill, tuple(map(self.take, parts)))
        self._whole.append(number)

    def _of_one_call(self, title: str | None, value: Any) -> ObjectParts | None:
        return None if title is None else (self.one_call.giving(value, title), lambda made, parts: made, ())

    def ordered(self, refs: Sequence[int]) -> tuple[list[Node], list[int]]:
        """The nodes, each after its parts (a dict hashes its keys when it is filled), and `refs` renumbered for this order.

        Raises:
            TraceError: an object shares memory with another one, and no call can create it so.
        """
        self._memory.require_shown()
        place = {number: i for i, number in enumerate(self._whole)}

        def moved(ref: int) -> int:
            return ref if ref >= 0 else ~place[~ref]

        nodes = (self.nodes[number] for number in self._whole)
        return [node._replace(parts=tuple(map(moved, node.parts))) for node in nodes], list(map(moved, refs))

    def _leaf(self, value: Any) -> int:
        self.leaves.append(value)
        return len(self.leaves) - 1


def rebuilt(nodes: Sequence[Node], refs: Sequence[int], flat: list[Any]) -> list[Any]:
    """The values with the numbers `refs`, created anew.

    Args:
        nodes: each after its parts.
        refs: numbers of leaves, or ~numbers of nodes.
        flat: the leaves of this call.
    """
    if not nodes:
        return list(map(flat.__getitem__, refs))
    made: list[Any] = [ABSENT if node.blank is None else node.blank() for node in nodes]

    def value(ref: int) -> Any:
        if ref >= 0:
            return flat[ref]
        if made[~ref] is ABSENT:
            node = nodes[~ref]
            made[~ref] = node.fill(None, list(map(value, node.parts)))
        return made[~ref]

    for number, node in enumerate(nodes):
        if node.blank is not None:
            node.fill(made[number], list(map(value, node.parts)))
    return list(map(value, refs))


__all__ = ["Node", "OutputTree", "rebuilt"]
