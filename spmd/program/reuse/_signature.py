"""The signature of a call: the properties of its arguments, and of torch's global modes, that determine its program."""

from __future__ import annotations

import array
import collections.abc
from collections.abc import Collection, Mapping
from enum import Enum
from itertools import repeat
from operator import is_
from types import FunctionType, MappingProxyType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from spmd.base._errors import TraceError, message
from spmd.base._exact import exactly
from spmd.base._torch import (
    DeviceContext,
    dispatch_mode_at,
    function_mode_at,
    hooks_of_leaf,
    num_torch_dispatch_modes,
    num_torch_function_modes,
    top_saved_tensors_default_hooks,
)
from spmd.device._storage import Buffer, buffer_of, is_whole
from spmd.lowering import num_lowerings
from spmd.program.find._objects import contents_of, flatten, is_object, unflatten
from spmd.program.reads import NUMBER_TYPES, PLAIN, change_text
from spmd.program.trace._arguments import containers_among, own_storage, with_shared
from spmd.program.trace._gradients import gradient_kind

_TENSOR = repeat(torch.Tensor)
VARIES: Any = type("Varies", (), {"__repr__": lambda self: "any"})()
_MODES = ("grad mode", "default dtype", "autocast", "inference mode", "number of lowerings", "the active torch modes and hooks")
_DEVICE_PARTS = (
    "the position among the distinct tensors",
    "shape",
    "dtype",
    "requires_grad",
    "sharding",
    "class",
    "attributes",
    "sizes and strides of a view",
)
_PASSED = "pass a tensor, a number, a string, or a list, tuple or dict of these; or let the function close over it"
_PASSED_AS: tuple[tuple[Any, str], ...] = (  # fixes by the class of an argument that cannot be compared
    (np.ndarray, "pass a tensor, torch.from_numpy(a).to('jax'), or a list, a.tolist()"),
    (collections.abc.Set, "pass frozenset(s), or a list in a fixed order, sorted(s)"),
    (collections.abc.Mapping, "pass dict(d)"),
    ((bytearray, memoryview), "pass bytes(b), or a tensor, torch.frombuffer(b, dtype=torch.uint8).to('jax')"),
    ((array.array, collections.abc.Sequence), "pass list(a), or a tensor, torch.tensor(list(a), device='jax')"),
)


class Signature(NamedTuple):
    """The signature of one call, and its arguments.

    Attributes:
        key: equal for calls that can run the same program.
        buffers: buffers of the device tensors, each once.
        hosts: the CPU tensors.
        args, kwargs: the arguments, with a new tensor in place of each view.
        copied: for each such view, the buffer of its base, and the position in `buffers` of the new tensor.
        numbers: the Python numbers among the leaves that are inputs of the program, by position.
    """

    key: Any
    buffers: list[Buffer]
    hosts: list[torch.Tensor]
    args: Any
    kwargs: Any
    copied: list[tuple[Buffer, int]]
    numbers: dict[int, int | float]

    @property
    def arguments(self) -> list[Buffer | torch.Tensor]:
        """The buffers of the device tensors, then the CPU tensors: in the order of the program's inputs."""
        return [*self.buffers, *self.hosts]


