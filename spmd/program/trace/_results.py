"""What a traced function returns, and how a call makes it: each result once, arguments as the caller's own, views as views.

Results that are one tensor are one tensor after a call too. One that is a view of an argument, of state or of another
result shares its memory, with torch's strides: a write to either is seen by both.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from spmd.base._errors import TraceError, message
from spmd.device._arrays import fetched
from spmd.device._numbers import NumberNode, carried
from spmd.device._storage import Buffer, buffer_of, is_device_tensor, load, wrap
from spmd.program.find._static import name_of
from spmd.program.reads import PLAIN, ReplacedState, Varying
from spmd.program.trace._arguments import of_caller
from spmd.program.trace._object_parts import RUNNING
from spmd.program.trace._window import PLAIN_KIND, Kind, Window, leaves_whole


@dataclass
class Leaf:
    """One leaf of the function's result, or of an object that is an argument, as the function leaves it.

    Attributes:
        kind: "array" (an output of the program), "number" (an output read as a Python number), "same" (a tensor that existed
            before: returned as it is), "alias" (a new alias of one), "argument" (the caller's own tensor or object), "container"
            (the caller's own container), "part" (a view of one), "held" (what a place held when the call began), "again" (an
            earlier leaf), "computed" (a number of the host), "view" (of a leaf), "static" (any other value, as the trace returned it).
        value: the tensor or static value; for arrays its Kind, for numbers their class; for arguments the position, for
            "container" the path, for "held" the position among `TraceState.held`, for "again" the number of the leaf, for "part"
            and "view" one of these and the Window.
        owner: of an array that is also the gradient which a call leaves: whose (a tensor, or the position of an argument).
    """

    kind: str
    value: Any = None
    owner: Any = None


@dataclass
class Results:
    """Takes the results of a trace apart.

    Attributes:
        containers: by id of a container or object that stands for an argument's, its path (see `ArgumentContainers`).
        owned: position of an argument by the id of the tensor or object that stands for it in the trace.
        arguments: position by buffer, of the arguments that are tensors.
        known: ids of the tensors in reach.
        state: their buffers.
        is_stacked: a call's arguments and results are stacks of the trace's.
        is_newborn: whether a buffer was made in the trace.
        stand_ins: by id of a tuple that the trace read and whose numbers are inputs: the tuple, and what gives that of a call.
        leaves: what was found, one per leaf of the result, then roots that several results show.
        returned: for each output the tensor that it is the value of, or None.
    """

    containers: dict[int, tuple[Any, ...]]
    owned: dict[int, int]
    arguments: dict[Buffer, int]
    known: set[int]
    state: set[Buffer]
    is_stacked: bool
    is_newborn: Callable[[Buffer], bool]
    stand_ins: Mapping[int, tuple[Any, Callable[[], Any]]]
    leaves: list[Leaf] = field(default_factory=list[Leaf])
    returned: list[torch.Tensor | None] = field(default_factory=list[torch.Tensor | None])

    def outputs(self, flat: Sequence[Any]) -> list[Any]:
        """The traced values that leave the program for these leaves, in the order of `leaves`.

        Raises:
            TraceError: a result is a tensor elsewhere, or a generator.
        """
        arrays: list[Any] = []
        shared = self._roots(flat)
        roots = {id(b): len(flat) + i for i, b in enumerate(shared)}
        first: dict[int, int] = {}
        for index, value in enumerate(flat):
            if not isinstance(value, PLAIN) and id(value) in first:
                self.leaves.append(Leaf("again", first[id(value)]))
                continue
            first[id(value)] = index
            leaf = self._leaf(value, roots)
            taken: Any = value
            if leaf.kind in ("array", "number"):
                arrays.append(carried(taken) if leaf.kind == "number" else load(taken))
                self.returned.append(None if leaf.kind == "number" else taken)
            self.leaves.append(leaf)
        for buffer in shared:
            arrays.append(buffer.get())
            self.returned.append(None)
            self.leaves.append(Leaf("array", PLAIN_KIND))
        return arrays

    def _leaf(self, value: Any, roots: dict[int, int]) -> Leaf:
        if not isinstance(value, PLAIN) and id(value) in self.owned:
            return Leaf("argument", self.owned[id(value)])
        if id(value) in self.containers and not isinstance(value, PLAIN):
            return Leaf("container", self.containers[id(value)])
        if isinstance(value, torch.Tensor) and is_device_tensor(value):
            buffer = buffer_of(value)
            if id(buffer) in roots:
                return Leaf("view", (roots[id(buffer)], Window.of(value)))
            is_known = id(value) in self.known or (buffer not in self.state and value.is_leaf)
            if self.is_newborn(buffer) or (self.is_stacked and (buffer in self.arguments or not is_known)):
                return Leaf("array", Kind.of(value))
            if buffer in self.arguments:
                return Leaf("part", (self.arguments[buffer], Window.of(value)))
            return Leaf("same", value) if is_known else Leaf("alias", value.detach())
        if id(value) in self.stand_ins:
            return Leaf("computed", self.stand_ins[id(value)][1])
        if isinstance(value, Varying):
            return Leaf("computed", value.evaluate)
        if isinstance(value, (torch.SymFloat, torch.SymBool)) and isinstance(value.node, NumberNode):
            evaluate, kind = value.node.evaluate, value.node.kind
            return Leaf("number", kind) if evaluate is None else Leaf("computed", lambda: evaluate() if kind is float else kind(evaluate()))
        if isinstance(value, torch.Tensor):
            raise _elsewhere(value)
        if isinstance(value, RUNNING):
            raise _running(f"the compiled function returns a {type(value).__name__}")
        return Leaf("static", value)

    def _roots(self, flat: Sequence[Any]) -> list[Buffer]:
        """The storages made in the trace that leave it whole, since results show them."""
        groups: dict[Buffer, dict[int, torch.Tensor]] = {}
        for value in flat if not self.is_stacked else ():
            if is_device_tensor(value) and id(value) not in self.owned and self.is_newborn(buffer_of(value)):
                groups.setdefault(buffer_of(value), {})[id(value)] = value
        return [buffer for buffer, tensors in groups.items() if leaves_whole(list(tensors.values()), buffer)]


def is_shown_otherwise(tensor: torch.Tensor, leaves: Sequence[Leaf]) -> bool:
    """Whether a leaf shows the tensor's memory and is not the tensor itself."""
    shown = [leaf.value for leaf in leaves if leaf.kind in ("same", "alias")]
    return any(other is not tensor and is_device_tensor(other) and buffer_of(other) is buffer_of(tensor) for other in shown)


def show_held(leaves: Sequence[Leaf], held: Sequence[ReplacedState]) -> None:
    """Leaves that are what a place held become what it holds in each call."""
    position = {id(h.value): i for i, h in enumerate(held)}
    for leaf in leaves:
        if leaf.kind in ("same", "static") and id(leaf.value) in position and not isinstance(leaf.value, PLAIN):
            leaf.kind, leaf.value = "held", position[id(leaf.value)]


def made(
    leaves: Sequence[Leaf], outputs: Sequence[Any], arguments: Sequence[Any], given: tuple[Any, Any, Any], held: Sequence[Any]
) -> list[Any]:
    """The leaves of a call's result, from the program's outputs and the caller's arguments.

    Args:
        given: see `of_caller`.
        held: what the places of `TraceState.held` held when the call began.
    """
    values = iter(outputs)
    flat: list[Any] = []
    for leaf in leaves:
        if leaf.kind == "array":
            value, kind = next(values), leaf.value
            if leaf.owner is not None:
                flat.append(_grad_of(leaf.owner, arguments))
            else:
                flat.append(wrap(value) if kind is PLAIN_KIND else kind.made_of(wrap(value)))
        elif leaf.kind == "number":
            number = fetched(next(values))  # a row of them for each step of `steps_per_call`
            flat.append(leaf.value(number.item()) if number.ndim == 0 else list(map(leaf.value, number.tolist())))
        elif leaf.kind == "argument":
            flat.append(arguments[leaf.value])
        elif leaf.kind == "held":
            flat.append(held[leaf.value])
        elif leaf.kind == "computed":
            flat.append(leaf.value())
        elif leaf.kind == "container":
            flat.append(of_caller(leaf.value, given))
        elif leaf.kind == "alias":
            flat.append(leaf.value.detach())
        elif leaf.kind == "part":
            position, window = leaf.value
            flat.append(window.part_of(arguments[position]))
        else:
            flat.append(None if leaf.kind in ("again", "view") else leaf.value)
    taken: set[int] = set()
    for index, leaf in enumerate(leaves):  # what shows another leaf, now that all are there
        if leaf.kind == "view":
            number, window = leaf.value
            root = flat[number]
            is_root = number not in taken and window.is_base(root)
            taken.update([number] if is_root else [])
            flat[index] = root if is_root and window.kind.is_plain else window.shown(root)
        elif leaf.kind == "again":
            flat[index] = flat[leaf.value]
    return flat


def note_gradients(leaves: Sequence[Leaf], returned: Sequence[torch.Tensor | None], owners: Mapping[int, Any]) -> None:
    """Results that are gradients, which calls keep, are these. `owners`: by id of a gradient of the trace, whose it is."""
    for leaf, tensor in zip((leaf for leaf in leaves if leaf.kind in ("array", "number")), returned, strict=True):
        leaf.owner = owners.get(id(tensor))


def _grad_of(owner: Any, arguments: Sequence[Any]) -> torch.Tensor | None:
    return (owner if isinstance(owner, torch.Tensor) else arguments[owner]).grad


def require_function(fn: Any) -> None:
    """Raise TraceError if a call of `fn` would only begin: it is a generator function or a coroutine function; TypeError if none can be."""
    if not callable(fn):
        raise TypeError(message(f"compile takes a function, got {fn!r}", fix="spmd.compile(lambda x: model(x))"))
    while isinstance(fn, functools.partial):
        fn = fn.func
    code = fn if isinstance(fn, (types.FunctionType, types.MethodType)) else inspect.getattr_static(type(fn), "__call__", None)
    kinds = {
        "generator": inspect.isgeneratorfunction,
        "coroutine": inspect.iscoroutinefunction,
        "async generator": inspect.isasyncgenfunction,
    }
    for kind, is_one in kinds.items():
        if is_one(code):
            raise _running(f"'{name_of(fn)}' is a {kind} function")


def _running(what: str) -> TraceError:
    return TraceError(
        message(
            what,
            "a compiled program runs from beginning to end; Python code between two yields would run only once, in the trace",
            fix="return a list of tensors, or compile the function that makes one of them",
        )
    )


def _elsewhere(tensor: torch.Tensor) -> TraceError:
    return TraceError(
        message(
            f"the compiled function returns a tensor on {tensor.device}, of shape {tuple(tensor.shape)}, or leaves it on an object",
            "its value would always be that of the trace",
            fix="make it on device 'jax'; a random state for the backward pass belongs on `ctx`, not on a module",
        )
    )
