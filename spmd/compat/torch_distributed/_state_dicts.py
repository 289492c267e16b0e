"""State dicts of distributed modules hold sharded tensors, with `full_tensor` and `placements`, where torch's hold DTensors."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from spmd.sharding._tensor import XLAShardedTensor, become_sharded

_shown: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def show_sharded(module: nn.Module) -> None:
    """From now on the module's state dict holds its marked parameters and buffers as `XLAShardedTensor`s, aliases of them as before."""
    for part in module.modules():
        if part not in _shown:
            _shown.add(part)
            part.register_state_dict_post_hook(_show)


def _show(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    for name, own in (*module._parameters.items(), *module._buffers.items()):
        value = state.get(prefix + name)
        if isinstance(own, XLAShardedTensor) and isinstance(value, torch.Tensor) and not isinstance(value, XLAShardedTensor):
            vars(become_sharded(value)).update(vars(own))


__all__ = ["show_sharded"]
