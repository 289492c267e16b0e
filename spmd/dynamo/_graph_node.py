"""A call of a graph's programs as a node on autograd's tape; forward and backward are one program each.

Inputs that the backward pass needs are saved as tensors, so a write in between is detected. Values that the forward pass computed for it
are attached to a single tensor without elements, which is saved too: a hundred arrays cost as much as one. If saved-tensor hooks are
active, each is a tensor of its own, so that the hooks see it.

If the outputs do not all reach the same inputs, autograd must not visit inputs that only outputs without a gradient reach, because their
hooks would run. So there is a node for each group of inputs that the same outputs reach, and after these one node for each output. The
backward program runs once for all groups, with the gradients that arrived.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from spmd.base._torch import top_saved_tensors_default_hooks
from spmd.device._once_differentiable import once_differentiable
from spmd.device._storage import buffer_of, load, wrap, wrap_unset

if TYPE_CHECKING:
    from spmd.dynamo._graph_executables import GraphExecutables

_BYTE = np.dtype(np.uint8)
_FIX = "spmd.compile(step) instead of torch.compile(model): a compiled step has all derivatives"
Gradient = torch.Tensor | None


def on_tape(program: GraphExecutables, tensors: list[torch.Tensor], args: tuple[Any, ...]) -> Sequence[torch.Tensor]:
    """The computed values of a call, with their autograd nodes."""
    traced = program.traced
    assert traced.backward is not None
    groups = traced.backward.groups
    if len(groups) == 1:
        return _Whole.apply(program, tensors, args, *[tensors[i] for i in traced.gradients])
    with torch.no_grad():
        made, computed = program.forward(tensors, args)
    call = _Call(program, program.sizes_of(args))
    before: dict[int, list[torch.Tensor]] = {}
    for outputs, gradients in groups.items():
        shapes = [made[traced.flowing[i]] for i in outputs]
        found = _Group.apply(call, outputs, tensors, computed, shapes, *[tensors[traced.gradients[i]] for i in gradients])
        for i, stand_in in zip(outputs, found, strict=True):
            before.setdefault(i, []).append(stand_in)
    for i, stand_ins in before.items():
        made[traced.flowing[i]] = _Output.apply(call, i, [made[traced.flowing[i]]], *stand_ins)
    return made


@once_differentiable("a graph of torch.compile", fix=_FIX)
class _Whole(torch.autograd.Function):
    """apply(program, tensors, args, *tensors that get a gradient)"""

    @staticmethod
    def forward(ctx: Any, program: GraphExecutables, tensors: list[torch.Tensor], args: tuple[Any, ...], *wanted: torch.Tensor) -> Any:
        """The computed values, as a tuple of tensors."""
        traced = program.traced
        made, computed = program.forward(tensors, args)
        ctx.program, ctx.sizes = program, program.sizes_of(args)
        _keep(ctx, program, tensors, computed)
        if len(traced.flowing) < len(made):
            flowing = set(traced.flowing)
            ctx.mark_non_differentiable(*(t for i, t in enumerate(made) if i not in flowing))
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *grads: Gradient) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Gradients of `wanted`."""
        program: GraphExecutables = ctx.program
        given = [grads[i] for i in program.traced.flowing]
        return None, None, None, *program.backward(_kept(ctx, program), list(map(_loaded, given)), ctx.sizes)


class _Call:
    """State that the nodes of one call share.

    Attributes:
        arrived: gradients of outputs in a backward pass whose program has not run yet.
        ready: for each group whose node has not run yet, the output gradients that the program used and the gradients that it returned.
    """

    def __init__(self, program: GraphExecutables, sizes: tuple[int, ...]) -> None:
        self.program, self.sizes = program, sizes
        self.arrived: dict[int, torch.Tensor] = {}
        self.ready: dict[tuple[int, ...], tuple[dict[int, torch.Tensor], list[Gradient]]] = {}

    def gradients(self, outputs: tuple[int, ...], own: dict[int, torch.Tensor], ctx: Any) -> list[Gradient]:
        """Gradients of a group's inputs, given gradients of its outputs. The program runs once for all groups."""
        had, made = self.ready.pop(outputs, ({}, []))
        if made and _is_same(had, own):
            if ctx.is_carried:  # otherwise saved-tensor hooks would restore values that are not needed
                ctx.saved_tensors  # noqa: B018 - autograd refuses a second backward pass
            return made
        given = self.arrived if _is_same(_part(self.arrived, outputs), own) else own
        self.arrived = {}
        traced = self.program.traced
        assert traced.backward is not None
        cotangents = [_loaded(given.get(i)) for i in range(len(traced.flowing))]
        found = self.program.backward(_kept(ctx, self.program), cotangents, self.sizes)
        for others, gradients in traced.backward.groups.items():
            self.ready[others] = _part(given, others), [found[i] for i in gradients]
        return self.ready.pop(outputs)[1]


