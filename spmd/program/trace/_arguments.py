"""The arguments of a trace, and writes to them: what the traced function writes to a dict, list or tensor attribute among its arguments,
every call writes to the caller's object."""

from __future__ import annotations

import collections
import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from spmd.base._convert import exact_dtypes, to_numpy_dtype
from spmd.base._errors import TraceError, message
from spmd.device._host_copies import HostCopy, held_of, is_host_copy
from spmd.device._storage import Buffer, buffer_of, is_device_tensor, is_whole, load, wrap_strided
from spmd.device._uploaded import host_values, note_sent, window
from spmd.program.find._objects import ITEMS, Flat, contents_of, unflatten
from spmd.program.find._static import attributes_of
from spmd.program.reads import ABSENT, PLAIN, Effect, Recording, is_same_content, shown_key
from spmd.program.trace._host_arguments import host_argument
from spmd.program.trace._memory_order import memory_order

Path = tuple[Any, ...]


class ArgumentContainers:
    """The containers and objects among the arguments that the trace gets. Each is a copy of the caller's.

    Attributes:
        ids: ids of the copies, and of the attribute dicts of the objects among them.
        paths: by id of a copy, the path of the caller's container or object in the arguments.
        tensors: the tensors among the arguments and in the objects.
        originals: by id of a copy (also of a tensor), the caller's object.
    """

    def __init__(self, call: tuple[tuple[Any, ...], dict[str, Any]], objects: list[Any], callers: tuple[Any, Any, list[Any]]) -> None:
        """`call`, `objects`: the copies. `callers`: the caller's positional and keyword arguments, and the objects in them."""
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
        self._callers = callers
        self._contents = [(original, copy, contents_of(copy)) for original, copy in zip(callers[2], objects, strict=True)]
        self.originals: dict[int, Any] = {i: one for i, path in self.paths.items() if isinstance(one := of_caller(path, callers), _MUTABLE)}
        self.originals.update((id(copy), original) for original, copy, _ in self._contents)

    def of_tensors(self, effects: Iterable[Effect]) -> list[Effect]:
        """The effects. Those that write attributes of a tensor argument write the caller's tensor's; those without a change are dropped."""
        found: list[Effect] = []
        for effect in effects:
            path = self._of_tensors.get(id(effect.holder))
            if path is None:
                found.append(effect)
            elif not (effect.is_content and is_same_content(effect.before, effect.value)):
                found.append(replace(effect, holder=path, put=_put))
        return found

    def effects(self) -> list[Effect]:
        """The writes of the trace to these containers.

        Raises:
            TraceError: it has set an attribute of one.
        """
        found: list[Effect] = []
        for path, container, before in self._found:
            _require_same_attributes(container, self.originals[id(container)])
            now = _content(container)
            if now.keys() != before.keys() and not isinstance(container, dict):
                found.append(Effect(path, ABSENT, "an argument", before, list(container), _put_whole, is_content=True))
                continue
            staying = set(_staying(before, now)) if isinstance(container, dict) else now
            changed = [key for key, value in now.items() if key not in staying or value is not before[key]]
            for key, value in (*((k, ABSENT) for k in before if k not in staying), *((k, now[k]) for k in changed)):
                found.append(Effect(path, key, f"an argument[{shown_key(key)}]", before.get(key, ABSENT), value, _put))
        return found

    def require_one_way(self, reads: Recording, effects: Sequence[Effect]) -> None:
        """Raise TraceError if the function writes to a container or object among the arguments that it also reaches by another name.

        The trace has a copy of an argument, so the write would change only one of the two.
        """
        written = {id(of_caller(e.holder, self._callers) if isinstance(e.holder, tuple) else e.holder) for e in effects}
        written.update(id(original) for original, copy, before in self._contents if not _is_same_content(contents_of(copy), before))
        for holder in self.originals.values():
            parts = [part for part in (holder, attributes_of(holder)) if part is not None]
            if any(id(part) in written for part in parts) and any(map(reads.has_met, parts)):
                what = f"{type(holder).__name__} among the arguments is also reached as {reads.name_of(holder)}"
                raise TraceError(
                    message(
                        f"{'an' if what[0] in 'aeiouAEIOU' else 'a'} {what}, and the function writes to it",
                        "a trace copies its arguments, so a write to one would not be visible in the other",
                        fix="use it in one way only: as an argument, or by name",
                    )
                )


