"""What a trace leaves (its result, what it writes to Python) taken apart, so that every call makes it anew.

Containers, objects and functions that the trace made are made by every call, who is who included: one list under two names stays one
list. What existed before is put as it is, and what stands for an argument is the caller's. It knows nothing of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from spmd.program.reads import ABSENT, PLAIN, NumbersNeeded, Varying
from spmd.program.trace._object_parts import ObjectParts, copied_parts, holds_varying, is_proxy, parts_of
from spmd.program.trace._one_call import OneCall, is_made_class, title_of, title_of_uncopied


class Node(NamedTuple):
    """One container.

    Attributes:
        blank: makes it empty, or None if it is made at once from its parts.
        fill: (container or None, parts) -> the container.
        parts: what lies in it: a leaf's number, or ~number of a node.
    """

    blank: Callable[[], Any] | None
    fill: Callable[[Any, list[Any]], Any]
    parts: tuple[int, ...]


class OutputTree:
    """Takes values apart.

    Attributes:
        leaves: what is no container, or existed before.
        nodes: the containers, in the order in which they were met.
        one_call: what of it no call can make anew.
    """

    def __init__(self, is_before: Callable[[Any], bool]) -> None:
        self.leaves: list[Any] = []
        self.nodes: list[Node] = []
        self.one_call = OneCall()
        self._is_before = is_before
        self._refs: dict[int, int] = {}
        self._kept: list[Any] = []
        self._whole: list[int] = []  # the nodes again, each after its parts

    def take(self, value: Any, is_new: bool = False) -> int:
        """The number of a value. `is_new`: it is a container that was made to hold its parts.

        Raises:
            NumbersNeeded: it holds numbers that vary and is of a kind that no call can make.
        """
        if not is_proxy(value) and isinstance(value, (*PLAIN, torch.Tensor, Varying)) and not isinstance(value, slice):
            return self._leaf(value)
        if id(value) in self._refs:
            return self._refs[id(value)]
        self._kept.append(value)
        is_before = not is_new and self._is_before(value)
        found = None if is_before else parts_of(value)
        if not is_before and is_made_class(cls := type(value)) and not self._is_before(cls):
            self.take(cls)
        if found is None and not is_before:
            if holds_varying(value, self._is_before):
                raise NumbersNeeded
            found = self._of_one_call(title_of(value), value) or copied_parts(value) or self._of_one_call(title_of_uncopied(value), value)
        if found is None:
            ref = self._refs[id(value)] = self._leaf(value)
            return ref
        blank, fill, parts = found
        number = len(self.nodes)
        self._refs[id(value)] = ~number
        self.nodes.append(Node(blank, fill, ()))
        self.nodes[number] = Node(blank, fill, tuple(map(self.take, parts)))
        self._whole.append(number)
        return ~number

    def _of_one_call(self, title: str | None, value: Any) -> ObjectParts | None:
        return None if title is None else (self.one_call.giving(value, title), lambda made, parts: made, ())

    def ordered(self, refs: Sequence[int]) -> tuple[list[Node], list[int]]:
        """The nodes, each after its parts (a dict hashes its keys when it is filled), and the numbers that values have among these."""
        place = {number: i for i, number in enumerate(self._whole)}

        def moved(ref: int) -> int:
            return ref if ref >= 0 else ~place[~ref]

        nodes = (self.nodes[number] for number in self._whole)
        return [node._replace(parts=tuple(map(moved, node.parts))) for node in nodes], list(map(moved, refs))

    def _leaf(self, value: Any) -> int:
        self.leaves.append(value)
        return len(self.leaves) - 1


def rebuilt(nodes: Sequence[Node], refs: Sequence[int], flat: list[Any]) -> list[Any]:
    """The values with these numbers. `nodes`: each after its parts; `flat`: this call's leaves."""
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
