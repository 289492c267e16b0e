"""The results of a traced function, and how a call creates them: each tensor once, arguments as the caller's own, views as views.

Results that are one tensor in the trace are one tensor after a call too. A result that is a view of an argument, of state or of another
result shares its memory, with torch's strides: a write to either changes both.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from spmd.base._errors import TraceError, message, shown
from spmd.base._wrong_arguments import wrong_argument
from spmd.device._arrays import fetched
from spmd.device._copy import copied_to_host
from spmd.device._host_copies import held_of, is_host_copy
from spmd.device._numbers import carried, is_program_number
from spmd.device._storage import Buffer, buffer_of, is_device_tensor, is_whole, load, wrap
from spmd.program.find._static import name_of
from spmd.program.reads import PLAIN, ReplacedState, Varying
from spmd.program.trace._arguments import of_caller
from spmd.program.trace._host_results import HostResults
from spmd.program.trace._object_parts import RUNNING
from spmd.program.trace._result_attributes import GradientOf
from spmd.program.trace._window import PLAIN_KIND, Kind, Window, leaves_whole

OUTPUTS = ("array", "number", "copy")  # the kinds of leaves that are outputs of the program


@dataclass
class Leaf:
    """One leaf of the function's result, of a value that it writes, or of the new contents of an object among the arguments.

    Attributes:
        kind: "array" (an output of the program), "number" (an output, read as a Python number), "copy" (an
            output, copied to a CPU tensor), "same" (a tensor from before the trace,
            returned itself), "alias" (a new alias of such a tensor), "argument" (the caller's tensor or object), "container" (the
            caller's container), "part" (a view of an argument), "held" (the value of a Python variable at the start of the call),
            "again" (an earlier leaf), "gradient" (that a call leaves on `owner`), "computed" (a number that the host computes),
            "host" (a CPU tensor that the trace made), "view" (of another leaf), "static" (any other value, as the trace returned it).
        value: by kind: the tensor or static value; "array", "copy": its Kind; "number": its class; "argument": the position; "container":
            the path; "held": the position in `TraceState.held`; "again": the number of the leaf; "computed": the function that
            computes it; "host": the HostTensor; "part" and "view": the position or number, and the Window.
        owner: for a gradient, and an array that a call also stores as one, the tensor that has it, or its position as an argument.
        alias_kind: for an alias its Kind.
    """

    kind: str
    value: Any = None
    owner: Any = None
    alias_kind: Kind = PLAIN_KIND


@dataclass
class Results:
    """Classifies the leaves of a trace's results.

    Attributes:
        containers: by id of the trace's copy of a container or object, the path of the caller's (see `ArgumentContainers`).
        owned: by id of the trace's placeholder of a tensor or object argument, the position of the argument.
        arguments: by buffer of a tensor argument, its position.
        known: ids of the tensors that the function can reach.
        state: buffers of these tensors.
        is_stacked: the arguments and results of a call are stacks of those of the trace.
        is_newborn: whether the trace created a buffer.
        is_before: whether an object existed before the trace.
        stand_ins: by id of a tuple that the trace read and whose numbers are inputs: the tuple, and a function that returns a call's.
        contents: the objects from before the trace whose content it read.
        leaves: one per leaf of the results, followed by the whole storages that several results view.
        returned: for each output the tensor that has its value in the trace, or None.
    """

    containers: dict[int, tuple[Any, ...]]
    owned: dict[int, int]
    arguments: dict[Buffer, int]
    known: set[int]
    state: set[Buffer]
    is_stacked: bool
    is_newborn: Callable[[Buffer], bool]
    is_before: Callable[[Any], bool]
    stand_ins: Mapping[int, tuple[Any, Callable[[], Any]]]
    contents: Sequence[Any]
    leaves: list[Leaf] = field(default_factory=list[Leaf])
    returned: list[torch.Tensor | None] = field(default_factory=list[torch.Tensor | None])

    def outputs(self, flat: Sequence[Any]) -> list[Any]:
        """Fill `leaves` and `returned`, and return the traced output values of the program, in the order of `leaves`.

        Raises:
            TraceError: a result is a CPU tensor that no call can make anew, a tensor on another device, or a generator.
        """
        arrays: list[Any] = []
        shared = self._roots(flat)
        host = HostResults(flat, self.contents)
        roots = {id(b): len(flat) + i for i, b in enumerate(shared)}
        first: dict[int, int] = {}
        for index, value in enumerate(flat):
            if not isinstance(value, PLAIN) and id(value) in first:
                self.leaves.append(Leaf("again", first[id(value)]))
                continue
            first[id(value)] = index
            leaf = self._leaf(value, roots, host)
            taken: Any = value
            if leaf.kind in OUTPUTS:
                arrays.append(carried(taken) if leaf.kind == "number" else load(held_of(taken)))
                self.returned.append(taken if leaf.kind == "array" else None)
            self.leaves.append(leaf)
        copied = {buffer_of(value.held) for value in flat if is_host_copy(value)}
        for buffer, kind in shared.items():
            arrays.append(buffer.get())
            self.returned.append(None)
            self.leaves.append(Leaf("copy" if buffer in copied else "array", kind))
        return arrays

    def _leaf(self, value: Any, roots: dict[int, int], host: HostResults) -> Leaf:
        if not isinstance(value, PLAIN) and id(value) in self.owned:
            return Leaf("argument", self.owned[id(value)])
        if id(value) in self.containers and not isinstance(value, PLAIN):
            return Leaf("container", self.containers[id(value)])
        if is_host_copy(value):
            kind, buffer = Kind.of_copy(value), buffer_of(value.held)
            if buffer in self.arguments:
                return Leaf("part", (self.arguments[buffer], Window.with_kind(value.held, kind)))
            if id(buffer) in roots:
                return Leaf("view", (roots[id(buffer)], Window.with_kind(value.held, kind)))
            return Leaf("copy", kind)
        if isinstance(value, torch.Tensor) and is_device_tensor(value):
            buffer = buffer_of(value)
            if id(buffer) in roots:
                return Leaf("view", (roots[id(buffer)], Window.of(value)))
            is_known = id(value) in self.known or (buffer not in self.state and value.is_leaf)
            if self.is_newborn(buffer) or (self.is_stacked and (buffer in self.arguments or not is_known)):
                return Leaf("array", Kind.of(value))
            if buffer in self.arguments:
                return Leaf("part", (self.arguments[buffer], Window.of(value)))
            return Leaf("same", value) if is_known else Leaf("alias", value.detach(), alias_kind=Kind.of(value))
        if isinstance(value, GradientOf):
            return Leaf("gradient", owner=self.owned.get(id(value.leaf), value.leaf))
        if id(value) in self.stand_ins:
            return Leaf("computed", self.stand_ins[id(value)][1])
        if isinstance(value, Varying):
            return Leaf("computed", value.evaluate)
        if is_program_number(value):
            evaluate, kind = value.node.evaluate, value.node.kind
            return Leaf("number", kind) if evaluate is None else Leaf("computed", lambda: evaluate() if kind is float else kind(evaluate()))
        if isinstance(value, torch.Tensor) and not self.is_before(value):
            if self.is_stacked:
                raise _in_each_step(value)
            return Leaf("host", host.taken(value))
        if isinstance(value, RUNNING):
            raise _running(f"the compiled function returns a {type(value).__name__}")
        return Leaf("static", value)

    def _roots(self, flat: Sequence[Any]) -> dict[Buffer, Kind]:
        """The new storages that become outputs as a whole, because results are views of them (see `leaves_whole`), with their kinds.

        The storage of copies to the host always does, unless the only one shows all of it.
        """
        copied = {buffer_of(value.held) for value in flat if is_host_copy(value)}
        groups: dict[Buffer, dict[int, torch.Tensor]] = {}
        for value in map(held_of, flat if not self.is_stacked else ()):
            if is_device_tensor(value) and id(value) not in self.owned and self.is_newborn(buffer_of(value)):
                groups.setdefault(buffer_of(value), {})[id(value)] = value
        found: dict[Buffer, Kind] = {}
        for buffer, by_id in groups.items():
            tensors = list(by_id.values())
            is_one = len(tensors) == 1 and is_whole(tensors[0], buffer)
            if not is_one if buffer in copied else leaves_whole(tensors, buffer):
                found[buffer] = Kind.of_whole(tensors)
        return found


def is_shown_otherwise(tensor: torch.Tensor, leaves: Sequence[Leaf]) -> bool:
    """Whether a leaf is another tensor on the storage of `tensor`."""
    shown = [leaf.value for leaf in leaves if leaf.kind in ("same", "alias")]
    return any(other is not tensor and is_device_tensor(other) and buffer_of(other) is buffer_of(tensor) for other in shown)


def show_held(leaves: Sequence[Leaf], held: Sequence[ReplacedState]) -> None:
    """Turn each leaf that is the value of a variable in `held` into a "held" leaf: each call returns the current value of the variable."""
    position = {id(h.value): i for i, h in enumerate(held)}
    for leaf in leaves:
        if leaf.kind in ("same", "static") and id(leaf.value) in position and not isinstance(leaf.value, PLAIN):
            leaf.kind, leaf.value = "held", position[id(leaf.value)]


def made(
    leaves: Sequence[Leaf], outputs: Sequence[Any], arguments: Sequence[Any], given: tuple[Any, Any, Any], held: Sequence[Any]
) -> list[Any]:
    """The values of the leaves in a call.

    Args:
        leaves: the leaves of the trace.
        outputs: the program's outputs.
        arguments: the leaves of the call's arguments.
        given: see `of_caller`.
        held: the values of the variables in `TraceState.held` at the start of the call.
    """
    values = iter(outputs)
    flat: list[Any] = []
    roots: dict[int, torch.Tensor] = {}
    for leaf in leaves:
        if leaf.kind == "array":
            value, kind = next(values), leaf.value
            if leaf.owner is not None:
                flat.append(_grad_of(leaf.owner, arguments))
            else:
                flat.append(wrap(value) if kind is PLAIN_KIND else kind.made_by(wrap, value))
        elif leaf.kind == "copy":
            flat.append(leaf.value.made_by(copied_to_host, next(values)))
        elif leaf.kind == "number":
            number = fetched(next(values))  # one per step with `steps_per_call`
            flat.append(leaf.value(number.item()) if number.ndim == 0 else list(map(leaf.value, number.tolist())))
        elif leaf.kind == "argument":
            flat.append(arguments[leaf.value])
        elif leaf.kind == "gradient":
            flat.append(_grad_of(leaf.owner, arguments))
        elif leaf.kind == "held":
            flat.append(held[leaf.value])
        elif leaf.kind == "computed":
            flat.append(leaf.value())
        elif leaf.kind == "container":
            flat.append(of_caller(leaf.value, given))
        elif leaf.kind == "alias":
            flat.append(leaf.alias_kind.made_of(leaf.value.detach()))
        elif leaf.kind == "host":
            flat.append(leaf.value.made(roots))
        elif leaf.kind == "part":
            position, window = leaf.value
            flat.append(window.part_of(arguments[position]))
        else:
            flat.append(None if leaf.kind in ("again", "view") else leaf.value)
    taken: set[int] = set()
    for index, leaf in enumerate(leaves):  # second pass: leaves that refer to other leaves
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
    """Set `owner` of each leaf that is also a gradient that calls keep. `owners`: by id of a gradient of the trace, its tensor."""
    for leaf, tensor in zip((leaf for leaf in leaves if leaf.kind in OUTPUTS), returned, strict=True):
        leaf.owner = owners.get(id(tensor))


def _grad_of(owner: Any, arguments: Sequence[Any]) -> torch.Tensor | None:
    return (owner if isinstance(owner, torch.Tensor) else arguments[owner]).grad


def require_function(fn: Any) -> None:
    """Check that a call of `fn` runs its body to the end.

    Raises:
        TraceError: `fn` is a generator function or a coroutine function.
        TypeError: `fn` is not callable.
    """
    if not callable(fn):
        raise wrong_argument(f"compile takes a function, got {shown(fn)}", "spmd.compile(lambda x: model(x))")
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
            fix="return a list of tensors, or compile a function that computes one of them",
        )
    )


def _in_each_step(tensor: torch.Tensor) -> TraceError:
    return TraceError(
        message(
            f"the compiled function returns a tensor on {tensor.device}, of shape {tuple(tensor.shape)}, or leaves it on an object",
            "with steps_per_call the results of the steps are stacked on the device",
            fix="create it on device 'jax', or return its values as a list: x.tolist()",
        )
    )