def of_caller(path: Path, given: tuple[Any, Any, Any]) -> Any:
    """The caller's container or object at `path`.

    Args:
        path: 0, 1 or 2 for the element of `given`, then a key per level.
        given: positional arguments, keyword arguments, and the list of the objects in them.
    """
    holder: Any = given
    for place, key in enumerate(path):
        if path[0] == 2 and place == 2:
            holder = holder if key == ITEMS else attributes_of(holder)[key]  # type: ignore[index]
        else:
            holder = holder[key]
    return holder


def put_in_argument(effect: Effect, holder: Any, value: Any) -> None:
    """Repeat a write to a copy on `holder`, the caller's container or tensor."""
    if isinstance(holder, torch.Tensor):
        holder = vars(holder)
    if effect.key is ABSENT:
        holder.clear()
        (holder.update if isinstance(holder, dict) else holder.extend)(value)
    elif value is ABSENT:
        del holder[effect.key]
    else:
        holder[effect.key] = value


def _put(value: Any) -> None:
    raise AssertionError("a write to an argument needs the call's container: use put_in_argument")


_put_whole = _put


def _content(container: Any) -> dict[Any, Any]:
    return dict(container) if isinstance(container, dict) else dict(enumerate(container))


def _staying(before: dict[Any, Any], now: dict[Any, Any]) -> Iterator[Any]:
    """The first keys of `now` that are keys of `before` in the same order. The others are removed, and put last in the order of `now`."""
    remaining = iter(before)
    return itertools.takewhile(lambda key: any(key is other for other in remaining), now)


def _require_same_attributes(copy: Any, original: Any) -> None:
    """Raise TraceError if the trace has set an attribute of an argument that is an OrderedDict or a defaultdict."""
    name = None
    if type(copy) is collections.OrderedDict:  # the copy starts without attributes
        name = next(iter(attributes_of(copy) or ()), None)
    elif type(copy) is collections.defaultdict and copy.default_factory is not original.default_factory:
        name = "default_factory"
    if name is not None:
        raise TraceError(
            message(
                f"the function sets the attribute '{name}' of {type(copy).__name__} among its arguments",
                "a trace copies such an argument, and a call repeats only the writes to its entries",
                fix="set it outside of the function, or pass an object that has the container as an attribute",
            )
        )


def _walk(value: Any, path: Path, apart: frozenset[int]) -> Iterator[tuple[Path, Any]]:
    """The path and value of each container and tensor in `value`, without those whose id is in `apart`."""
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


def containers_among(values: Iterable[Any]) -> list[Any]:
    """The lists, dicts and deques in `values`, in order. One that occurs again is listed again, but not what it holds."""
    found: list[Any] = []
    seen: set[int] = set()

    def walk(value: Any) -> None:
        if isinstance(value, _MUTABLE):
            found.append(value)
            if id(value) in seen:
                return
            seen.add(id(value))
        if isinstance(value, (*_MUTABLE, tuple)):
            for part in value.values() if isinstance(value, dict) else value:
                walk(part)

    for value in values:
        walk(value)
    return found


def _is_same_content(now: dict[str, Any], before: dict[str, Any]) -> bool:
    """Whether the contents of an object (see `contents_of`) hold the same values."""
    if now.keys() != before.keys():
        return False
    pairs = [(now[name], before[name]) for name in now if name != ITEMS]
    items = now.get(ITEMS), before.get(ITEMS)
    return all(a is b for a, b in pairs) and (items[0] is None or is_same_content(*items))


def with_shared(copy: Any, model: Any, copies: dict[int, Any] | None = None) -> Any:
    """`copy` with the identities of `model`: lists and dicts that are one object in `model` are one object in the result."""
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
    """The argument leaves that a trace gets: copies of inputs for CPU tensors, others unchanged (views have their own storage already).

    Returns:
        The leaves, the buffers of the device tensors (each once), and the CPU tensors.

    Raises:
        TraceError: a CPU tensor has no such copy (see `host_argument`).
    """
    bound: list[Any] = []
    buffers: list[Buffer] = []
    hosts: list[torch.Tensor] = []
    copies: dict[int, Any] = {}
    for value in flat:
        if is_device_tensor(value):
            bound.append(value)
            buffers.append(buffer_of(value))
        else:
            if isinstance(value, torch.Tensor) and value.device.type == "cpu":
                hosts.append(value)
                if id(value) not in copies:
                    copies[id(value)] = host_argument(value)
                value = copies[id(value)]
            bound.append(value)
    return bound, list(dict.fromkeys(buffers)), hosts


