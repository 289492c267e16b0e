"""Descriptions of operations in a recording: a key of everything that an operation depends on except values, and a template to run it.

For an operation that was recorded before, only the key is computed. It is compared with the keys of the operations that followed at this
point in earlier recordings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from spmd.base._exact import exactly
from spmd.device._adapter import is_wrapped_number
from spmd.device._copy import from_host
from spmd.device._deferred import ByIdentity, Deferrable
from spmd.device._indices import are_checked
from spmd.device._refusals import kind_of_number
from spmd.device._storage import Buffer, buffer_of

_COPIES = frozenset({"_to_copy", "_copy_from", "_copy_from_and_resize", "copy_"})
_PLAIN = (bool, str, torch.dtype, torch.memory_format, torch.layout, type(None))


class NotDeferrable(Exception):
    """The operation cannot be deferred and must run now, because a program cannot take one of its arguments."""


class Ref(NamedTuple):
    """A tensor argument: `place` is the index of its buffer in the recording; the rest is its view of that buffer."""

    place: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


class Number(NamedTuple):
    """A Python number of an operation that may be an input of the program; `position` counts these numbers."""

    position: int


class External(NamedTuple):
    """Description of a buffer from before the recording, at its first use.

    Attributes:
        shape, dtype: shape and dtype of the whole buffer.
        annotation: its sharding, or None.
        fill: bytes of the number that fills it, if the buffer is not on the device yet. Then it is a constant of the program.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    annotation: Any
    fill: bytes | None


def external(buffer: Buffer) -> External:
    """The description of a buffer that has a value."""
    host = buffer.host if buffer.value is None else None
    is_filled = host is not None and host.size > 0 and not host.flags.writeable and not any(host.strides)
    return External(buffer.shape, buffer.dtype, buffer.annotation, host.flat[0].tobytes() if is_filled and host is not None else None)


def on_device(operation: Deferrable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments, with 0-dim CPU tensors and CPU index tensors uploaded.

    Raises:
        NotDeferrable: the operation copies between host and device, or takes another CPU tensor.
    """
    if operation.name in _COPIES:
        raise NotDeferrable
    takes_indices = getattr(getattr(operation.kernel, "adapter", operation.kernel), "takes_indices", False)

    def moved(arg: Any, is_index: bool) -> Any:
        if isinstance(arg, torch.Tensor):
            if not arg.is_cpu or is_wrapped_number(arg):
                return arg
            if arg.dim() and not is_index:
                raise NotDeferrable
            return from_host(arg)
        return [moved(item, is_index) for item in arg] if isinstance(arg, list | tuple) and _has_tensors(arg) else arg

    args = tuple(moved(arg, takes_indices and i == 1) for i, arg in enumerate(args))
    return args, {name: moved(arg, False) for name, arg in kwargs.items()}


def _has_tensors(items: Any) -> bool:
    return any(isinstance(item, torch.Tensor) for item in items)


class KeyBuilder:
    """Builds the key of one operation.

    Attributes:
        key: everything that the operation depends on except values.
        numbers: the Python numbers among its arguments that may be inputs of the program, in order.
        has_host: whether it takes a CPU tensor that is not a Python number (see `on_device`).
    """

    __slots__ = ("_is_number", "_place_of", "has_host", "key", "numbers")

    def __init__(self, operation: Deferrable, place_of: Callable[[Buffer], int]) -> None:
        """`place_of` returns the index of a buffer in the recording, and adds the buffer if it is new."""
        self.key: list[Any] = [operation, (torch.get_default_dtype(), are_checked())]
        self.numbers: list[int | float] = []
        self.has_host = False
        self._is_number = operation.is_number
        self._place_of = place_of

    def add(self, name: int | str, arg: Any) -> None:
        """Add one argument. `name` is its position or keyword; -1 for an item of a list."""
        key = self.key
        cls = type(arg)
        if isinstance(arg, torch.Tensor):
            self._add_tensor(arg)
        elif cls is int or cls is float:
            if self._is_number(name, arg):
                self.numbers.append(arg)
                key.append(kind_of_number(arg))
            else:
                key.append((cls, exactly(arg)))
        elif isinstance(arg, _PLAIN):
            key.append((cls, arg))
        elif cls is list or cls is tuple:
            if arg and (isinstance(arg[0], torch.Tensor) or _has_tensors(arg)):
                key.append("[")
                for item in arg:
                    self.add(-1, item)
                key.append("]")
            else:
                key.append(tuple((type(item), exactly(item)) for item in arg))
        elif isinstance(arg, torch.Size):
            key.append(tuple(arg))
        elif cls is ByIdentity:
            key.append(id(arg.value))
        elif isinstance(arg, torch.device):
            if arg.type != "jax":
                raise NotDeferrable
            key.append(arg)
        elif cls is complex:
            key.append((cls, exactly(arg)))
        else:  # for example a generator, or a number that is traced
            raise NotDeferrable

    def _add_tensor(self, tensor: torch.Tensor) -> None:
        if tensor.is_cpu:
            if tensor.dim() == 0 and is_wrapped_number(tensor) and getattr(tensor, "__wrapped_number", None) is None:
                number = tensor.item()
                if type(number) in (int, float):
                    self.numbers.append(number)
                    self.key.append(kind_of_number(number))
                    return
                raise NotDeferrable
            self.has_host = True
            return
        if tensor.is_meta or tensor.is_neg() or (tensor.dtype.is_complex and tensor.is_conj()):
            raise NotDeferrable
        buffer = buffer_of(tensor)
        if buffer.dropped is not None:
            raise NotDeferrable
        place = self._place_of(buffer)
        self.key.append((place, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype))


def template(arg: Any, name: int | str, operation: Deferrable, count: list[int]) -> Any:
    """The argument with `Ref` and `Number` in place of tensors and numbers. `count` is a counter of the numbers before it."""
    cls = type(arg)
    if isinstance(arg, torch.Tensor):
        if arg.is_cpu:
            count[0] += 1
            return Number(count[0] - 1)
        return Ref(buffer_of(arg).place_in_queue, tuple(arg.shape), arg.stride(), int(arg.storage_offset()), arg.dtype)
    if (cls is int or cls is float) and operation.is_number(name, arg):
        count[0] += 1
        return Number(count[0] - 1)
    if (cls is list or cls is tuple) and _has_tensors(arg):
        return [template(item, -1, operation, count) for item in arg]
    return arg


def filled(arg: Any, tensor_of: Callable[[Ref], torch.Tensor], numbers: list[Any]) -> Any:
    """The argument for a template: references are replaced by tensors and numbers."""
    cls = type(arg)
    if cls is Ref:
        return tensor_of(arg)
    if cls is Number:
        return numbers[arg.position]
    return [filled(item, tensor_of, numbers) for item in arg] if cls is list else arg


def repeated_number(found: External) -> Any:
    """The number that fills a buffer, as a numpy scalar. See `External.fill`."""
    assert found.fill is not None
    return np.frombuffer(found.fill, found.dtype)[0]


__all__ = ["KeyBuilder", "External", "NotDeferrable", "Number", "Ref", "filled", "external", "on_device", "repeated_number", "template"]
