"""What a state consists of when it is saved: its tree as plain data, and its arrays with where their pieces lie.

A module, an optimizer, a scheduler or a loader is what its `state_dict()` says. Tensors that share a value (tied weights)
are one array. What differs between processes, and says so by `per_process = True`, is kept apart for each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import NamedSharding

from spmd.base._convert import host_array
from spmd.base._errors import CheckpointError, message
from spmd.checkpoint import _tree
from spmd.checkpoint._boxes import Box, box_of, whole
from spmd.checkpoint._manifest import MAX_NAME
from spmd.checkpoint._rng_state import RandomState
from spmd.device._storage import buffer_of, is_whole, load

RANDOM = ".random"  # the path of the random streams, beside the state's own


@dataclass(frozen=True)
class Leaf:
    """One array of the state.

    Attributes:
        value: a jax.Array, or a numpy array that nobody else writes to; padded where dims are uneven.
        spec: for each dim the mesh axes that split it, or None without a mesh.
        shape: without padding.
    """

    name: str
    value: Any
    spec: tuple[tuple[str, ...], ...] | None
    shape: tuple[int, ...]

    def shards(self, index: int, size: int) -> Iterator[tuple[Box, Any]]:
        """The parts that process `index` of `size` writes: the first copy of each, so that every part has one writer."""
        if isinstance(self.value, np.ndarray) or (size > 1 and self.value.is_fully_addressable):
            if index == 0:  # every process has all of it
                yield whole(self.shape), self.value
            return
        for shard in self.value.addressable_shards:
            box = box_of(shard.index, self.value.shape)
            held = box.overlap(whole(self.shape))
            if shard.replica_id == 0 and held is not None:
                yield held, shard.data if held == box else np.array(np.asarray(shard.data)[held.within(box)])


@dataclass
class Collected:
    """A state, taken apart.

    Attributes:
        tree: see `_tree`.
        local: this process's own nodes, by path.
    """

    tree: _tree.Node = None
    leaves: list[Leaf] = field(default_factory=list[Leaf])
    local: dict[str, _tree.Node] = field(default_factory=dict[str, _tree.Node])
    _numbers: dict[Any, int] = field(default_factory=dict[Any, int])
    _held: list[Any] = field(default_factory=list[Any])  # ids in `_numbers` stay those of living objects

    def add(self, path: str, value: Any) -> _tree.Node:
        """The node of an array; one that is already there is the same number."""
        key = _identity(value)
        if key not in self._numbers:
            self._numbers[key] = len(self.leaves)
            self._held.append(value)
            array = array_of(value)
            self.leaves.append(Leaf(path[-MAX_NAME:], array, spec_of(array), tuple(value.shape)))
        return {"array": self._numbers[key], "kind": _tree.kind_of(value)}


def collect(state: Any) -> Collected:
    """Take a state apart. Reads no values from devices.

    Raises:
        CheckpointError: something in it has no form in a checkpoint.
    """
    found = Collected()
    names = parameter_names(state)
    found.tree = _tree.encode(_described(state, found, names, ""), found.add)
    found.local[RANDOM] = _tree.encode(RandomState().state_dict(), _tree.inline)
    return found


def _described(value: Any, found: Collected, names: Mapping[int, str], path: str) -> Any:
    """The state with its objects replaced by what their `state_dict()` says."""
    if isinstance(value, torch.nn.Module):
        return dict(value.state_dict(keep_vars=True))
    if is_plain_optimizer(value):
        return optimizer_state(value, names)
    if is_state_object(value):
        state = value.state_dict()
        if getattr(value, "per_process", False):
            found.local[path] = _tree.encode(state, _tree.inline, path)
            return {}
        return state
    if isinstance(value, dict):
        return type(value)((k, _described(v, found, names, join(path, k))) for k, v in value.items()) if _is_known(value) else value
    if type(value) in (list, tuple):
        return type(value)(_described(v, found, names, join(path, i)) for i, v in enumerate(value))
    return value


def _is_known(value: Any) -> bool:
    return type(value).__name__ in ("dict", "OrderedDict")


def join(path: str, key: object) -> str:
    """The path of an entry."""
    return f"{path}/{key}" if path else str(key)


def is_state_object(value: Any) -> bool:
    """True for what says its own state: schedulers, loaders, optimizers, modules."""
    return (
        not isinstance(value, type) and callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
    )


def is_plain_optimizer(value: Any) -> bool:
    """True for an optimizer that keeps its state as torch's do: by parameter."""
    torchs = torch.optim.Optimizer
    return (
        isinstance(value, torchs) and type(value).state_dict is torchs.state_dict and type(value).load_state_dict is torchs.load_state_dict
    )


