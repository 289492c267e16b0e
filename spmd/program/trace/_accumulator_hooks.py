"""Hooks of the nodes that accumulate gradients: `torch.autograd.graph.get_gradient_edge(p).node.register_hook(hook)`.

No attribute of a tensor or of a node has these hooks. Python's garbage collector sees them while the node belongs to Python alone, which is
how programs keep such a node alive. Each new hook takes a number of `RemovableHandle`, so while no number was taken there is no new hook.
"""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Collection, Iterable
from operator import attrgetter
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from spmd.base._errors import TraceError, message
from spmd.base._torch import DisableTorchFunction
from spmd.program.reuse._columns import Guards, differ

_Hooks = list[tuple[Any, ...]]
_next_number = attrgetter("next_id")


class AccumulatorHooks:
    """The hooks of the accumulators of leaf tensors before a trace, which runs them."""

    def __init__(self, leaves: Iterable[torch.Tensor]) -> None:
        self._found = [(p, _hooks_of(p)) for p in leaves if p.requires_grad]

    def guard(self, guards: Guards, given: Collection[int]) -> None:
        """Guard that the hooks are the same.

        Args:
            given: ids of the leaves that are arguments. Their accumulators may have no hooks, since a call may get other tensors.

        Raises:
            TraceError: the accumulator of an argument has a hook.
        """
        for p, hooks in self._found:
            if id(p) in given and hooks:
                raise TraceError(
                    message(
                        f"the gradient accumulator of an argument of shape {list(p.shape)} has a hook",
                        "the hook would be a part of the program, and a later call may pass a tensor without one",
                        fix="x.register_hook(hook) or x.register_post_accumulate_grad_hook(hook)",
                    )
                )
        found = [(p, hooks) for p, hooks in self._found if id(p) not in given]
        without, having = [p for p, hooks in found if not hooks], [(p, hooks) for p, hooks in found if hooks]
        if without:
            guards.add(lambda: _changed((p, []) for p in without), numbers=[(_next_number, [RemovableHandle])])
        if having:
            guards.add(lambda: _changed(having))


def _hooks_of(leaf: torch.Tensor) -> _Hooks:
    """The hooks of the accumulator of a leaf that requires a gradient: those of each kind, in the order of their registration."""
    if leaf.is_inference():  # it has no accumulator
        return []
    with DisableTorchFunction(), torch.inference_mode(False):
        node = torch.autograd.graph.get_gradient_edge(leaf).node
    known = leaf._backward_hooks, leaf._post_accumulate_grad_hooks
    registries: Any = (r for r in gc.get_referents(node) if type(r) is OrderedDict and not any(r is other for other in known))
    return [tuple(registry.values()) for registry in registries if registry]


def _changed(expected: Iterable[tuple[torch.Tensor, _Hooks]]) -> str | None:
    for p, hooks in expected:
        now = _hooks_of(p) if p.requires_grad else []
        if len(now) != len(hooks) or any(map(differ, now, hooks)):
            return f"the gradient accumulator of a parameter of shape {list(p.shape)} got or lost a hook"
    return None


__all__ = ["AccumulatorHooks"]
