"""What a traced function does to the dicts and lists that are its arguments, every call does to the caller's."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any

import torch

from spmd.base._convert import exact_dtypes
from spmd.device._storage import Buffer, buffer_of, is_device_tensor, is_whole, load, wrap
from spmd.program.reads import ABSENT, Effect
from spmd.program.trace._host_values import HostArgument

Path = tuple[Any, ...]


class ArgumentContainers:
    """The dicts and lists among the arguments as the trace gets them, each a copy of the caller's.

    Attributes:
        ids: of the copies, and of the dicts of attributes of the objects among them.
    """

    def __init__(self, call: tuple[tuple[Any, ...], dict[str, Any]], objects: list[Any]) -> None:
        self._found = [(path, container, _content(container)) for path, container in _walk(call[0], (0,))]
        self._found += [(path, container, _content(container)) for name, v in call[1].items() for path, container in _walk(v, (1, name))]
        held = [container for o in objects for _, container in _walk(vars(o), ())]
        self.ids = {id(c) for _, c, _ in self._found} | {id(c) for c in (*held, *objects, *map(vars, objects), *call)}

    def effects(self) -> list[Effect]:
        """What was written to them."""
        found: list[Effect] = []
        for path, container, before in self._found:
            now = _content(container)
            if now.keys() != before.keys() and not isinstance(container, dict):
                found.append(Effect(path, ABSENT, "an argument", before, list(container), _put_whole))
                continue
            for key in [*before, *(k for k in now if k not in before)]:
                if now.get(key, ABSENT) is not before.get(key, ABSENT):
                    found.append(Effect(path, key, f"an argument[{key!r}]", before.get(key, ABSENT), now.get(key, ABSENT), _put))
        return found


def put_in_argument(effect: Effect, given: tuple[Any, ...], value: Any) -> None:
    """Write to the caller's container what the trace wrote to its copy."""
    holder: Any = given
    for key in effect.holder:
        holder = holder[key]
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


def _walk(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, (dict, list, collections.deque)):
        yield path, value
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _walk(item, (*path, key))
    elif isinstance(value, (list, tuple, collections.deque)):
        for index, item in enumerate(value):
            yield from _walk(item, (*path, index))


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
                hosts.append(value)
                value = value.as_subclass(HostArgument)
            bound.append(value)
    return bound, list(dict.fromkeys(buffers)), hosts


def own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if it shows its whole storage, else a tensor of its own with the view's value."""
    buffer = buffer_of(tensor)
    shows_root = tensor.shape == buffer.shape and tensor.is_contiguous() and not tensor.storage_offset()
    if shows_root and (buffer.value is None or is_whole(tensor, buffer)):
        return tensor
    with exact_dtypes():
        return wrap(load(tensor)).requires_grad_(tensor.requires_grad)