def parameter_names(state: Any) -> dict[int, str]:
    """Names of all parameters of the modules in a state, by id."""
    names: dict[int, str] = {}
    for module in _modules(state):
        names.update((id(parameter), name) for name, parameter in module.named_parameters())
    return names


def _modules(state: Any) -> Iterator[torch.nn.Module]:
    if isinstance(state, torch.nn.Module):
        yield state
    elif isinstance(state, dict | list | tuple):
        for value in state.values() if isinstance(state, dict) else state:
            yield from _modules(value)


def optimizer_parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters in the order that numbers them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def optimizer_state(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """State by number of the parameter, settings by group, and what each parameter is: its name if a module has it, its shape."""
    parameters = optimizer_parameters(optimizer)
    number = {id(parameter): i for i, parameter in enumerate(parameters)}
    groups = [
        {key: value for key, value in group.items() if key != "params"} | {"params": [number[id(p)] for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    state = {number[id(p)]: dict(s) for p, s in optimizer.state.items() if id(p) in number}
    described = [[names.get(id(parameter)), tuple(parameter.shape)] for parameter in parameters]
    return {"class": type(optimizer).__name__, "state": state, "param_groups": groups, "parameters": described}


def array_of(value: Any) -> Any:
    """The values of an array: a jax.Array, which may be padded, or a numpy array of its own."""
    if isinstance(value, torch.Tensor):
        if value.device.type == "jax":
            buffer = buffer_of(value)
            if buffer.value is None and buffer.host is not None and is_whole(value, buffer):
                return buffer.host.copy()
            return buffer.raw() if is_whole(value, buffer) else load(value.detach())
        if value.device.type == "meta":
            raise CheckpointError(message("a tensor on device 'meta' has no values to save", fix="save the model that has them"))
        return host_array(value.cpu())
    return value if isinstance(value, jax.Array) else np.array(value, order="C", copy=True)


def spec_of(value: Any) -> tuple[tuple[str, ...], ...] | None:
    """For each dim the mesh axes that split the array; None if it lies on no mesh."""
    if not isinstance(value, jax.Array) or not isinstance(value.sharding, NamedSharding):
        return None
    entries = [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in value.sharding.spec]
    return tuple(tuple(map(str, axes)) for axes in (*entries, *[()] * (value.ndim - len(entries))))


def _identity(value: Any) -> Any:
    """Equal for tensors that are the same value: tied weights, a parameter and its detached alias."""
    if not isinstance(value, torch.Tensor):
        return id(value)
    window = (tuple(value.shape), value.stride(), value.storage_offset(), value.dtype, value.is_conj(), value.is_neg())
    if value.device.type == "jax":
        return id(buffer_of(value)), *window
    return (value.untyped_storage().data_ptr(), str(value.device), *window) if math.prod(value.shape) else id(value)


__all__ = [
    "RANDOM",
    "Collected",
    "Leaf",
    "array_of",
    "collect",
    "is_plain_optimizer",
    "is_state_object",
    "join",
    "optimizer_parameters",
    "optimizer_state",
    "parameter_names",
    "spec_of",
]