@once_differentiable("a graph of torch.compile", fix=_FIX, others=lambda call, outputs, tensors, *rest: tensors)
class _Group(torch.autograd.Function):
    """apply(call, outputs, tensors, computed, tensors of the outputs' shapes, *inputs that exactly these outputs reach)"""

    @staticmethod
    def forward(ctx: Any, call: _Call, outputs: tuple[int, ...], tensors: Any, computed: Any, like: Any, *wanted: torch.Tensor) -> Any:
        """A tensor without a value for each of the outputs: an edge for its gradient."""
        ctx.call, ctx.outputs = call, outputs
        _keep(ctx, call.program, tensors, computed)
        return tuple(wrap_unset(tuple(t.shape), buffer_of(t).dtype) for t in like)

    @staticmethod
    def backward(ctx: Any, *grads: Gradient) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Gradients of `wanted`."""
        own = {i: grad for i, grad in zip(ctx.outputs, grads, strict=True) if grad is not None}
        return (None,) * 5 + tuple(ctx.call.gradients(ctx.outputs, own, ctx))


class _Output(torch.autograd.Function):
    """apply(call, index of the output, [its value], *placeholders of it at its groups)"""

    @staticmethod
    def forward(ctx: Any, call: _Call, output: int, value: list[torch.Tensor], *stand_ins: torch.Tensor) -> torch.Tensor:
        """The value."""
        ctx.call, ctx.output, ctx.count = call, output, len(stand_ins)
        ctx.set_materialize_grads(False)
        return value[0]

    @staticmethod
    def backward(ctx: Any, grad: Gradient) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The output's gradient, for each group."""
        if grad is not None:
            ctx.call.arrived[ctx.output] = grad
        return None, None, None, *([grad] * ctx.count)


def _keep(ctx: Any, program: GraphExecutables, tensors: list[torch.Tensor], computed: list[Any]) -> None:
    """Save what the backward pass needs."""
    ctx.set_materialize_grads(False)
    ctx.is_carried = top_saved_tensors_default_hooks(False) is None
    own = [_carrying(computed)] if ctx.is_carried else map(wrap, computed)
    ctx.save_for_backward(*(tensors[i] for i in program.traced.kept_inputs), *own)


def _kept(ctx: Any, program: GraphExecutables) -> list[Any]:
    """The saved arrays."""
    positions, saved = program.traced.kept_inputs, ctx.saved_tensors
    inputs = program.arrays(saved[: len(positions)], [program.given[i] for i in positions])
    return [*inputs, *(saved[len(positions)].untyped_storage().spmd_carried if ctx.is_carried else map(load, saved[len(positions) :]))]


def _carrying(arrays: list[Any]) -> torch.Tensor:
    tensor = wrap_unset((0,), _BYTE)
    tensor.untyped_storage().spmd_carried = arrays  # pyright: ignore[reportAttributeAccessIssue]
    return tensor


def _loaded(grad: Gradient) -> Any:
    return None if grad is None else load(grad)


def _part(gradients: Mapping[int, torch.Tensor], outputs: Sequence[int]) -> dict[int, torch.Tensor]:
    return {i: gradients[i] for i in outputs if i in gradients}


def _is_same(one: Mapping[int, torch.Tensor], other: Mapping[int, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(one[i] is other[i] for i in one)


__all__ = ["on_tape"]
