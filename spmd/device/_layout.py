"""The layout of a tensor on the device, or the recorded future layout of a tensor on the host or on 'meta'.

On the device the layout belongs to the storage (`Buffer.annotation`). A host or meta tensor stores it in an attribute, as a plain
dict, so that files and pickles of marked modules do not depend on this package. Moving the tensor to the device applies it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

import mesh
from spmd.base._jax import is_tracer
from spmd.device._storage import Buffer, buffer_of

_LAYOUT = "spmd_sharding"
_STATE = "spmd_state_sharding"


def annotation_of(tensor: torch.Tensor) -> mesh.ShardingSpec | None:
    """The layout that `mark_sharding` gave the tensor or, on the host or on 'meta', recorded for it; None if there is none."""
    return buffer_of(tensor).annotation if tensor.device.type == "jax" else _remembered(tensor, _LAYOUT)


def state_sharding_of(tensor: torch.Tensor) -> mesh.ShardingSpec | None:
    """Layout of a parameter's gradient and optimizer state: that of the parameter unless `set_state_sharding` set another one."""
    own = buffer_of(tensor).state_annotation if tensor.device.type == "jax" else _remembered(tensor, _STATE)
    return annotation_of(tensor) if own is None else own


def plain_layouts(tensor: torch.Tensor) -> dict[str, Any]:
    """The layouts of a device tensor in the form of a host tensor's attributes, by attribute name."""
    buffer = buffer_of(tensor)
    kept = {_LAYOUT: buffer.annotation, _STATE: buffer.state_annotation}
    return {name: sharding.to_dict() for name, sharding in kept.items() if sharding is not None}


def remember(tensor: torch.Tensor, sharding: mesh.ShardingSpec) -> None:
    """Record the future layout of a host or meta tensor."""
    vars(tensor)[_LAYOUT] = sharding.to_dict()


def forget(tensor: torch.Tensor) -> None:
    """Remove the recorded layouts of a host or meta tensor."""
    vars(tensor).pop(_LAYOUT, None)
    vars(tensor).pop(_STATE, None)


def set_state_sharding(parameter: torch.Tensor, sharding: mesh.ShardingSpec) -> None:
    """Give the gradient and optimizer state of `parameter` another layout than the parameter."""
    if parameter.device.type == "jax":
        buffer_of(parameter).state_annotation = sharding
        Buffer.marks += 1
    else:
        vars(parameter)[_STATE] = sharding.to_dict()


def hand_over(source: torch.Tensor, target: torch.Tensor) -> bool:
    """Copy the layouts of `source` to `target`, on any device, if both have the same shape. Returns whether there was a layout."""
    if isinstance(source, UninitializedParameter | UninitializedBuffer):
        return False
    annotation = annotation_of(source)
    if target.device.type == "jax":  # on the device the storage has the layout
        forget(target)
    if annotation is None or tuple(source.shape) != tuple(target.shape):
        return False
    state = state_sharding_of(source)
    if target.device.type == "jax":
        buffer = buffer_of(target)
        if buffer.annotation is None and buffer.shape == tuple(target.shape) and target.is_contiguous():
            if buffer.is_waiting or (buffer.value is not None and not is_tracer(buffer.value)):
                buffer.annotate(annotation)  # reshards the existing value, and pads it if the dim is uneven
            else:
                buffer.annotation = annotation
    else:
        remember(target, annotation)
    if state is not annotation and state is not None:
        set_state_sharding(target, state)
    return True


def _remembered(tensor: torch.Tensor, key: str) -> mesh.ShardingSpec | None:
    kept: Any = vars(tensor).get(key)
    try:
        return None if kept is None else mesh.ShardingSpec.from_dict(kept)
    except mesh.DeviceError:  # from a file that was written with other devices
        return None


__all__ = ["annotation_of", "forget", "hand_over", "plain_layouts", "remember", "set_state_sharding", "state_sharding_of"]