def signature(
    args: Any,
    kwargs: Any,
    state: Mapping[int, Buffer],
    holders: frozenset[type] = frozenset(),
    varying: Mapping[Any, Collection[int]] = MappingProxyType({}),
    attributes: Collection[str] = (),
    known: Mapping[int, Any] = MappingProxyType({}),
    is_stack: bool = False,
) -> Signature:
    """The signature of a call. Its key has the metadata of tensors, which of them are one, and the type and value of other arguments.

    Args:
        state, known: by id, buffers that are state, and objects that the function reached by name. They enter the key by identity.
        holders: classes whose instances are containers even if they have no tensor attribute.
        varying: by structure of the arguments, the positions of numbers that enter the key by type only.
        attributes: names of the Python attributes of tensors that enter the key; with "__dict__" all do.
        is_stack: the first dim of each tensor is the step (`steps_per_call`).

    Raises:
        TraceError: an argument is not a tensor, a container or hashable, so a change of it would not be noticed.
    """
    flat, tree, shape = _flattened(args, kwargs, holders, known)
    key: list[Any] = [shape, *modes()]
    buffers: list[Buffer] = []
    positions: dict[int, int] = {}
    hosts: list[torch.Tensor] = []
    copied: list[tuple[Buffer, int]] = []
    inputs = varying.get(shape, ()) if varying else ()
    numbers: dict[int, int | float] = {}
    sharing: list[list[torch.Tensor]] = []  # by position of a buffer, the different tensors on it
    for index, value in enumerate(flat):
        if not isinstance(value, torch.Tensor):
            if is_input := index in inputs and type(value) in NUMBER_TYPES:
                numbers[index] = value
            key.append((type(value), VARIES) if is_input else _static(value))
            continue
        try:  # faster than `value.device`, which is a new object each time
            buffer: Buffer | None = getattr(value.untyped_storage(), "spmd_buffer", None)
        except (NotImplementedError, RuntimeError):  # no storage: a sparse tensor
            buffer = None
        if buffer is None:
            hosts.append(value)
            key.append((*_host(hosts), _attributes(value, attributes)))
            continue
        own, buffer, strides = (value, buffer, None) if buffer.value is not None and is_whole(value, buffer) else _own(value, is_stack)
        identity = id(buffer)
        if (position := positions.setdefault(identity, len(buffers))) == len(buffers):
            buffers.append(buffer)
            sharing.append([value])
        place: Any = position if sharing[position][0] is value else (position, _place_of(value, sharing[position]))
        place = ("state", identity, id(value) if id(value) in known else place) if identity in state else place
        if own is not value:
            flat[index], place = own, ("view", position)
            copied.append((buffer_of(value), position))
        gradient, named = value.requires_grad and _gradient(value), _attributes(value, attributes) if attributes else ()
        key.append((place, buffer.shape, own.dtype, gradient, buffer.annotation, type(value), named, strides))
    if copied:
        args, kwargs = (tuple(flat), {}) if isinstance(tree, int) else with_shared(unflatten(flat, tree)[0], (args, kwargs))
    return Signature(tuple(key), buffers, hosts, args, kwargs, copied, numbers)


def _place_of(value: torch.Tensor, tensors: list[torch.Tensor]) -> int:
    """The place of a tensor in a list, to which it is added if it is not there."""
    for place, tensor in enumerate(tensors):
        if tensor is value:
            return place
    tensors.append(value)
    return len(tensors) - 1


def _own(value: torch.Tensor, is_stack: bool) -> tuple[torch.Tensor, Buffer, Any]:
    """The tensor that a call gets for `value` (see `own_storage`), its buffer, and, unless it is all of the buffer, sizes and strides."""
    own = own_storage(value, is_stack)
    buffer = buffer_of(own)
    is_all = own.shape == buffer.shape and own.is_contiguous()
    return own, buffer, None if is_all else (tuple(own.shape), own.stride())


def _host(hosts: list[torch.Tensor]) -> tuple[Any, ...]:
    """The key's part for the last of the CPU tensors: which of them it is, and its metadata."""
    value = hosts[-1]
    if value.device.type == "jax":
        buffer_of(value)  # raises
    position = next(i for i, host in enumerate(hosts) if host is value)
    strides = value.stride() if value.layout == torch.strided and not value.is_nested else ()
    gradient = value.requires_grad and _gradient(value)
    return position, str(value.device), tuple(value.shape), value.dtype, strides, value.is_conj(), value.is_neg(), type(value), gradient


