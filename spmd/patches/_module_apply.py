"""Moves of a module to the device and back keep its Parameter objects, as between CPU and CUDA, and its shardings.

PyTorch moves a parameter in place only between devices that its C++ code supports. For others, `module.to()` creates a new
Parameter: tied weights come apart, and an existing optimizer keeps the old ones. Here the new value is swapped into the old object,
and a change of dtype keeps the annotation.

    model = GPT().to("jax")
    assert model.head.weight is model.tokens.weight

After a move, marked tensors are of class `XLAShardedTensor` or `XLAShardedParameter`, also if they were marked on 'meta' or the host.

    with torch.device("meta"):
        model = GPT()
    spmd.shard_module(model, m, "fsdp")
    model.to_empty(device="jax")          # no memory yet; reset_parameters() fills shard by shard
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from spmd.device._layout import annotation_of, hand_over
from spmd.patches._moved_gradients import MovedGradients
from spmd.patches._table import replace
from spmd.sharding._tensor import XLAShardedTensor, become_sharded

_torchs_apply = nn.Module._apply


def register() -> None:
    """Replace the function that every move of a module calls."""
    replace("torch.nn.Module._apply", apply)


@functools.wraps(_torchs_apply)
def apply(self: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
    before = [(name, p, p.device.type) for name, p in self.__dict__["_parameters"].items() if p is not None]
    with MovedGradients(self):
        show_layouts(_torchs_apply(self, fn if isinstance(fn, _Moved) else _Moved(fn), recurse))
    for name, parameter, device in before:
        moved = self.__dict__["_parameters"][name]
        if device != moved.device.type and "jax" in (device, moved.device.type):
            _keep_hooks(parameter, moved)
    return self


def _keep_hooks(before: torch.Tensor, parameter: torch.Tensor) -> None:
    """Let a parameter that has moved to the device or back run the hooks that it had before.

    PyTorch stores them as an attribute of the object, and once more with the value in C++, which is another one now. They stay the same
    dicts, so the handles of `register_hook` still remove them. Where PyTorch replaces the parameter by a new one, that has none.
    """
    if parameter is not before and torch.__future__.get_overwrite_module_params_on_conversion():
        return
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        hooks = getattr(before, name)
        if hooks is not None:
            setattr(parameter, name, hooks)


def show_layouts(module: nn.Module) -> nn.Module:
    """Set the class of the marked device tensors that belong to `module` itself, without its children."""
    for registry in (module.__dict__["_parameters"], module.__dict__["_buffers"]):
        for tensor in registry.values():
            if tensor is None or isinstance(tensor, UninitializedParameter | UninitializedBuffer) or tensor.device.type != "jax":
                continue
            if annotation_of(tensor) is not None:
                become_sharded(tensor)
    return module


class _Moved:
    """Wraps the `fn` of `_apply`: a parameter that enters or leaves device 'jax' is changed in place, and the same object is returned."""

    def __init__(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._fn = fn

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        moved = self._fn(tensor)
        ends = (tensor.device.type, moved.device.type)
        if moved is tensor:
            return moved
        if ends == ("jax", "jax"):
            hand_over(tensor, moved)
            return moved
        if "jax" not in ends:
            if annotation_of(tensor) is None or ends[0] == ends[1]:  # torch keeps the parameter object in these moves
                return moved
            hand_over(tensor, moved)
            return self._swapped(tensor, moved) if isinstance(tensor, nn.Parameter) else moved
        hand_over(tensor, moved)
        if isinstance(tensor, UninitializedParameter | UninitializedBuffer):  # of a lazy module: it stays without a shape
            kind: Any = type(tensor)
            moved = kind(requires_grad=tensor.requires_grad, device=moved.device, dtype=moved.dtype)
        return self._swapped(tensor, moved) if isinstance(tensor, nn.Parameter) else moved

    def _swapped(self, parameter: nn.Parameter, moved: torch.Tensor) -> torch.Tensor:
        """The parameter object with the moved value; only the moved value if torch refuses to swap, as for weakly referenced tensors."""
        new: Any = moved if isinstance(moved, nn.Parameter) else nn.Parameter(moved.detach(), parameter.requires_grad)
        vars(new).update(vars(parameter))
        if new is not moved and not isinstance(parameter, XLAShardedTensor):
            new.__class__ = type(parameter)  # a user's subclass, which an optimizer may check for
        if hand_over(parameter, new) and new.device.type != "jax" and parameter.device.type != "jax":
            new.__class__ = type(parameter)
        grad, parameter.grad = parameter.grad, None  # torch does not swap a tensor with a gradient
        try:
            torch.utils.swap_tensors(parameter, new)
        except RuntimeError:
            parameter.grad = grad
            return moved
        parameter.grad = None if grad is None else self._fn(grad)
        return parameter
