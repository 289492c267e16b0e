"""`torch.cond` in a trace: one `lax.cond`, its gradient another one of the same predicate.

A branch may read and write what lies around it: parameters, buffers. Its gradient is torch's own: the branch is traced
again with leaves in place of operands and closure tensors, as torch's own `cond` does. The random stream advances by the
draws of the branch that draws more, whichever is taken, since the count of draws is known to the host alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import torch
from torch.utils import _pytree as pytree

from spmd._convert import exact_dtypes
from spmd._errors import TraceError, called_at, message
from spmd.device._random import default_stream
from spmd.device._storage import Buffer, is_device_tensor, load, wrap
from spmd.program._closure import Closure, gradients
from spmd.program._round import one_round, words_now

Fn = Callable[..., Any]


@dataclass
class Body:
    """A function of tensors that is traced more than once, and what its first trace found.

    Attributes:
        fn: takes the operands, returns any container of tensors.
        operands: its example operands; what is no device tensor is passed on as it is.
        closure: tensors with a gradient that it takes from around it.
        written: buffers from around it that it writes.
        seen: buffers from around it that it reads or writes, with their values then.
        draws: random numbers that one run of it draws.
        shapes: shape and dtype of each result.
        tree: container of the results.
        grads: for each result whether a gradient flows back from it.
    """

    fn: Fn
    operands: Sequence[Any]
    words: Any
    closure: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    written: list[Buffer] = field(default_factory=list[Buffer])
    seen: dict[Buffer, Any] = field(default_factory=dict[Buffer, Any])
    draws: int = 0
    shapes: list[Any] = field(default_factory=list[Any])
    tree: Any = None
    grads: list[bool] = field(default_factory=list[bool])

    def __post_init__(self) -> None:
        """Trace it once, abstractly."""

        def discover(arrays: list[Any]) -> list[Any]:
            with one_round(self.words) as round_:
                operands = self.bound(arrays)
                for old, new in zip(self.operands, operands, strict=True):
                    if is_device_tensor(old) and old.requires_grad:
                        new.requires_grad_()
                with Closure(round_.newborn.__contains__) as closure:
                    flat, self.tree = pytree.tree_flatten(self.fn(*operands))
                self.closure = list(closure.tensors.values())
                self.grads = [is_device_tensor(t) and t.requires_grad for t in flat]
                outputs = [as_array(t) for t in flat]
            self.written, self.seen, self.draws = list(round_.written), dict(round_.seen), round_.draws
            return outputs

        with exact_dtypes():
            self.shapes = jax.eval_shape(discover, self.arrays(self.operands))

    @staticmethod
    def arrays(operands: Sequence[Any]) -> list[Any]:
        """The arrays among some operands."""
        return [load(t) for t in operands if is_device_tensor(t)]

    def bound(self, arrays: Sequence[Any]) -> list[Any]:
        """The operands with other arrays, as tensors of their own."""
        rest = iter(arrays)
        return [wrap(next(rest)) if is_device_tensor(t) else t for t in self.operands]

    def run(self, arrays: Sequence[Any], words: Any, written: Sequence[Buffer], values: Sequence[Any] | None = None) -> Any:
        """(results, new values of `written`) as arrays; `values`: what these held before, if not what they hold now."""
        with one_round(words) as round_:
            if values is not None:
                round_.hold(dict(zip(written, values, strict=True)))
            with torch.no_grad():
                flat = pytree.tree_leaves(self.fn(*self.bound(arrays)))
            return [as_array(t) for t in flat], [buffer.get() for buffer in written]

    def pull_back(
        self, arrays: Sequence[Any], closure: Sequence[Any], held: dict[Buffer, Any], words: Any, wanted: Sequence[int], cotangents: Any
    ) -> list[Any]:
        """Gradients, as arrays, for the operands at the positions `wanted` (of the tensors among them) and the closure.

        Args:
            arrays, closure: the values of the operands and of the closure tensors.
            held: buffers from around it, with the values that they had when it ran.
            cotangents: one array per result, None where no gradient flows.
        """
        with one_round(words) as round_:
            round_.hold(held)
            operands = self.bound(arrays)
            tensors = [t for t in operands if is_device_tensor(t)]
            leaves = [tensors[i].requires_grad_() for i in wanted]
            stand_ins = [wrap(value).requires_grad_() for value in closure]
            pairs = list(zip(self.closure, stand_ins, strict=True))
            flowing = [None if c is None else wrap(c) for c in cotangents]
            found = gradients(self.fn, operands, pairs, [*leaves, *stand_ins], flowing)
            return [load(g) for g in found]


def as_array(value: Any) -> Any:
    """A result of a branch or a body as an array.

    Raises:
        TraceError: it is no tensor on device 'jax'.
    """
    if is_device_tensor(value):
        return load(value)
    raise TraceError(
        message(
            f"a branch or loop body in a compiled function returns {type(value).__name__}, not a tensor on device 'jax'",
            *called_at(),
            fix="return tensors on device 'jax'",
        )
    )


def conditional(pred: torch.Tensor, true_fn: Fn, false_fn: Fn, operands: Sequence[Any]) -> Any:
    """`torch.cond` inside a trace; `pred`: one element on device 'jax'.

    Raises:
        TraceError: the branches return different structures, shapes or dtypes.
    """
    words = words_now()
    flat, tree = pytree.tree_flatten(tuple(operands))
    branches = [Body(lambda *ts, fn=fn: fn(*pytree.tree_unflatten(ts, tree)), flat, words) for fn in (false_fn, true_fn)]
    _require_same(*branches)
    tensors = [t for t in flat if is_device_tensor(t)]
    closure = list({id(t): t for b in branches for t in b.closure}.values())
    # through a torch function, so that stand-ins of a control flow around this one take their place
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
    """The two branches of one conditional, false first."""

    branches: list[Body]
    words: Any
    written: list[Buffer]

    def forward(self, pred: Any, arrays: list[Any]) -> list[Any]:
        false, true = (lambda now, b=b: b.run(now, self.words, self.written) for b in self.branches)
        outputs, new = jax.lax.cond(pred, true, false, arrays)
        for buffer, value in zip(self.written, new, strict=True):
            buffer.set(value)
        return outputs

    def backward(self, pred: Any, arrays: list[Any], closure: list[Any], wanted: list[int], cotangents: list[Any]) -> list[Any]:
        def of(body: Body) -> Any:
            return lambda now, values, given: body.pull_back(now, values, body.seen, self.words, wanted, given)

        false, true = map(of, self.branches)
        return jax.lax.cond(pred, true, false, arrays, closure, cotangents)


class _Conditional(torch.autograd.Function):
    """A conditional on autograd's tape."""

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
    @torch.autograd.function.once_differentiable
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
    """A one-element tensor as the 0-dim bool that lax asks for."""
    return load(pred).reshape(()).astype(bool)


__all__ = ["Body", "as_array", "as_predicate", "conditional"]
