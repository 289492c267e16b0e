"""How one step's state goes into the objects of a program: first compared and asked for, changed only when all was read.

`walk` goes through the program's state and the saved one together. It returns what is to be done at the end; whatever does
not fit (a name, a shape, a dtype) is an error before the first value changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import mesh
from spmd.base._convert import exact_dtypes, host_tensor, to_numpy_dtype
from spmd.base._errors import CheckpointError, message
from spmd.checkpoint import _tree
from spmd.checkpoint._collect import is_plain_optimizer, is_state_object, join
from spmd.checkpoint._optimizer import plan_optimizer
from spmd.checkpoint._plan_entries import Finish, Ref, layout_of, some, unfit
from spmd.checkpoint._read import Reader
from spmd.checkpoint._tree import Node
from spmd.device._storage import Buffer, buffer_of, is_whole, store, wrap_host


@dataclass
class Plan:
    """One step on its way into a program.

    Attributes:
        reader: where the values come from.
        local: this process's own nodes, by path.
        cast: whether arrays may be converted to the program's dtypes.
        names: the parameters' names in the program's modules, by id.
    """

    reader: Reader
    local: Mapping[str, Node]
    cast: bool
    names: Mapping[int, str]
    _filled: dict[Buffer, int] = field(default_factory=dict[Buffer, int])

    def walk(self, target: Any, node: Node, path: str) -> Finish:
        """What is to be done for `target`; it returns the restored value.

        Raises:
            CheckpointError: the saved state does not fit the program's.
        """
        if isinstance(target, torch.nn.Module):
            return self._module(target, _entries(node, path), path)
        if is_plain_optimizer(target):
            return plan_optimizer(self, target, _tree.decode(node, Ref), path)
        if is_state_object(target):
            value = self.value(self.local.get(path, node) if getattr(target, "per_process", False) else node)
            return lambda: (target.load_state_dict(value()), target)[1]
        if _tree.is_array(target):
            return self.array(target, _ref(node, path), path)
        if isinstance(target, dict):
            return self._dict(target, _entries(node, path), path)
        if isinstance(target, list | tuple):
            return self._sequence(target, node, path)
        return self.value(node)

    def value(self, node: Node) -> Finish:
        """The saved value as it was, tensors of the device still on the host."""

        def ask(number: int, kind: str) -> None:
            self.reader.want(number, None)

        _tree.decode(node, ask)
        return lambda: _tree.decode(node, self._fresh)

    def shape(self, ref: Ref) -> tuple[int, ...]:
        """The array's shape."""
        return self.reader.entry(ref.number).shape

    def fresh(self, ref: Ref) -> Finish:
        """A new array of what it was."""
        self.reader.want(ref.number, None)
        return lambda: self._fresh(*ref)

    def _fresh(self, number: int, kind: str) -> Any:
        host = self.reader.host(number)
        if kind == "device":
            return wrap_host(host)
        if kind == "torch":
            return host_tensor(host)
        if kind == "jax":
            with exact_dtypes():
                return jnp.asarray(host)
        return host[()] if kind == "scalar" else host

    def placed(self, ref: Ref, annotation: mesh.ShardingSpec | None, sharding: jax.sharding.Sharding) -> Finish:
        """A new tensor of the device, laid out."""
        self.reader.want(ref.number, sharding)
        entry = self.reader.entry(ref.number)

        def finish() -> torch.Tensor:
            tensor = wrap_host(np.broadcast_to(np.zeros((), _tree.numpy_dtype(entry.dtype)), entry.shape))
            buffer_of(tensor).annotation = annotation
            buffer_of(tensor).set(self.reader.sharded(ref.number, sharding))
            return tensor

        return finish

    def _dict(self, target: dict[Any, Any], saved: dict[Any, Node], path: str) -> Finish:
        """An entry that the program does not ask for is not read; one that is not there is an error."""
        missing = [key for key in target if key not in saved]
        if missing:
            raise unfit(path, f"the checkpoint has no {some(missing)}", f"it has {some(list(saved))}")
        parts = {key: self.walk(value, saved[key], join(path, key)) for key, value in target.items()}
        kind: Any = type(target)
        return lambda: kind((key, finish()) for key, finish in parts.items())

    def _sequence(self, target: Any, node: Node, path: str) -> Finish:
        items = next(iter(node.values()), None) if isinstance(node, dict) and node.keys() & {"list", "tuple"} else None
        if not isinstance(items, list) or len(items) != len(target):
            found = "not a list" if not isinstance(items, list) else f"a list of {len(items)}"
            raise unfit(path, f"the program has a list of {len(target)}", f"the checkpoint has {found}")
        parts = [self.walk(value, item, join(path, number)) for number, (value, item) in enumerate(zip(target, items, strict=True))]
        kind: Any = type(target)
        if hasattr(target, "_fields"):
            return lambda: kind(*(finish() for finish in parts))
        return lambda: kind(finish() for finish in parts)

    def _module(self, module: torch.nn.Module, saved: dict[Any, Node], path: str) -> Finish:
        own = module.state_dict(keep_vars=True)
        missing, extra = [name for name in own if name not in saved], [name for name in saved if name not in own]
        if missing or extra:
            details = [f"not in the checkpoint: {some(missing)}"] * bool(missing) + [f"not in the module: {some(extra)}"] * bool(extra)
            raise unfit(path, *details)
        parts: list[Finish] = []
        for name, value in own.items():
            if isinstance(value, torch.Tensor):
                parts.append(self.array(value, _ref(saved[name], f"{path}/{name}"), f"{path}/{name}"))
            else:
                owner = module.get_submodule(name.rpartition(".")[0])
                parts.append(_extra_state(owner, self.value(saved[name])))
        return lambda: ([finish() for finish in parts], module)[1]

    def array(self, target: Any, ref: Ref, path: str) -> Finish:
        """Values for an array of the program: tensors are filled in place, other arrays are made anew."""
        entry = self.reader.entry(ref.number)
        dtype = _dtype_of(target)
        saved = _tree.numpy_dtype(entry.dtype)
        if tuple(target.shape) != entry.shape:
            raise unfit(path, f"the program's shape is {tuple(target.shape)}", f"the checkpoint's is {entry.shape}")
        if dtype != saved and not self.cast:
            text = f"the program's dtype is {_tree.dtype_name(dtype)}", f"the checkpoint's is {entry.dtype}"
            raise unfit(path, *text, fix="convert the program's tensor, or allow it: restore(..., cast=True)")
        if isinstance(target, torch.Tensor):
            return self._tensor(target, ref.number, None if dtype == saved else dtype)
        if isinstance(target, jax.Array):
            self.reader.want(ref.number, target.sharding)
            return lambda: self.reader.sharded(ref.number, target.sharding, dtype)
        self.reader.want(ref.number, None)
        if isinstance(target, np.generic):
            return lambda: self.reader.host(ref.number).astype(dtype)[()]
        return lambda: self.reader.host(ref.number).astype(dtype, copy=False)

    def _tensor(self, target: torch.Tensor, number: int, dtype: np.dtype[Any] | None) -> Finish:
        if target.device.type == "meta":
            raise CheckpointError(
                message("a tensor on device 'meta' cannot hold a checkpoint's values", fix="model.to_empty(device='jax') first")
            )
        if target.device.type != "jax":
            self.reader.want(number, None)
            return lambda: (_copy_to_host_tensor(target, self.reader.host(number)), target)[1]
        buffer = buffer_of(target)
        if is_whole(target, buffer) and self._is_filled(buffer, number):
            return lambda: target
        sharding = layout_of(buffer) if is_whole(target, buffer) else None
        self.reader.want(number, sharding)

        def finish() -> torch.Tensor:
            if sharding is not None:
                buffer.set(self.reader.sharded(number, sharding, dtype))
            else:
                _put(target, self.reader.host(number).astype(_dtype_of(target), copy=False))
            return target

        return finish

    def _is_filled(self, buffer: Buffer, number: int) -> bool:
        """True if another name of a tied tensor brings the same values already; an error if it brings others."""
        if buffer not in self._filled:
            self._filled[buffer] = number
            return False
        one, other = self.reader.entry(self._filled[buffer]), self.reader.entry(number)
        if one is not other and [(p.box, p.crc32) for p in one.pieces] != [(p.box, p.crc32) for p in other.pieces]:
            raise unfit(
                other.name,
                f"the program ties it to {one.name!r}",
                "the checkpoint has different values for the two",
                fix="untie them in the program, or restore a checkpoint of the tied model",
            )
        return True


