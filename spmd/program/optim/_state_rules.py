"""The sharding of optimizer state. A state tensor of its parameter's shape has the parameter's sharding. Any other is replicated, unless a
rule for the optimizer's class gives it a sharding.

    @spmd.register_state_rule(RowNorms)
    def lay_out(parameter, key, value):
        return (parameter.sharding_spec.partition_spec[0],) if key == "rows" else None
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mesh import ShardingSpec, SpecLike, as_spec
from spmd.base._errors import SpmdError, called_at, message, shown
from spmd.device._arrays import padded
from spmd.device._layout import annotation_of, state_sharding_of
from spmd.device._layout import set_state_sharding as _set
from spmd.device._storage import is_device_tensor, load
from spmd.sharding._annotate import as_mesh

StateRule = Callable[[torch.Tensor, str, torch.Tensor], Any]

_rules: dict[type[torch.optim.Optimizer], StateRule] = {}


def register_state_rule(optimizer_class: type[torch.optim.Optimizer]) -> Callable[[StateRule], StateRule]:
    """Register the decorated function as the rule for the sharding of the state of an optimizer class and its subclasses.

    Before a step is traced, the rule is called with a marked parameter, the key of a state tensor and the state tensor. It returns a spec
    on the parameter's mesh, or None for the default. A state tensor that was marked explicitly keeps its sharding.

    Args:
        optimizer_class: the class.

    Returns:
        A decorator that registers a rule and returns it.

    Raises:
        SpmdError: the class is not an optimizer class, or already has a rule.
    """
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)):  # pyright: ignore[reportUnnecessaryIsInstance]
        what = f"{optimizer_class!r} is not an optimizer class"
        raise SpmdError(message(what, fix="@spmd.register_state_rule(torch.optim.Adafactor)"))

    def register(rule: StateRule) -> StateRule:
        if optimizer_class in _rules:
            what = f"the state of {optimizer_class.__name__} already has a rule, {_rules[optimizer_class].__qualname__}"
            raise SpmdError(message(what, fix="subclass it, and register the rule for the subclass"))
        _rules[optimizer_class] = rule
        return rule

    return register


def set_state_sharding(parameter: torch.Tensor, mesh: Any, partition_spec: SpecLike) -> None:
    """Give the gradient of `parameter`, and optimizer state of the same shape, another sharding than the parameter (ZeRO).

    Args:
        parameter: the parameter.
        mesh: a `mesh.Mesh`, a `jax.sharding.Mesh` or a torch `DeviceMesh`.
        partition_spec: one entry per dim, as for `mark_sharding`.

    Raises:
        SpecError: the spec does not match the rank of the parameter or the axes of the mesh.
        SpmdError: `parameter` is not a tensor, or is on the host and no `nn.Parameter`: an optimizer never has state for such a tensor.
    """
    if not is_device_tensor(parameter) and not isinstance(parameter, torch.nn.Parameter):
        is_tensor = isinstance(parameter, torch.Tensor)  # pyright: ignore[reportUnnecessaryIsInstance]
        got = f"a tensor on {parameter.device} that is no parameter" if is_tensor else shown(parameter)
        what = f"set_state_sharding takes a parameter, got {got}"
        raise SpmdError(message(what, *called_at(), fix="spmd.set_state_sharding(model.up.weight, mesh, spec)"))
    spec = ShardingSpec(as_mesh(mesh), as_spec(partition_spec))
    spec.validate(tuple(parameter.shape), "the optimizer's state")
    _set(parameter, spec)


def sharding_of_state(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, key: str, value: torch.Tensor) -> ShardingSpec | None:
    """The sharding of the state tensor `value` of `parameter`; None if no rule or parameter gives one, so that it is replicated."""
    own = state_sharding_of(parameter)
    rule = next((_rules[cls] for cls in type(optimizer).__mro__ if cls in _rules), None)
    marked = annotation_of(parameter)
    if rule is not None and marked is not None:
        said = rule(parameter, key, value)
        if said is not None:
            spec = ShardingSpec(marked.mesh, as_spec(said))
            spec.validate(tuple(value.shape), f"{type(optimizer).__name__}'s state {key!r}")
            return spec
    return own if value.shape == parameter.shape else None


def stored_like(parameter: torch.Tensor, state: torch.Tensor) -> Any:
    """The traced value of a gradient or state tensor that is an output of the program, padded as its parameter is."""
    value, spec = load(state), state_sharding_of(parameter)
    if spec is None or parameter.shape != state.shape or spec.padded_shape(value.shape) == value.shape:
        return value
    return padded(value, spec.to_jax())
