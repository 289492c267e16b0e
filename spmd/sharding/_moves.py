"""After a module has moved, its tensors show the layouts that they have: parameters marked on 'meta' or on the host too.

with torch.device("meta"):
    model = GPT()
spmd.shard_module(model, m, "fsdp")
model.to_empty(device="jax")          # no memory yet; reset_parameters() fills shard by shard
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from spmd.device._layout import annotation_of
from spmd.sharding._tensor import become_sharded


def register() -> None:
    """Wrap the one function through which every move of a module goes, around the device's own wrapper."""
    inner = nn.Module._apply
    if hasattr(inner, "shows_layouts"):
        return

    @functools.wraps(inner)
    def apply(self: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        return show_layouts(inner(self, fn, recurse))

    vars(apply)["shows_layouts"] = True
    nn.Module._apply = apply


def show_layouts(module: nn.Module) -> nn.Module:
    """Change the class of the marked device tensors directly in `module`; its children do so themselves."""
    for registry in (module.__dict__["_parameters"], module.__dict__["_buffers"]):
        for tensor in registry.values():
            if tensor is None or isinstance(tensor, UninitializedParameter | UninitializedBuffer) or tensor.device.type != "jax":
                continue
            if annotation_of(tensor) is not None:
                become_sharded(tensor)
    return module
