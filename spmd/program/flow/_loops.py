"""`scan` and `while_loop` of `torch._higher_order_ops` in a trace, as `lax.scan` and `lax.while_loop`.

The gradient of a scan is a reverse scan. The forward scan stores the carry of each iteration, and the reverse scan recomputes the rest of
the iteration. A `while_loop` has no gradient: its number of iterations, and so the size of the residuals, is known only at run time.
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
from spmd.device._numbers import carried, lifted
from spmd.device._once_differentiable import once_differentiable
from spmd.device._random_stream import advanced, default_stream
from spmd.device._storage import Buffer, is_device_tensor, load, wrap
from spmd.program.flow._body import Body, Fn
from spmd.program.flow._closure import Closure
from spmd.program.flow._cond import as_predicate
from spmd.program.flow._round import one_round, pass_on, words_now
from spmd.program.flow._writes import BodyWrites


def scanned(combine_fn: Fn, init: Sequence[torch.Tensor], xs: Sequence[torch.Tensor], more: Sequence[Any]) -> Any:
    """`scan` inside a trace.

    Args:
        combine_fn: (*carry, *slices, *more) -> new carry, then results, in any container.
        init: initial carry.
        xs: tensors with a first dim of the same size n, the number of iterations.
        more: further arguments of `combine_fn`.

    Returns:
        The container that `combine_fn` returns, with the last carry, and results stacked along a new first dim.

    Raises:
        TraceError: the body changes the shapes or dtypes of the carry, returns a value that is not a device tensor, or changes a Python
            object.
    """
    words = words_now()
    firsts = [x[0] for x in xs]
    body = Body(combine_fn, [*init, *firsts, *more], words)
    _require_carry(body.shapes[: len(init)], init)
    closure_now = [t.view_as(t) for t in body.closure] if torch.is_grad_enabled() else []
    tensors = [t for t in more if is_device_tensor(t)]
    call = _ScanCall(body, len(init), len(xs), xs[0].shape[0], words)
    results = _Scan.apply(call, *init, *xs, *tensors, *closure_now)
    default_stream.draws += body.draws * call.length
    return pytree.tree_unflatten(results, body.tree)


def _require_carry(found: Sequence[Any], init: Sequence[torch.Tensor]) -> None:
    with exact_dtypes():
        then = [(tuple(t.shape), str(load(t).dtype)) for t in init]
    now = [(s.shape, str(s.dtype)) for s in found]
    if then != now:
        raise TraceError(
            message(
                "the body of a loop changes the shapes or dtypes of its carry",
                *called_at(),
                f"gets:    {then}",
                f"returns: {now}",
                fix="return a carry with the shapes and dtypes of the first one",
            )
        )


@dataclass
class _ScanCall:
    """One scan. Of its tensors, the first `carries` are the carry, the next `stacks` are sliced, and the rest are loop-invariant."""

    body: Body
    carries: int
    stacks: int
    length: int
    words: Any

    def split(self, values: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """(carry, stacks, the rest)."""
        ends = self.carries, self.carries + self.stacks
        return list(values[: ends[0]]), list(values[ends[0] : ends[1]]), list(values[ends[1] :])

    def forward(self, arrays: list[Any], keep: bool) -> tuple[list[Any], Any]:
        """(final carry and stacked results, residuals: the state at the start of each iteration, or None unless `keep`)."""
        init, stacks, rest = self.split(arrays)
        written = self.body.written

        def one(state: Any, slices: list[Any]) -> Any:
            carry, values, now = state
            outputs, new, flags = self.body.run([*carry, *slices, *rest], now, written, values)
            kept = state if keep else None
            return (outputs[: self.carries], new, advanced(now, self.body.draws)), (outputs[self.carries :], kept, flags)

        start = (init, [buffer.get() for buffer in written], self.words)
        (final, new, _), (results, kept, flags) = jax.lax.scan(one, start, stacks, length=self.length)
        pass_on(self.body.checks, flags)
        for buffer, value in zip(written, new, strict=True):
            buffer.set(value)
        return [*final, *results], kept

    def backward(self, arrays: list[Any], closure: list[Any], kept: Any, grads: list[Any]) -> list[Any]:
        """Gradients of the carry, stacks, remaining tensors and closure tensors; None for integers."""
        init, stacks, rest = self.split(arrays)
        flows = [jnp.issubdtype(a.dtype, jnp.inexact) for a in (*init, *stacks, *rest)]
        wanted = [i for i, flow in enumerate(flows) if flow]
        of_carry = [i for i in wanted if i < self.carries]
        constant = [i for i in wanted if i >= self.carries + self.stacks]
        written = set(self.body.written)
        fixed = {b: v for b, v in self.body.seen.items() if b not in written}

        def one(state: Any, stacked: Any) -> Any:
            to_carry, sums = state
            slices, (carry, values, now), to_results = stacked
            cotangents = [None] * self.carries + list(to_results)
            for i, value in zip(of_carry, to_carry, strict=True):
                cotangents[i] = value
            held = fixed | dict(zip(self.body.written, values, strict=True))
            found = self.body.pull_back([*carry, *slices, *rest], closure, held, now, wanted, cotangents)
            by_position = dict(zip(wanted, found, strict=False))
            new_sums = [by_position[i] for i in constant] + found[len(wanted) :]
            sums = [a + b for a, b in zip(sums, new_sums, strict=True)]
            return ([by_position[i] for i in of_carry], sums), [by_position.get(i) for i in range(self.carries, self.carries + self.stacks)]

        start = (
            [grads[i] if grads[i] is not None else jnp.zeros_like(init[i]) for i in of_carry],
            [jnp.zeros_like(rest[i - self.carries - self.stacks]) for i in constant] + [jnp.zeros_like(c) for c in closure],
        )
        (to_init, sums), to_stacks = jax.lax.scan(one, start, (stacks, kept, grads[self.carries :]), length=self.length, reverse=True)
        found: dict[int, Any] = dict(zip((*of_carry, *constant), (*to_init, *sums[: len(constant)]), strict=True))
        found.update({self.carries + i: value for i, value in enumerate(to_stacks)})
        return [*(found.get(i) for i in range(len(arrays))), *sums[len(constant) :]]


@once_differentiable("scan", fix="for x in xs: carry, y = fn(carry, x)   # a Python loop has all derivatives")
class _Scan(torch.autograd.Function):
    """A scan as an autograd function."""

    @staticmethod
    def forward(ctx: Any, call: _ScanCall, *tensors: torch.Tensor) -> Any:
        ctx.call = call
        ctx.set_materialize_grads(False)
        keep = any(ctx.needs_input_grad)
        count = sum(map(is_device_tensor, call.body.operands))
        with exact_dtypes():
            outputs, kept = call.forward([load(t) for t in tensors[:count]], keep)
        results = tuple(wrap(o) for o in outputs)
        leaves, ctx.tree = jax.tree.flatten(kept)
        ctx.count, ctx.num_tensors = count, len(tensors)
        ctx.save_for_backward(*tensors, *map(wrap, leaves))
        is_carry = [True] * call.carries + [False] * (len(results) - call.carries)
        flows = zip(results, call.body.grads, is_carry, strict=True)  # a carry's gradient may come from another iteration
        ctx.mark_non_differentiable(*(r for r, flow, carry in flows if not flow and not (carry and r.is_floating_point())))
        return results

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        saved = ctx.saved_tensors
        with exact_dtypes():
            values = [load(t) for t in saved]
            kept = jax.tree.unflatten(ctx.tree, values[ctx.num_tensors :])
            given = [None if g is None else load(g) for g in grads]
            found = ctx.call.backward(values[: ctx.count], values[ctx.count : ctx.num_tensors], kept, given)
        return None, *(None if f is None else wrap(f) for f in found)


def looped(cond_fn: Fn, body_fn: Fn, init: Sequence[Any], more: Sequence[Any], counts_draws: bool = False) -> Any:
    """`while_loop` inside a trace. Python ints in `init` become numbers that are computed on the device.

    Args:
        cond_fn, body_fn, init, more: the arguments of torch's `while_loop`.
        counts_draws: whether the body may draw random numbers, different ones in each iteration. A call of the program advances the stream
            by the draws of one iteration; the caller must add those of the others once their number is known.

    Raises:
        TraceError: the body draws random numbers without `counts_draws`, a gradient would be needed, or the carry changes its shapes or
            dtypes.
    """
    words = words_now()
    is_number = [not is_device_tensor(value) for value in init]
    tree: list[Any] = []
    writes = BodyWrites()

    def tensors(arrays: Sequence[Any]) -> list[Any]:
        return [lifted(a, integral=True) if number else wrap(a) for a, number in zip(arrays, is_number, strict=True)]

    def array(value: Any) -> Any:
        if isinstance(value, torch.SymFloat | torch.SymInt | torch.SymBool):
            return jnp.asarray(carried(value))
        return load(value) if is_device_tensor(value) else jnp.asarray(value)

    def test(arrays: Sequence[Any], written: Sequence[Buffer], values: Sequence[Any]) -> Any:
        with one_round(words) as round_, torch.no_grad():
            round_.hold(dict(zip(written, values, strict=True)))
            outcome = cond_fn(*tensors(arrays), *more)
            return as_predicate(outcome) if is_device_tensor(outcome) else array(outcome).astype(bool)

    def body(arrays: Sequence[Any], written: Sequence[Buffer], values: Sequence[Any], now: Any) -> Any:
        with one_round(now) as round_, writes.traced():
            round_.hold(dict(zip(written, values, strict=True)))
            operands = tensors(arrays)
            with torch.set_grad_enabled(needs_check), Closure(round_.newborn.__contains__) as closure:
                flat, spec = pytree.tree_flatten(body_fn(*operands, *more))
            outputs = [array(v) for v in flat]
            outputs = [o.astype(a.dtype) if number else o for o, a, number in zip(outputs, arrays, is_number, strict=False)]
            new = [buffer.get() for buffer in written]
        tree.append((spec, list(round_.written), round_.draws, list(closure.tensors.values())))
        return outputs, new

    with exact_dtypes():
        start = [jnp.asarray(v, jnp.int64) if number else load(v) for v, number in zip(init, is_number, strict=True)]
        needs_check = torch.is_grad_enabled()
        shapes, _ = jax.eval_shape(lambda arrays: body(arrays, [], [], words), start)
        spec, written, draws, closure = tree[-1]
        _refuse(0 if counts_draws else draws, [t for t in (*init, *more, *closure) if is_device_tensor(t)])
        needs_check = False
        _require_carry(shapes, [wrap(a) for a in start])
        state = (start, [buffer.get() for buffer in written], words)
        final, new, _ = jax.lax.while_loop(
            lambda s: test(s[0], written, s[1]), lambda s: (*body(s[0], written, s[1], s[2]), advanced(s[2], draws)), state
        )
        default_stream.draws += draws
        for buffer, value in zip(written, new, strict=True):
            buffer.set(value)
        return pytree.tree_unflatten(tensors(final), spec)


def _refuse(draws: int, tensors: Sequence[torch.Tensor]) -> None:
    if draws:
        raise TraceError(
            message(
                "the body of a while_loop in a compiled function draws random numbers",
                *called_at(),
                "the number of draws would depend on values, but the host must know it to advance the random stream",
                fix="draw before the loop, or use scan, whose number of iterations is fixed",
            )
        )
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise TraceError(
            message(
                "a while_loop in a compiled function has no gradient",
                *called_at(),
                "the number of iterations, and so the size of the residuals, is not known",
                fix="wrap it in torch.no_grad(), or use scan, whose number of iterations is fixed",
            )
        )


__all__ = ["looped", "scanned"]