def _put(target: torch.Tensor, host: np.ndarray[Any, Any]) -> None:
    """Fill a tensor that lies on no mesh: it stays on the host until it is used or marked. A view is written through."""
    buffer = buffer_of(target)
    if not is_whole(target, buffer):
        with exact_dtypes():
            store(target, jnp.asarray(host))
        return
    buffer.set(None)
    buffer.host = host


def _copy_to_host_tensor(target: torch.Tensor, host: np.ndarray[Any, Any]) -> None:
    with torch.no_grad():
        target.copy_(host_tensor(host))


def _extra_state(owner: torch.nn.Module, value: Finish) -> Finish:
    return lambda: owner.set_extra_state(value())


def _dtype_of(target: Any) -> np.dtype[Any]:
    return to_numpy_dtype(target.dtype) if isinstance(target, torch.Tensor) else np.dtype(target.dtype)


def _ref(node: Node, path: str) -> Ref:
    if not isinstance(node, dict) or "array" not in node:
        raise unfit(path, "the program has an array", "the checkpoint has none there")
    return _tree.decode(node, Ref)


def _entries(node: Node, path: str) -> dict[Any, Node]:
    """The entries of a saved dict, not decoded."""
    pairs = node.get("dict", node.get("odict")) if isinstance(node, dict) else None
    if not isinstance(pairs, list):
        raise unfit(path, "the program has a dict or a module", "the checkpoint has something else there")
    found: dict[Any, Node] = {}
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2:
            raise _tree.malformed("an entry of its state is no pair")
        found[pair[0] if isinstance(pair[0], str) else _tree.decode(pair[0], Ref)] = pair[1]
    return found


__all__ = ["Plan"]
