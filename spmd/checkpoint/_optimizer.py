"""Plans restoring an optimizer of the program: settings by group, state by parameter.

Parameters are matched by name if both sides have names for all of them (their module is part of the state), else by number. New
state tensors get the sharding of their parameter. Their dtype stays as saved: torch's own `load_state_dict` would cast float32
moments to the dtype of a bfloat16 parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import jax
import torch

import mesh
from spmd.checkpoint._collect import optimizer_parameters
from spmd.checkpoint._plan_entries import Finish, Ref, layout_of, mismatch
from spmd.device._storage import buffer_of


class Tensors(Protocol):
    """The part of a plan that fills and creates tensors. `Plan` in `_restore_plan` implements it."""

    @property
    def names(self) -> Mapping[int, str]: ...

    def array(self, target: Any, ref: Ref, path: str) -> Finish: ...

    def shape(self, ref: Ref) -> tuple[int, ...]: ...

    def fresh(self, ref: Ref) -> Finish: ...

    def placed(self, ref: Ref, annotation: mesh.ShardingSpec | None, sharding: jax.sharding.Sharding) -> Finish: ...


def plan_optimizer(plan: Tensors, optimizer: torch.optim.Optimizer, saved: Any, path: str) -> Finish:
    """Plan restoring `optimizer` from the decoded node `saved`.

    Raises:
        CheckpointError: the saved optimizer has another class, other groups, or parameters of other shapes.
    """
    parameters = optimizer_parameters(optimizer)
    groups, states = _parts(saved, path)
    was, now = saved.get("class", type(optimizer).__name__), type(optimizer).__name__
    if was != now:
        fix = f"restore into a {was}, or leave the optimizer out of the state, since its state is not compatible"
        raise mismatch(path, f"the program's optimizer is a {now}", f"the checkpoint's is a {was}", fix=fix)
    sizes = [len(group["params"]) for group in groups], [len(group["params"]) for group in optimizer.param_groups]
    if sizes[0] != sizes[1]:
        raise mismatch(path, f"the program's groups have {sizes[1]} parameters", f"the checkpoint's have {sizes[0]}")
    number_of = _matched(parameters, saved["parameters"], plan.names, path)
    finishes: list[tuple[torch.Tensor, dict[str, Finish]]] = []
    for parameter, number in zip(parameters, number_of, strict=True):
        if number in states:
            name = f"{path}/state/{plan.names.get(id(parameter), number)}"
            now = optimizer.state.get(parameter, {})
            entries = {key: _state(plan, parameter, now.get(key), value, f"{name}/{key}") for key, value in states[number].items()}
            finishes.append((parameter, entries))
    settings = [{key: _setting(plan, value) for key, value in group.items() if key != "params"} for group in groups]

    def finish() -> torch.optim.Optimizer:
        for group, values in zip(optimizer.param_groups, settings, strict=True):
            group.update({key: value() for key, value in values.items()})
        states = {parameter: {key: value() for key, value in entries.items()} for parameter, entries in finishes}
        for parameter in [p for p in optimizer.state if p not in states]:
            del optimizer.state[parameter]
        for parameter, state in states.items():
            entries = optimizer.state.setdefault(parameter, {})
            entries.clear()  # keep the dict object: programs have guards on it, and a new one would cause a retrace
            entries.update(state)
        return optimizer

    return finish


def _parts(saved: Any, path: str) -> tuple[list[dict[str, Any]], dict[int, dict[str, Any]]]:
    if not isinstance(saved, dict) or not {"state", "param_groups", "parameters"} <= saved.keys():
        raise mismatch(path, "the program has an optimizer", "the checkpoint has a value of another type")
    return saved["param_groups"], saved["state"]


def _matched(parameters: list[torch.Tensor], saved: list[Any], names: Mapping[int, str], path: str) -> list[int]:
    """The number in the checkpoint of each parameter."""
    if len(saved) != len(parameters):
        raise mismatch(path, f"the program's optimizer has {len(parameters)} parameters", f"the checkpoint's has {len(saved)}")
    ours = [names.get(id(parameter)) for parameter in parameters]
    theirs = [name for name, _ in saved]
    by_name = None not in ours and None not in theirs and set(ours) == set(theirs)
    numbers = [theirs.index(name) for name in ours] if by_name else list(range(len(parameters)))
    for parameter, name, number in zip(parameters, ours, numbers, strict=True):
        if tuple(saved[number][1]) != tuple(parameter.shape):
            known = repr(name) if name else f"number {number}"
            raise mismatch(path, f"parameter {known} has shape {tuple(parameter.shape)}", f"the checkpoint's has {tuple(saved[number][1])}")
    return numbers


def _state(plan: Tensors, parameter: torch.Tensor, now: Any, saved: Any, path: str) -> Finish:
    """Plan one entry of a parameter's state. An existing tensor is filled in place, so that no step is retraced."""
    if not isinstance(saved, Ref):
        return _setting(plan, saved)
    where = "jax" if saved.kind == "device" else "cpu"
    if isinstance(now, torch.Tensor) and now.device.type == where:
        return plan.array(now, saved, path)
    buffer = buffer_of(parameter) if saved.kind == "device" and parameter.device.type == "jax" else None
    if buffer is None or plan.shape(saved) != tuple(parameter.shape):
        return plan.fresh(saved)
    annotation = buffer.annotation if buffer.state_annotation is None else buffer.state_annotation
    sharding = layout_of(buffer) if annotation is None else annotation.to_jax()
    return plan.fresh(saved) if sharding is None else plan.placed(saved, annotation, sharding)


def _setting(plan: Tensors, value: Any) -> Finish:
    """Plan a setting of a group, or an entry of a state that is not a tensor."""
    if isinstance(value, Ref):
        return plan.fresh(value)
    return lambda: value


__all__ = ["plan_optimizer"]
