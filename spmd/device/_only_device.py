"""Checks device indices. 0 is the only index, because PyTorch sees a mesh of any number of chips as one device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from spmd.base._errors import SpmdError, called_at, message

NAME = "jax"


def require_only_device(index: int | None) -> None:
    """Raise for an index that no device has. None and negative indices mean the current device.

    Raises:
        SpmdError: the index is 1 or more.
    """
    if index is not None and index > 0:
        raise SpmdError(
            message(
                f"there is no device '{NAME}:{index}'",
                "PyTorch sees a mesh of any number of chips as one device",
                *called_at(),
                fix="spmd.mark_sharding(t, mesh, spec) places a tensor's shards on the chips",
            )
        )


def takes_device(op_name: str) -> bool:
    """Whether the ATen overload has an argument `device`."""
    name, _, overload = op_name.partition(".")
    packet: Any = getattr(torch.ops.aten, name, None)
    op = None if packet is None else getattr(packet, overload or "default", None)
    return op is not None and any(argument.name == "device" for argument in op._schema.arguments)


def on_only_device(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a kernel so that it raises for a `device` whose index does not exist."""

    @functools.wraps(kernel)
    def checked(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and device.type == NAME and device.index:
            require_only_device(device.index)
        return kernel(*args, **kwargs)

    return checked


__all__ = ["NAME", "on_only_device", "require_only_device", "takes_device"]
