"""Chooses a graph's programs for varying sizes: one program per bucket if that is exact.

A graph with a single open size varies in it. Of several sizes, only those vary that had a second value: under `dynamic=True` Dynamo also
leaves sizes open that never change, and padding these would be wasted work.
"""

from __future__ import annotations

import logging
from typing import Any

from spmd.base._errors import TraceError, place_of
from spmd.device._layout import annotation_of
from spmd.device._storage import Buffer, buffer_of, is_device_tensor
from spmd.dynamo._graph_calls import Calls
from spmd.dynamo._sized_graph import SizedGraph, Sizing, sizing
from spmd.dynamo._sized_traces import SizedTraces
from spmd.program.sizes._formulas import Inexact

logger = logging.getLogger("spmd.dynamo")
_MAX_REFUSALS = 3
_MAX_LATEST = 1024


class SizedPrograms:
    """The programs of one graph for varying sizes.

    Attributes:
        refused: why every size gets its own program; None if a program serves many sizes, or none has varied yet.
        num_programs: number of compiled programs.
        numbers: the values of Python floats that are constants of programs.
    """

    def __init__(self, calls: Calls, name: str) -> None:
        self._calls, self._name = calls, name
        self._first: tuple[int, ...] | None = None
        self._vary: tuple[int, ...] = (0,) if len(calls.sizes.names) == 1 else ()
        self._traces: dict[Any, list[SizedTraces]] = {}
        self._programs: dict[Any, list[SizedGraph]] = {}
        self._exact: set[Any] = set()
        self._latest: dict[Any, SizedGraph | None] = {}  # by sizes; valid until a tensor is marked
        self._marks = -1
        self._sized = calls.sizes.positions
        self._num_refusals = 0
        self.refused: str | None = None if calls.sizes.is_known else "a size that no input shows"
        self.num_programs = 0

    @property
    def numbers(self) -> set[tuple[Any, ...]]:
        return {key[0] for key in self._programs}

    def found(self, args: tuple[Any, ...], numbers: tuple[Any, ...], *, takes_numbers: bool) -> SizedGraph | None:
        """The program of a call; None if the call needs one for exactly its sizes.

        Raises:
            TraceError: the graph cannot be traced.
        """
        sizes = self._calls.sizes.of(args)
        if self.refused is not None or Buffer.marks != self._marks:
            self._latest.clear()
        key = numbers, sizes, *(annotation_of(args[i]) for i in self._sized)
        if key not in self._latest:
            if len(self._latest) > _MAX_LATEST:
                self._latest.clear()
            self._note(sizes)
            self._latest[key] = self._chosen(args, numbers, takes_numbers=takes_numbers) if self._vary and self.refused is None else None
            self._marks = Buffer.marks
        return self._latest[key]

    def _chosen(self, args: tuple[Any, ...], numbers: tuple[Any, ...], *, takes_numbers: bool) -> SizedGraph | None:
        how = sizing(self._calls, args, self._vary)
        if how is None:
            return None
        fixed = tuple(n for i, n in enumerate(how.today) if i not in how.vary)
        layouts = tuple(buffer_of(t).annotation for t in (*args, *self._calls.held) if is_device_tensor(t))
        key = numbers, how.vary, fixed, how.units, how.multiples, layouts
        for program in self._programs.get((*key, how.bucket), ()):
            if program.reason(args) is None:
                return program
        if (*key, how.today) in self._exact:
            return None
        try:
            program = SizedGraph(self._calls, args, self._name, how, self._traces.setdefault(key, []), takes_numbers=takes_numbers)
        except (Inexact, TraceError) as why:
            if isinstance(why, TraceError) and self._calls.numbers and takes_numbers:
                raise
            self._exact.add((*key, how.today))
            self._note_refusal(why, how)
            return None
        self._programs.setdefault((*key, how.bucket), []).append(program)
        self.num_programs += 1
        return program

    def _note(self, sizes: tuple[int, ...]) -> None:
        """Record the sizes of a call, to learn which of them vary."""
        if self._first is None:
            self._first = sizes
        if sizes != self._first:
            self._vary = tuple(i for i, n in enumerate(sizes) if i in self._vary or n != self._first[i])

    def _note_refusal(self, why: Exception, how: Sizing) -> None:
        where = ""
        if isinstance(why, Inexact) and why.equation is not None:
            shapes = ", ".join(str(v.aval) for v in why.equation.invars)
            where = f": {why.equation.primitive.name} of {shapes}, {place_of(why.equation.source_info.traceback)}"
        self._num_refusals += 1
        if not self._programs or self._num_refusals > _MAX_REFUSALS:
            self.refused = f"{why}{where}"
        logger.info("%s is compiled for only the sizes %s: %s%s", self._name, how.today, why, where)


__all__ = ["SizedPrograms"]