@dataclass(frozen=True)
class BoundArguments:
    """The arguments that a trace gets in place of a call's.

    Attributes:
        leaves: the placeholder of each leaf.
        buffers: buffers of the device tensors.
        hosts, copies: the CPU tensors, and what the trace gets for each.
        call: positional and keyword arguments.
        objects: the objects in the arguments that have tensor attributes.
        containers: the dicts, lists and objects in the arguments.
        is_stacked: each argument is the first element of a stack, and results will be stacked.
        owned: position among the leaves, by id of the tensor or object there.
        positions: position among the leaves, by buffer.
    """

    leaves: list[Any]
    buffers: list[Buffer]
    hosts: list[torch.Tensor]
    copies: list[HostCopy]
    call: tuple[tuple[Any, ...], dict[str, Any]]
    objects: list[Any]
    containers: ArgumentContainers
    is_stacked: bool
    owned: dict[int, int]
    positions: dict[Buffer, int]

    @property
    def held(self) -> list[Buffer]:
        """The buffers of `copies`."""
        return [buffer_of(copy.held) for copy in self.copies]

    @staticmethod
    def of(
        args: Any, kwargs: Any, flat: Flat, bound: tuple[list[Any], list[Buffer], list[torch.Tensor]], is_stacked: bool
    ) -> BoundArguments:
        """The placeholders for a call with `args` and `kwargs`.

        Args:
            flat: `(args, kwargs)`, flattened.
            bound: the result of `bind`.
            is_stacked: see the class.
        """
        leaves, buffers, hosts = bound
        call, objects = unflatten(leaves, flat.tree)
        call = with_shared(call, (args, kwargs))
        first = flat.tree.root.objects.count(None) if is_stacked else 0  # tensors in objects are not stacked
        owned = {id(leaves[i]): i for i in range(first, len(leaves)) if not isinstance(leaves[i], PLAIN)}
        held = map(held_of, leaves)
        positions = {buffer_of(t): i for i, t in enumerate(held) if is_device_tensor(t)}
        copies = [leaf for leaf in leaves if is_host_copy(leaf)]
        containers = ArgumentContainers(call, objects, (args, kwargs, flat.objects))
        copied = zip(leaves, flat.leaves, strict=True)
        containers.originals.update((id(copy), leaf) for copy, leaf in copied if copy is not leaf and isinstance(leaf, torch.Tensor))
        return BoundArguments(leaves, buffers, hosts, copies, call, objects, containers, is_stacked, owned, positions)


def own_storage(tensor: torch.Tensor, is_stack: bool = False) -> torch.Tensor:
    """The tensor itself if it is all of its storage, in any order of dims; else a new tensor of the same values on a storage of its own.

    A function cannot tell the two by their strides, and the storage holds only the values and the gaps between them.

    Args:
        is_stack: the first dim is the step (`steps_per_call`), and is the first dim of the storage.
    """
    buffer = buffer_of(tensor)
    size, stride, offset = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
    if not offset and size == buffer.shape and tensor.is_contiguous() and (buffer.value is None or is_whole(tensor, buffer)):
        return tensor
    order = memory_order(size, stride, is_stack)
    is_plain = not offset and not tensor.is_conj() and not tensor.is_neg() and to_numpy_dtype(tensor.dtype) == buffer.dtype
    if is_plain and stride == order.stride and order.is_all_of(buffer.shape, is_stack):
        return tensor
    with exact_dtypes(), torch.no_grad():
        shown = tensor.detach().as_strided(order.size, order.steps)
        root = order.filled(load(shown))
        host = host_values(buffer)
        known = None if host is None or host.dtype != root.dtype else window(host, order.size, order.steps, offset)
        if known is not None:
            note_sent(root, order.filled(known))
        return _with_attributes(wrap_strided(root, size, order.stride), tensor).requires_grad_(tensor.requires_grad)


def _with_attributes(tensor: torch.Tensor, model: torch.Tensor) -> torch.Tensor:
    """`tensor`, with the Python attributes of `model` added."""
    vars(tensor).update(attributes_of(model) or ())
    return tensor
