"""torch's private names whose modules take a second to import: functions that import them when they are needed.

The others are in `_torch`. One that is gone says so, with the versions that have it.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

from spmd.base._torch import missing


class PlanParts(NamedTuple):
    """What torch.distributed.checkpoint makes its plans with."""

    dedup_save_plans: Callable[..., Any]
    flatten_state_dict: Callable[..., Any]
    set_element: Callable[..., Any]


def plan_parts() -> PlanParts:
    """The functions behind torch.distributed.checkpoint's default planner."""
    return PlanParts(
        *(
            _named(f"torch.distributed.checkpoint.{module}", name)
            for module, name in (
                ("_dedup_save_plans", "dedup_save_plans"),
                ("_nested_dict", "flatten_state_dict"),
                ("_traverse", "set_element"),
            )
        )
    )


def fsspec_filesystem() -> Any:
    """torch.distributed.checkpoint's readers and writers over fsspec."""
    return _module("torch.distributed.checkpoint._fsspec_filesystem")


def dtensor_spec() -> Any:
    """The module of `DTensorSpec` and `TensorMeta`."""
    return _module("torch.distributed.tensor._dtensor_spec")


def joint_graphs() -> Any:
    """functorch.compile: functions and their gradients as graphs."""
    return _module("functorch.compile")


def _module(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise missing(f"{name} ({error})") from error


def _named(module: str, name: str) -> Any:
    found = getattr(_module(module), name, None)
    if found is None:
        raise missing(f"{module}.{name}")
    return found


__all__ = ["PlanParts", "dtensor_spec", "fsspec_filesystem", "joint_graphs", "plan_parts"]
