"""Plans restoring a step into the objects of a program: compares all of it first, and changes objects only after all was read.

`Plan.walk` traverses the program's state and the saved state together, requests arrays from the reader, and returns an action
that changes the objects. A mismatch (a name, a shape, a dtype) is an error before the first value changes.
"""

from __future__ import annotations

import copy
from collections import Counter
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
from spmd.checkpoint._plain_kinds import require_kind, require_mapping
from spmd.checkpoint._plan_entries import Finish, Ref, first_names, layout_of, mismatch
from spmd.checkpoint._read import Reader
from spmd.checkpoint._tree import Node
from spmd.device._storage import Buffer, buffer_of, is_whole, store, wrap_host


@dataclass
class Plan:
    """A plan to restore one step.

    Attributes:
        reader: reads the step's arrays.
        local: nodes of per-process objects on this process, by path.
        cast: whether arrays may be converted to the program's dtypes.
        names: names of the parameters of the program's modules, by `id`.
    """

    reader: Reader
    local: Mapping[str, Node]
    cast: bool
    names: Mapping[int, str]
    _filled: dict[Buffer, int] = field(default_factory=dict[Buffer, int])

    def walk(self, target: Any, node: Node, path: str) -> Finish:
        """Plan restoring `target` from `node`.

        Returns:
            An action that changes `target` and returns the restored value.

        Raises:
            CheckpointError: the saved state does not match the program's.
        """
        if isinstance(target, torch.nn.Module):
            return self._module(target, _entries(node, path), path)
        if is_plain_optimizer(target):
            return plan_optimizer(self, target, _tree.decode(node, Ref), path)
        if is_state_object(target):
            node = self.local.get(path, node) if getattr(target, "per_process", False) else node
            require_mapping(target, _tree.decode(node, Ref), self.reader, path)
            value = self.value(node)
            return lambda: (target.load_state_dict(value()), target)[1]
        if _tree.is_array(target):
            return self.array(target, _ref(node, path), path)
        if isinstance(target, dict) and not isinstance(target, Counter):
            return self._dict(target, _entries(node, path), path)
        if isinstance(target, list | tuple):
            return self._sequence(target, node, path)
        require_kind(target, _tree.decode(node, Ref), self.reader, path)
        return self.value(node)

    def value(self, node: Node) -> Finish:
        """Plan returning the saved value of a node, as new objects. Values of device tensors stay on the host until they are used."""

        def want(number: int, kind: str) -> None:
            self.reader.want(number, None)

        _tree.decode(node, want)
        return lambda: _tree.decode(node, self._fresh)

    def shape(self, ref: Ref) -> tuple[int, ...]:
        """The global shape of a saved array."""
        return self.reader.entry(ref.number).shape

    def fresh(self, ref: Ref) -> Finish:
        """Plan a new array of the kind that was saved."""
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
        """Plan a new device tensor with this annotation and sharding."""
        self.reader.want(ref.number, sharding)
        entry = self.reader.entry(ref.number)

        def finish() -> torch.Tensor:
            tensor = wrap_host(np.broadcast_to(np.zeros((), _tree.numpy_dtype(entry.dtype)), entry.shape))
            buffer_of(tensor).annotation = annotation
            buffer_of(tensor).set(self.reader.sharded(ref.number, sharding))
            return tensor

        return finish

    def _dict(self, target: dict[Any, Any], saved: dict[Any, Node], path: str) -> Finish:
        """Plan a dict. Saved entries that `target` does not have are not read. A missing entry is an error."""
        missing = [key for key in target if key not in saved]
        if missing:
            raise mismatch(path, f"the checkpoint has no {first_names(missing)}", f"it has {first_names(list(saved))}")
        parts = {key: self.walk(value, saved[key], join(path, key)) for key, value in target.items()}

        def finish() -> Any:
            made = copy.copy(target)  # a defaultdict keeps its factory
            made.clear()
            made.update((key, part()) for key, part in parts.items())
            return made

        return finish

    def _sequence(self, target: Any, node: Node, path: str) -> Finish:
        items = next(iter(node.values()), None) if isinstance(node, dict) and node.keys() & {"list", "tuple"} else None
        if not isinstance(items, list) or len(items) != len(target):
            found = "not a list" if not isinstance(items, list) else f"a list of {len(items)}"
            raise mismatch(path, f"the program has a list of {len(target)}", f"the checkpoint has {found}")
        parts = [self.walk(value, item, join(path, number)) for number, (value, item) in enumerate(zip(target, items, strict=True))]
        kind: Any = type(target)
        if hasattr(target, "_fields"):
            return lambda: kind(*(finish() for finish in parts))
        return lambda: kind(finish() for finish in parts)

    def _module(self, module: torch.nn.Module, saved: dict[Any, Node], path: str) -> Finish:
        """Plan a module. The names in its `state_dict()` must be the saved ones."""
        own = module.state_dict(keep_vars=True)
        missing, extra = [name for name in own if name not in saved], [name for name in saved if name not in own]
        if missing or extra:
            details = [f"not in the checkpoint: {first_names(missing)}"] if missing else []
            details += [f"not in the module: {first_names(extra)}"] if extra else []
            raise mismatch(path, *details)
        parts: list[Finish] = []
        for name, value in own.items():
            if isinstance(value, torch.Tensor):
                parts.append(self.array(value, _ref(saved[name], f"{path}/{name}"), f"{path}/{name}"))
            else:
                owner = module.get_submodule(name.rpartition(".")[0])
                parts.append(_extra_state(owner, self.value(saved[name])))
        return lambda: ([finish() for finish in parts], module)[1]

    def array(self, target: Any, ref: Ref, path: str) -> Finish:
        """Plan restoring an array: a tensor is filled in place, any other array is replaced by a new one."""
        entry = self.reader.entry(ref.number)
        dtype = _dtype_of(target)
        saved = _tree.numpy_dtype(entry.dtype)
        if tuple(target.shape) != entry.shape:
            raise mismatch(path, f"the program's shape is {tuple(target.shape)}", f"the checkpoint's is {entry.shape}")
        if dtype != saved and not self.cast:
            text = f"the program's dtype is {_tree.dtype_name(dtype)}", f"the checkpoint's is {entry.dtype}"
            raise mismatch(path, *text, fix="convert the program's tensor, or allow it: restore(..., cast=True)")
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
        """Plan filling a tensor in place. `dtype`: the dtype to convert to, or None."""
        if target.device.type == "meta":
            raise CheckpointError(
                message("a tensor on device 'meta' cannot hold values of a checkpoint", fix="model.to_empty(device='jax') first")
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
                _fill_from_host(target, self.reader.host(number).astype(_dtype_of(target), copy=False))
            return target

        return finish

    def _is_filled(self, buffer: Buffer, number: int) -> bool:
        """Whether another name of a tied tensor already restores it. Raises a CheckpointError if the saved values of the two differ."""
        if buffer not in self._filled:
            self._filled[buffer] = number
            return False
        one, other = self.reader.entry(self._filled[buffer]), self.reader.entry(number)
        if one is not other and [(p.box, p.crc32) for p in one.pieces] != [(p.box, p.crc32) for p in other.pieces]:
            raise mismatch(
                other.name,
                f"the program ties it to {one.name!r}",
                "the checkpoint has different values for the two",
                fix="untie them in the program, or restore a checkpoint of the tied model",
            )
        return True


def _fill_from_host(target: torch.Tensor, host: np.ndarray[Any, Any]) -> None:
    """Fill a tensor that is not on a mesh. Its values stay on the host until it is used or marked. A view writes to its base."""
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
        raise mismatch(path, "the program has an array", "the checkpoint has a value of another type")
    return _tree.decode(node, Ref)


def _entries(node: Node, path: str) -> dict[Any, Node]:
    """The entries of the node of a dict, with decoded keys and undecoded values."""
    pairs = node.get("dict", node.get("odict")) if isinstance(node, dict) else None
    if not isinstance(pairs, list):
        raise mismatch(path, "the program has a dict or a module", "the checkpoint has a value of another type")
    found: dict[Any, Node] = {}
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2:
            raise _tree.malformed("an entry of a dict in its state is not a pair")
        found[pair[0] if isinstance(pair[0], str) else _tree.decode(pair[0], Ref)] = pair[1]
    return found


__all__ = ["Plan"]
