"""What a traced function does to the dicts and lists that are its arguments, and gives to the tensors among them, every call does
to the caller's."""

from __future__ import annotations

import collections
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from spmd.base._convert import exact_dtypes
from spmd.base._errors import TraceError, message
from spmd.device._storage import Buffer, buffer_of, is_device_tensor, is_whole, load, wrap
from spmd.device._uploaded import host_values, note_sent, window
from spmd.program.find._objects import ITEMS, Tree, contents_of, unflatten
from spmd.program.find._static import attributes_of
from spmd.program.reads import ABSENT, PLAIN, Effect, Recording
from spmd.program.trace._host_values import HostArgument

Path = tuple[Any, ...]


class ArgumentContainers:
    """The containers and objects among the arguments as the trace gets them, each a copy of the caller's.

    Attributes:
        ids: of the copies, and of the dicts of attributes of the objects among them.
        paths: by id of a copy, where the caller's is among the arguments and the objects in them.
        tensors: those among the arguments and in the objects.
    """

    def __init__(self, call: tuple[tuple[Any, ...], dict[str, Any]], objects: list[Any]) -> None:
        apart = frozenset(map(id, objects))
        found = [*_walk(call[0], (0,), apart), *(one for name, v in call[1].items() for one in _walk(v, (1, name), apart))]
        for number, instance in enumerate(objects):
            for name, value in contents_of(instance).items():
                inside = _walk(value, (2, number, name), apart)
                found += inside if name != ITEMS else [one for one in inside if one[1] is not value]
        given = {id(t): (path, t) for path, t in reversed(found) if isinstance(t, torch.Tensor)}
        found = [one for one in found if not isinstance(one[1], torch.Tensor)]
        self.tensors: list[torch.Tensor] = [t for _, t in given.values()]
        self._of_tensors = {id(attributes_of(t)): path for path, t in given.values()}
        mutable = {id(container): (path, container) for path, container in reversed(found) if not isinstance(container, tuple)}
        self._found = [(path, container, _content(container)) for path, container in reversed(mutable.values())]
        self.paths: dict[int, Path] = {id(container): path for path, container in found}
        self.paths.update((id(instance), (2, number)) for number, instance in enumerate(objects))
        self.ids = {id(c) for _, c, _ in self._found} | {id(c) for c in (*objects, *map(vars, objects), *call)}

    def of_tensor(self, effect: Effect) -> Effect:
        """The effect itself, or that on the caller's tensor if it is an attribute of one that stands for it."""
        path = self._of_tensors.get(id(effect.holder))
        return effect if path is None else replace(effect, holder=path, put=_put)

    def effects(self) -> list[Effect]:
        """What was written to them."""
        found: list[Effect] = []
        for path, container, before in self._found:
            now = _content(container)
            if now.keys() != before.keys() and not isinstance(container, dict):
                found.append(Effect(path, ABSENT, "an argument", before, list(container), _put_whole, is_content=True))
                continue
            for key in [*before, *(k for k in now if k not in before)]:
                if now.get(key, ABSENT) is not before.get(key, ABSENT):
                    found.append(Effect(path, key, f"an argument[{key!r}]", before.get(key, ABSENT), now.get(key, ABSENT), _put))
        return found


def of_caller(path: Path, given: tuple[Any, Any, Any]) -> Any:
    """The caller's container or object. `given`: positional arguments, keyword arguments, and the objects in them by number."""
    holder: Any = given
    for place, key in enumerate(path):
        if path[0] == 2 and place == 2:
            holder = holder if key == ITEMS else attributes_of(holder)[key]  # type: ignore[index]
        else:
            holder = holder[key]
    return holder


def put_in_argument(effect: Effect, holder: Any, value: Any) -> None:
    """Write to the caller's container or tensor what the trace wrote to its copy."""
    if isinstance(holder, torch.Tensor):
        holder = vars(holder)
    if effect.key is ABSENT:
        holder.clear()
        holder.extend(value)
    elif value is ABSENT:
        del holder[effect.key]
    else:
        holder[effect.key] = value


def _put(value: Any) -> None:
    raise AssertionError("an argument's container is known when the program is called")


_put_whole = _put


def _content(container: Any) -> dict[Any, Any]:
    return dict(container) if isinstance(container, dict) else dict(enumerate(container))


def _walk(value: Any, path: Path, apart: frozenset[int]) -> Iterator[tuple[Path, Any]]:
    """The containers and tensors in `value`, but for those with the ids `apart`."""
    if id(value) in apart:
        return
    if isinstance(value, (dict, list, collections.deque, tuple, torch.Tensor)) and not isinstance(value, torch.Size):
        yield path, value
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _walk(item, (*path, key), apart)
    elif isinstance(value, (list, tuple, collections.deque)):
        for index, item in enumerate(value):
            yield from _walk(item, (*path, index), apart)


def shared_containers(args: Any, kwargs: Any) -> tuple[tuple[int, int], ...]:
    """Which of the lists and dicts among the arguments are one: of each but the first the number, and that of the first."""
    numbers: dict[int, int] = {}
    found: list[tuple[int, int]] = []

    def walk(value: Any) -> None:
        if isinstance(value, _MUTABLE):
            number = len(numbers) + len(found)
            if id(value) in numbers:
                found.append((number, numbers[id(value)]))
                return
            numbers[id(value)] = number
        if isinstance(value, (*_MUTABLE, tuple)):
            for part in value.values() if isinstance(value, dict) else value:
                walk(part)

    walk((args, kwargs))
    return tuple(found)


