"""Splits a state to be saved into a tree of plain data and a list of arrays with their shards.

A module, optimizer, scheduler or loader is represented by its `state_dict()`. Tensors that share a value (tied weights) are one
array. An object with `per_process = True` has a different state on each process, which is stored once per process.
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

RANDOM = ".random"  # path of the random streams in `Collected.local`


@dataclass(frozen=True)
class Leaf:
    """One array of the state.

    Attributes:
        name: path in the state.
        value: a jax.Array, padded where dims are uneven; or a numpy array that nothing else writes to.
        spec: for each dim, the mesh axes that split it; None if the array is not on a mesh.
        shape: shape without padding.
    """

    name: str
    value: Any
    spec: tuple[tuple[str, ...], ...] | None
    shape: tuple[int, ...]

    def shards(self, index: int, size: int) -> Iterator[tuple[Box, Any]]:
        """The shards that process `index` of `size` writes, without padding. Only replica 0 of a shard is written."""
        if isinstance(self.value, np.ndarray) or (size > 1 and self.value.is_fully_addressable):
            if index == 0:  # every process has the whole array
                yield whole(self.shape), self.value
            return
        for shard in self.value.addressable_shards:
            box = box_of(shard.index, self.value.shape)
            unpadded = box.overlap(whole(self.shape))
            if shard.replica_id == 0 and unpadded is not None:
                yield unpadded, shard.data if unpadded == box else np.array(np.asarray(shard.data)[unpadded.within(box)])


@dataclass
class Collected:
    """A state split into plain data and arrays.

    Attributes:
        tree: the state as plain data, with arrays as numbers (see `_tree`).
        leaves: the arrays, by number.
        local: nodes of per-process objects on this process, by path.
    """

    tree: _tree.Node = None
    leaves: list[Leaf] = field(default_factory=list[Leaf])
    local: dict[str, _tree.Node] = field(default_factory=dict[str, _tree.Node])
    _numbers: dict[Any, int] = field(default_factory=dict[Any, int])
    _alive: list[Any] = field(default_factory=list[Any])  # keeps the objects whose ids are in `_numbers` alive

    def add(self, path: str, value: Any) -> _tree.Node:
        """Add an array and return its node. An array that was added before keeps its number."""
        key = _identity(value)
        if key not in self._numbers:
            self._numbers[key] = len(self.leaves)
            self._alive.append(value)
            array = array_of(value)
            self.leaves.append(Leaf(path[-MAX_NAME:], array, spec_of(array), tuple(value.shape)))
        return {"array": self._numbers[key], "kind": _tree.kind_of(value)}


def collect(state: Any) -> Collected:
    """Split a state into plain data and arrays. Reads no values from devices.

    Raises:
        CheckpointError: the state contains a value that a checkpoint cannot store, or itself.
    """
    found = Collected()
    names = parameter_names(state)
    found.tree = _tree.encode(_with_state_dicts(state, found, names, ""), found.add)
    found.local[RANDOM] = _tree.encode(RandomState().state_dict(), _tree.inline)
    return found


def _with_state_dicts(value: Any, found: Collected, names: Mapping[int, str], path: str) -> Any:
    """Replace the objects in a state by their `state_dict()`."""
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
        if not _is_plain_dict(value):
            return value
        return type(value)((k, _with_state_dicts(v, found, names, join(path, k))) for k, v in value.items())
    if type(value) in (list, tuple):
        return type(value)(_with_state_dicts(v, found, names, join(path, i)) for i, v in enumerate(value))
    return value


def _is_plain_dict(value: Any) -> bool:
    return type(value).__name__ in ("dict", "OrderedDict")


def join(path: str, key: object) -> str:
    """The path of entry `key` of the container at `path`."""
    return f"{path}/{key}" if path else str(key)


def is_state_object(value: Any) -> bool:
    """Whether a value has `state_dict` and `load_state_dict`: schedulers, loaders, optimizers, modules."""
    return (
        not isinstance(value, type) and callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
    )


def is_plain_optimizer(value: Any) -> bool:
    """Whether a value is an optimizer with torch's own `state_dict` and `load_state_dict`, whose state is keyed by parameter."""
    torchs = torch.optim.Optimizer
    return (
        isinstance(value, torchs) and type(value).state_dict is torchs.state_dict and type(value).load_state_dict is torchs.load_state_dict
    )


def parameter_names(state: Any) -> dict[int, str]:
    """Names of all parameters of the modules in a state, by `id` of the parameter."""
    names: dict[int, str] = {}
    for module in _modules(state):
        names.update((id(parameter), name) for name, parameter in module.named_parameters())
    return names


def _modules(state: Any, path: str = "", above: tuple[Any, ...] = ()) -> Iterator[torch.nn.Module]:
    """The modules in a state. `above`: the containers that contain this part of it, at `path`."""
    if isinstance(state, torch.nn.Module):
        yield state
    elif isinstance(state, dict | list | tuple):
        if any(state is container for container in above):
            fix = "save a state without it; of an object with state_dict() and load_state_dict() that state is saved"
            raise CheckpointError(message(f"the state contains itself: {path} is a {type(state).__name__} that contains it", fix=fix))
        _tree.require_depth(len(above), path)
        for key, value in state.items() if isinstance(state, dict) else enumerate(state):
            yield from _modules(value, join(path, key), (*above, state))


def optimizer_parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters, in the order of their numbers in `state_dict()`."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def optimizer_state(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """The optimizer's state by parameter number, its settings by group, and each parameter's shape and name.

    The name is None for a parameter that belongs to no module of the state.
    """
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
    """The values of an array, as a jax.Array (possibly padded) or as a numpy array that shares no memory with `value`."""
    if isinstance(value, torch.Tensor):
        if value.device.type == "jax":
            buffer = buffer_of(value)
            if buffer.value is None and buffer.host is not None and is_whole(value, buffer):
                return buffer.host.copy()
            return buffer.raw() if is_whole(value, buffer) else load(value.detach())
        if value.device.type == "meta":
            raise CheckpointError(
                message("a tensor on device 'meta' has no values to save", fix="model.to_empty(device='jax'), then fill it")
            )
        return host_array(value.cpu())
    return value if isinstance(value, jax.Array) else np.array(value, order="C", copy=True)


def spec_of(value: Any) -> tuple[tuple[str, ...], ...] | None:
    """For each dim, the mesh axes that split the array; None if it is not on a mesh."""
    if not isinstance(value, jax.Array) or not isinstance(value.sharding, NamedSharding):
        return None
    entries = [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in value.sharding.spec]
    return tuple(tuple(map(str, axes)) for axes in (*entries, *[()] * (value.ndim - len(entries))))


def _identity(value: Any) -> Any:
    """A key that is equal for tensors with the same values by construction: tied weights, a parameter and its detached alias."""
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
