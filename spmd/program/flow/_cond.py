"""`torch.cond` in a trace: one `lax.cond`, and for its gradient another one with the same predicate.

The random stream advances by the larger number of draws of the two branches, whichever is taken, since the host counts the draws and
does not know the predicate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import torch

from spmd.base._convert import exact_dtypes
from spmd.base._errors import TraceError, called_at, message
from spmd.base._torch import pytree
from spmd.device._once_differentiable import once_differentiable
from spmd.device._random_stream import default_stream
from spmd.device._storage import Buffer, is_device_tensor, load, wrap
from spmd.program.flow._body import Body, Fn
from spmd.program.flow._round import pass_on, words_now


def conditional(pred: torch.Tensor, true_fn: Fn, false_fn: Fn, operands: Sequence[Any]) -> Any:
    """`torch.cond` inside a trace.

    Args:
        pred: a tensor of one element on device 'jax'.

    Raises:
        TraceError: the branches return different structures, shapes or dtypes, a branch returns a value that is not a device tensor, or it
            changes a Python object.
    """
    words = words_now()
    flat, tree = pytree.tree_flatten(tuple(operands))
    branches = [Body(lambda *ts, fn=fn: fn(*pytree.tree_unflatten(ts, tree)), flat, words) for fn in (false_fn, true_fn)]
    _require_same(*branches)
    tensors = [t for t in flat if is_device_tensor(t)]
    closure = list({id(t): t for b in branches for t in b.closure}.values())
    # a torch function, so that an enclosing control flow operator can replace them by its own leaves
    closure_now = [t.view_as(t) for t in closure] if torch.is_grad_enabled() else []
    for branch in branches:
        branch.closure = closure
    call = _Branches(branches, words, list(dict.fromkeys(b for branch in branches for b in branch.written)))
    results = _Conditional.apply(call, len(tensors), pred, *tensors, *closure_now)
    default_stream.draws += max(branch.draws for branch in branches)
    return pytree.tree_unflatten(results, branches[0].tree)


def _require_same(false: Body, true: Body) -> None:
    for name, a, b in (
        ("structure", false.tree, true.tree),
        ("shapes", [(s.shape, str(s.dtype)) for s in false.shapes], [(s.shape, str(s.dtype)) for s in true.shapes]),
    ):
        if a != b:
            raise TraceError(
                message(
                    f"the branches of torch.cond return results of different {name}",
                    *called_at(),
                    f"true_fn:  {b}",
                    f"false_fn: {a}",
                    fix="let both return the same number of tensors, of the same shapes and dtypes",
                )
            )


@dataclass
class _Branches:
    """The two branches of one conditional, `false_fn` first."""

    branches: list[Body]
    words: Any
    written: list[Buffer]

    def forward(self, pred: Any, arrays: list[Any]) -> list[Any]:
        false, true = self.branches
        passed = [jnp.zeros((), jnp.int64)]  # the flag of a check in the branch that is not taken

        def run_false(now: list[Any]) -> Any:
            outputs, new, flags = false.run(now, self.words, self.written)
            return outputs, new, [*flags, *passed * len(true.checks)]

        def run_true(now: list[Any]) -> Any:
            outputs, new, flags = true.run(now, self.words, self.written)
            return outputs, new, [*passed * len(false.checks), *flags]

        outputs, new, flags = jax.lax.cond(pred, run_true, run_false, arrays)
        pass_on([check for b in self.branches for check in b.checks], flags)
        for buffer, value in zip(self.written, new, strict=True):
            buffer.set(value)
        return outputs

    def backward(self, pred: Any, arrays: list[Any], closure: list[Any], wanted: list[int], cotangents: list[Any]) -> list[Any]:
        def of(body: Body) -> Any:
            return lambda now, values, given: body.pull_back(now, values, body.seen, self.words, wanted, given)

        false, true = map(of, self.branches)
        return jax.lax.cond(pred, true, false, arrays, closure, cotangents)


@once_differentiable("torch.cond", fix="torch.where(pred, true_fn(x), false_fn(x)) computes both branches")
class _Conditional(torch.autograd.Function):
    """A conditional as an autograd function."""

    @staticmethod
    def forward(ctx: Any, call: _Branches, num_operands: int, pred: torch.Tensor, *tensors: torch.Tensor) -> Any:
        ctx.call, ctx.num_operands = call, num_operands
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(pred, *tensors)
        with exact_dtypes():
            outputs = call.forward(as_predicate(pred), [load(t) for t in tensors[:num_operands]])
        results = tuple(wrap(o) for o in outputs)
        flows = [any(flags) for flags in zip(*(b.grads for b in call.branches), strict=True)]
        ctx.mark_non_differentiable(*(r for r, flow in zip(results, flows, strict=True) if not flow))
        return results

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        pred, *tensors = ctx.saved_tensors
        count = ctx.num_operands
        wanted = [i for i in range(count) if ctx.needs_input_grad[3 + i]]
        with exact_dtypes():
            arrays = [load(t) for t in tensors]
            cotangents = [None if g is None else load(g) for g in grads]
            found = ctx.call.backward(as_predicate(pred), arrays[:count], arrays[count:], wanted, cotangents)
        result: list[Any] = [None] * (3 + len(tensors))
        for position, value in zip([*wanted, *range(count, len(tensors))], found, strict=True):
            result[3 + position] = wrap(value)
        return tuple(result)


def as_predicate(pred: torch.Tensor) -> Any:
    """A one-element tensor as the 0-dim bool array that lax requires."""
    return load(pred).reshape(()).astype(bool)


__all__ = ["as_predicate", "conditional"]
