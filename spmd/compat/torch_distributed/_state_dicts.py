"""State dicts of distributed modules hold sharded tensors, with `full_tensor` and `placements`, where torch's hold DTensors."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from spmd.device._layout import hand_over
from spmd.sharding._tensor import XLAShardedTensor, become_sharded
from spmd.xla_names._distribute import copy_device_mesh

_registered: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def register_sharded_state_dict(module: nn.Module) -> None:
    """Let the state dict of a module hold its marked parameters and buffers as `XLAShardedTensor`s. They are aliases, as before."""
    for part in module.modules():
        if part not in _registered:
            _registered.add(part)
            part.register_state_dict_post_hook(_wrap_sharded)


def _wrap_sharded(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    for name, own in (*module._parameters.items(), *module._buffers.items()):
        value = state.get(prefix + name)
        if isinstance(own, XLAShardedTensor) and isinstance(value, torch.Tensor) and not isinstance(value, XLAShardedTensor):
            hand_over(own, value)  # on "meta" the sharding is the tensor's own, not its storage's
            copy_device_mesh(own, become_sharded(value))


__all__ = ["register_sharded_state_dict"]