def require_one_way(args: Any, kwargs: Any, reads: Recording | None, effects: Sequence[Effect]) -> None:
    """Raise TraceError if a list or dict among the arguments, which the trace had a copy of, is also reached otherwise, and written to."""
    for effect in effects:
        path = effect.holder
        holder = of_caller(path, (args, kwargs, ())) if isinstance(path, tuple) and path[0] != 2 else path
        if (
            isinstance(holder, _MUTABLE)
            and reads is not None
            and reads.has_met(holder)
            and (isinstance(path, tuple) or _lies_in((args, kwargs), holder))
        ):
            what = (
                f"a {type(holder).__name__} among the arguments is also reached as {reads.name_of(holder)}, and the function writes to it"
            )
            raise TraceError(
                message(
                    what,
                    "arguments are copied during a trace, so a write to one would not be visible in the other",
                    fix="use it in one way only: as an argument, or by name",
                )
            )


def _lies_in(value: Any, container: Any) -> bool:
    if value is container:
        return True
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple, collections.deque)) else ()
    return any(_lies_in(part, container) for part in parts)


def with_shared(copy: Any, model: Any, copies: dict[int, Any] | None = None) -> Any:
    """A copy of arguments in which those lists and dicts are one that are one in `model`."""
    copies = {} if copies is None else copies
    if isinstance(model, _MUTABLE) and type(copy) is type(model):
        if id(model) not in copies:
            copies[id(model)] = copy
            for key, part in model.items() if isinstance(model, dict) else enumerate(model):
                copy[key] = with_shared(copy[key], part, copies)
        return copies[id(model)]
    if isinstance(model, tuple) and type(copy) is type(model):
        parts = [with_shared(c, m, copies) for c, m in zip(copy, model, strict=True)]
        return copy if all(map(operator.is_, parts, copy)) else tuple.__new__(type(copy), parts)
    return copy


_MUTABLE = (dict, list, collections.deque)


def bind(flat: list[Any]) -> tuple[list[Any], list[Buffer], list[torch.Tensor]]:
    """Arguments as the trace gets them: whole tensors as they are, views as tensors of their own, the rest unchanged."""
    bound: list[Any] = []
    buffers: list[Buffer] = []
    hosts: list[torch.Tensor] = []
    for value in flat:
        if is_device_tensor(value):
            bound.append(own_storage(value))
            buffers.append(buffer_of(bound[-1]))
        else:
            if isinstance(value, torch.Tensor) and value.device.type == "cpu":
                _require_dense(value)
                hosts.append(value)
                value = _with_attributes(value.as_subclass(HostArgument), value)
            bound.append(value)
    return bound, list(dict.fromkeys(buffers)), hosts


def _require_dense(argument: torch.Tensor) -> None:
    if argument.layout != torch.strided or argument.is_nested:
        kind = "nested" if argument.is_nested else str(argument.layout).removeprefix("torch.")
        what = f"an argument of the compiled function is a tensor of layout {kind}, and device 'jax' has only dense tensors"
        fix = "torch.nested.to_padded_tensor(x, 0.0)" if argument.is_nested else "pass x.to_dense(), or let the function close over x"
        raise TraceError(message(what, fix=fix))


@dataclass(frozen=True)
class BoundArguments:
    """The arguments of a call as a trace has them.

    Attributes:
        leaves: what stands for each leaf.
        buffers, hosts: of the device tensors, and the CPU tensors.
        call: positional and keyword arguments.
        objects: those in them that hold tensors.
        containers: the dicts, lists and objects in them.
        is_stacked: they are the first of a stack each, the results will be stacks.
        owned: position among the leaves by the id of the tensor or object there.
        positions: the same by buffer.
    """

    leaves: list[Any]
    buffers: list[Buffer]
    hosts: list[torch.Tensor]
    call: tuple[tuple[Any, ...], dict[str, Any]]
    objects: list[Any]
    containers: ArgumentContainers
    is_stacked: bool
    owned: dict[int, int]
    positions: dict[Buffer, int]

    @staticmethod
    def of(
        args: Any, kwargs: Any, tree: Tree, bound: tuple[list[Any], list[Buffer], list[torch.Tensor]], is_stacked: bool
    ) -> BoundArguments:
        """Those for a call with `args` and `kwargs`, which `tree` takes apart. `bound`: see `bind`."""
        leaves, buffers, hosts = bound
        call, objects = unflatten(leaves, tree)
        call = with_shared(call, (args, kwargs))
        first = tree.root.objects.count(None) if is_stacked else 0  # what objects hold is no stack
        owned = {id(leaves[i]): i for i in range(first, len(leaves)) if not isinstance(leaves[i], PLAIN)}
        positions = {buffer_of(t): i for i, t in enumerate(leaves) if is_device_tensor(t)}
        return BoundArguments(leaves, buffers, hosts, call, objects, ArgumentContainers(call, objects), is_stacked, owned, positions)


def own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if it shows its whole storage, else a tensor of its own with the view's value."""
    buffer = buffer_of(tensor)
    shows_root = tensor.shape == buffer.shape and tensor.is_contiguous() and not tensor.storage_offset()
    if shows_root and (buffer.value is None or is_whole(tensor, buffer)):
        return tensor
    with exact_dtypes():
        value = load(tensor)
        host = host_values(buffer)
        if host is not None and value.dtype == host.dtype:
            note_sent(value, window(host, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())))
        return _with_attributes(wrap(value), tensor).requires_grad_(tensor.requires_grad)


def _with_attributes(tensor: torch.Tensor, model: torch.Tensor) -> torch.Tensor:
    """`tensor` with the attributes that Python code gave to `model`."""
    vars(tensor).update(attributes_of(model) or ())
    return tensor
