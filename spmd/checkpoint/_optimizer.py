"""A saved optimizer on its way into one of the program: settings by group, state by parameter.

Parameters are matched by name where both sides know all names (the module is part of the state), else by number. State
takes its parameter's layout; nothing is converted: torch's own `load_state_dict` would cast float32 moments to a bfloat16
parameter's dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import jax
import torch

import mesh
from spmd.checkpoint._collect import optimizer_parameters
from spmd.checkpoint._plan_entries import Finish, Ref, layout_of, unfit
from spmd.device._storage import buffer_of


class Tensors(Protocol):
    """The part of a plan that fills and makes tensors."""

    @property
    def names(self) -> Mapping[int, str]: ...

    def array(self, target: Any, ref: Ref, path: str) -> Finish: ...

    def shape(self, ref: Ref) -> tuple[int, ...]: ...

    def fresh(self, ref: Ref) -> Finish: ...

    def placed(self, ref: Ref, annotation: mesh.ShardingSpec | None, sharding: jax.sharding.Sharding) -> Finish: ...


def plan_optimizer(plan: Tensors, optimizer: torch.optim.Optimizer, saved: Any, path: str) -> Finish:
    """What is to be done for an optimizer.

    Raises:
        CheckpointError: an optimizer of another class, other groups, or parameters of other shapes.
    """
    parameters = optimizer_parameters(optimizer)
    groups, states = _parts(saved, path)
    was, now = saved.get("class", type(optimizer).__name__), type(optimizer).__name__
    if was != now:
        fix = f"restore into a {was}, or leave the optimizer out of the state: its state is not compatible"
        raise unfit(path, f"the program's optimizer is a {now}", f"the checkpoint's is a {was}", fix=fix)
    sizes = [len(group["params"]) for group in groups], [len(group["params"]) for group in optimizer.param_groups]
    if sizes[0] != sizes[1]:
        raise unfit(path, f"the program's groups have {sizes[1]} parameters", f"the checkpoint's have {sizes[0]}")
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
            held = optimizer.state.setdefault(parameter, {})
            held.clear()  # the same dict as before, which a program knows: another one would be a reason to trace again
            held.update(state)
        return optimizer

    return finish


def _parts(saved: Any, path: str) -> tuple[list[dict[str, Any]], dict[int, dict[str, Any]]]:
    if not isinstance(saved, dict) or not {"state", "param_groups", "parameters"} <= saved.keys():
        raise unfit(path, "the program has an optimizer", "the checkpoint has something else there")
    return saved["param_groups"], saved["state"]


def _matched(parameters: list[torch.Tensor], saved: list[Any], names: Mapping[int, str], path: str) -> list[int]:
    """For each parameter its number in the checkpoint."""
    if len(saved) != len(parameters):
        raise unfit(path, f"the program's optimizer has {len(parameters)} parameters", f"the checkpoint's has {len(saved)}")
    ours = [names.get(id(parameter)) for parameter in parameters]
    theirs = [name for name, _ in saved]
    by_name = None not in ours and None not in theirs and set(ours) == set(theirs)
    numbers = [theirs.index(name) for name in ours] if by_name else list(range(len(parameters)))
    for parameter, name, number in zip(parameters, ours, numbers, strict=True):
        if tuple(saved[number][1]) != tuple(parameter.shape):
            known = repr(name) if name else f"number {number}"
            raise unfit(path, f"parameter {known} has shape {tuple(parameter.shape)}", f"the checkpoint's has {tuple(saved[number][1])}")
    return numbers


def _state(plan: Tensors, parameter: torch.Tensor, now: Any, saved: Any, path: str) -> Finish:
    """One entry of a parameter's state: in place where the program has the same tensor already, so that no step traces anew."""
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
    """A setting of a group, or a number in a state."""
    if isinstance(value, Ref):
        return plan.fresh(value)
    return lambda: value


__all__ = ["plan_optimizer"]
