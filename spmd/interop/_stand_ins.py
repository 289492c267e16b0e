"""Runs a module on replacements of its parameters and buffers.

    with StandIns(module, {"up.weight": w, ...}) as stand_ins:
        y = module(x)
        stand_ins.written()                # buffers that the module wrote to

Hooks of parameters fire for their replacements. On exit, the module's own tensors are restored. A change that would be lost with the
replacements is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from spmd.base._errors import SpmdError, TraceError, called_at, message
from spmd.base._torch import pytree
from spmd.device._storage import buffer_of, is_device_tensor


class ModuleTensor(NamedTuple):
    """A parameter or buffer of a module.

    Attributes:
        places: the (dict, key) pairs that refer to it; several if it is tied.
    """

    tensor: torch.Tensor
    places: list[tuple[dict[str, Any], str]]


def module_tensors(module: nn.Module) -> dict[str, ModuleTensor]:
    """Every parameter and buffer once, by its first name in `state_dict`; includes buffers that are not persistent."""
    names: dict[str, ModuleTensor] = {}
    known: dict[int, ModuleTensor] = {}
    for prefix, part in module.named_modules():
        for registry in (part._parameters, part._buffers):
            for key, tensor in registry.items():
                if tensor is None:
                    continue
                held = known.get(id(tensor))
                if held is None:
                    held = known[id(tensor)] = names[f"{prefix}.{key}" if prefix else key] = ModuleTensor(tensor, [])
                held.places.append((registry, key))
    return names


class StandIns:
    """A context in which a module's tensors are replaced.

    Args:
        tensors: replacements for all tensors, by the names of `module_tensors`.
    """

    def __init__(self, module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
        self.module, self.tensors = module, dict(tensors)
        self.held = module_tensors(module)

    def __enter__(self) -> StandIns:
        for name, (tensor, _) in self.held.items():
            if getattr(tensor, "_post_accumulate_grad_hooks", None):
                raise SpmdError(
                    message(
                        f"parameter {name!r} has a hook on gradient accumulation, but a JAX function accumulates no gradients",
                        fix="remove the hook, or use parameter.register_hook",
                    )
                )
        self.attributes = [(part, dict(vars(part))) for part in self.module.modules()]
        for name, (tensor, places) in self.held.items():
            stand_in = self.tensors[name]
            if stand_in.requires_grad:
                for hook in (tensor._backward_hooks or {}).values():
                    stand_in.register_hook(hook)
            for registry, key in places:
                registry[key] = stand_in
        self.before = {name: _state(self.tensors[name]) for name in self.held}
        return self

    def __exit__(self, *raised: object) -> None:
        self.after = {name: places[0][0].get(places[0][1]) for name, (_, places) in self.held.items()}
        for tensor, places in self.held.values():
            for registry, key in places:
                registry[key] = tensor
        left = [name for name in map(self._put_back, range(len(self.attributes))) if name]
        if left and raised[0] is None:
            raise TraceError(
                message(
                    f"the module stores a tensor of this call in {left[0]}",
                    "a JAX function has no state, and the next call would see a tensor of this one",
                    fix="keep it with self.register_buffer(name, tensor): written buffers are returned by fn.with_buffers",
                )
            )

    def _put_back(self, position: int) -> str | None:
        """Restore a module's attributes to which the call assigned tensors. Returns the name of one, or None."""
        part, before = self.attributes[position]
        found = None
        for key, value in list(vars(part).items()):
            if key in ("_parameters", "_buffers", "_modules") or (key in before and before[key] is value):
                continue
            if any(is_device_tensor(leaf) for leaf in pytree.tree_leaves(value)):
                found = f"{type(part).__name__}.{key}"
                vars(part).pop(key) if key not in before else vars(part).update({key: before[key]})
        return found

    def written(self) -> dict[str, torch.Tensor]:
        """The new values of the tensors that the module wrote to, by name.

        Raises:
            TraceError: the module removed a tensor.
        """
        found: dict[str, torch.Tensor] = {}
        for name, (_, places) in self.held.items():
            registry, key = places[0]
            now = registry.get(key)
            if now is None:
                raise TraceError(message(f"the module sets {name!r} to None", *called_at(), fix="assign zeros instead"))
            if now is not self.tensors[name] or _state(now) != self.before[name]:
                found[name] = now
        return found


def _state(tensor: torch.Tensor) -> tuple[int, int]:
    """A value that changes with every write to the tensor."""
    return id(buffer_of(tensor).value), tensor._version


__all__ = ["ModuleTensor", "StandIns", "module_tensors"]