def _flattened(args: Any, kwargs: Any, holders: frozenset[type], known: Mapping[int, Any]) -> tuple[list[Any], Any, Any]:
    """The leaves of a call's arguments, their tree, and the key's part for the tree.

    If all arguments are tensors, as usual for a training step, tree and key are their number.
    """
    if not kwargs and all(map(isinstance, args, _TENSOR)):
        return list(args), len(args), len(args)
    flat, tree, objects = flatten((args, kwargs), classes=holders)
    containers = containers_among((*args, *kwargs.values()))
    first: dict[int, int] = {}
    shared = tuple((i, first[id(c)]) for i, c in enumerate(containers) if first.setdefault(id(c), i) != i)
    # equal keys may differ, as 1, True and 1.0; strings do not
    keys = tuple(_static(key) for c in containers if isinstance(c, dict) for key in c if type(key) is not str)
    for instance in objects if known else ():
        containers += [instance, *containers_among(contents_of(instance).values())]
    reached = tuple((i, id(c)) for i, c in enumerate(containers) if id(c) in known) if known else ()
    return flat, tree, (tree, shared, reached, keys) if shared or reached or keys else tree


def changed_positions(old: Any, new: Any) -> set[int]:
    """The positions of the leaves in which two keys differ, if each of them is a number of the same type in both; else an empty set."""
    first = 1 + len(_MODES)
    if old[:first] != new[:first] or len(old) != len(new):
        return set()
    found = {i for i, (a, b) in enumerate(zip(old[first:], new[first:], strict=True)) if a != b}
    pairs = [(old[first + i], new[first + i]) for i in found]
    are_numbers = all(len(a) == len(b) == 2 and a[0] is b[0] and a[0] in NUMBER_TYPES for a, b in pairs)
    return found if are_numbers else set()


def changed_signature(old: Any, new: Any) -> str | None:
    """A description of the first difference between two keys; None if they are equal."""
    if old == new:
        return None
    if old[0] != new[0]:
        return "the arguments are nested differently, or their number changed"
    for name, a, b in zip(_MODES, old[1:], new[1:], strict=False):
        if a != b:
            return f"{name} changed from {a} to {b}"
    first = 1 + len(_MODES)
    for i, (a, b) in enumerate(zip(old[first:], new[first:], strict=True)):
        if a == b or VARIES in (a[-1], b[-1]):
            continue
        if len(a) == len(b) == len(_DEVICE_PARTS):
            parts = [_changed_part(n, x, y) for n, x, y in zip(_DEVICE_PARTS, a, b, strict=True) if x != y]
            return f"argument {i}: {'; '.join(parts)}"
        if len(a) != 2 or len(b) != 2:
            return f"argument {i} is of another kind"
        old, new = (part[-1].value if isinstance(part[-1], ByIdentity) else part[-1] for part in (a, b))
        return change_text(f"argument {i}", old, new, (repr(a[-1]), repr(b[-1])))
    return None


def _changed_part(name: str, old: Any, new: Any) -> str:
    """The text for a part of the key of a tensor that differs."""
    if name == "requires_grad":
        old, new = (_gradient_text(part, both=old is not False and new is not False) for part in (old, new))
        if old == new:
            return "its gradient, or a hook of it, is of another kind"
    return f"{name} changed from {old} to {new}"


def _gradient_text(part: Any, *, both: bool) -> str:
    """The text for a key's part of `requires_grad` (see `_gradient`). `both`: both tensors require a gradient, and differ in more."""
    if part is False or not both:
        return str(part is not False)
    has_hooks = isinstance(part, tuple) and isinstance(part[-1], tuple)
    kind = part[0] if has_hooks else part
    gradient = "without a gradient" if kind is None else f"with a gradient of shape {list(kind[0][0])}"
    return f"True, {gradient}{' and with hooks' if has_hooks else ''}"


def _gradient(value: torch.Tensor) -> Any:
    """The key's part for an argument that requires a gradient: the kind of its gradient or None, and its hooks, which a trace runs."""
    if value.grad_fn is not None and torch.is_grad_enabled():
        raise TraceError(
            message(
                f"an argument of shape {tuple(value.shape)} was computed from tensors that require gradients",
                "a gradient cannot flow out of a compiled function into the graph of its argument",
                fix="pass x.detach(), or compute it inside the function",
            )
        )
    kind = None if value.grad is None else gradient_kind(value.grad)
    hooks = hooks_of_leaf(value)  # the functions: another process, or a new tensor, gives one of them another number
    return (kind, *(tuple(map(ByIdentity, of_kind)) for of_kind in hooks)) if any(hooks) else kind


class ByIdentity:
    """A key part that compares an object by identity, and a bound method by those of its function and its instance."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.parts = (value.__func__, value.__self__) if type(value) is MethodType else (value,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByIdentity) and len(self.parts) == len(other.parts) and all(map(is_, self.parts, other.parts))

    def __hash__(self) -> int:
        return hash(tuple(map(id, self.parts)))

    def __repr__(self) -> str:
        return f"{type(self.value).__name__} at {id(self.value):#x}"


def _attributes(tensor: torch.Tensor, names: Collection[str]) -> tuple[Any, ...]:
    """The key's part for attributes of a tensor: plain values by value, other objects by identity."""
    if not names:
        return ()
    held = vars(tensor)
    return tuple(
        (name, type(held[name]), exactly(held[name]) if _is_plain(held[name]) else ByIdentity(held[name]))
        for name in sorted(held if "__dict__" in names else names)
        if name in held
    )


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if type(value) is tuple else isinstance(value, (*PLAIN, Enum))


def _static(value: Any) -> tuple[Any, Any]:
    if type(value) is slice:
        return slice, (_static(value.start), _static(value.stop), _static(value.step))
    if type(value).__hash__ is None and (type(value) is SimpleNamespace or is_object(value)):
        return type(value), ByIdentity(value)  # what the function reads of it is guarded
    try:
        hash(value)
    except (TypeError, ValueError):  # the second of a memoryview
        raise TraceError(
            message(
                f"an argument of type {type(value).__name__} can be neither traced nor compared with the next call's",
                fix=next((fix for kinds, fix in _PASSED_AS if issubclass(type(value), kinds)), _PASSED),
            )
        ) from None
    return type(value), exactly(value)


def modes() -> tuple[Any, ...]:
    """The global state of torch, and the number of registered lowerings, that determine what a function computes."""
    autocast = torch.get_autocast_dtype("jax") if torch.is_autocast_enabled("jax") else False
    grads = torch.is_grad_enabled(), torch.get_default_dtype()
    return *grads, autocast, torch.is_inference_mode_enabled(), num_lowerings(), _active_modes()


def _active_modes() -> tuple[Any, ...]:
    """The active torch function modes and dispatch modes, and the saved-tensors hooks."""
    hooks = top_saved_tensors_default_hooks(True)
    num_of_functions, num_of_operators = num_torch_function_modes(), num_torch_dispatch_modes()
    if hooks is None and not num_of_functions and not num_of_operators:
        return ()
    found = (*map(function_mode_at, range(num_of_functions)), *map(dispatch_mode_at, range(num_of_operators)))
    ours = (type(mode).__module__.startswith("spmd.") for mode in found)  # these do not change what a program computes
    return *(_mode(mode) for mode, is_ours in zip(found, ours, strict=True) if not is_ours), *map(_hook, hooks or ())


def _mode(mode: Any) -> Any:
    """The key of a mode. A user's mode is compared by identity, since the function may read and write its state."""
    return (DeviceContext, mode.device) if isinstance(mode, DeviceContext) else mode


def _hook(hook: Any) -> Any:
    """The key of a saved-tensors hook: by code and closure where possible, since `save_on_cpu` creates new functions for every block."""
    cells = getattr(hook, "__closure__", None) or ()
    held = tuple(cell.cell_contents for cell in cells)
    return (
        (hook.__code__, exactly(held))
        if isinstance(hook, FunctionType) and all(isinstance(v, (*PLAIN, ModuleType)) for v in held)
        else hook
    )
