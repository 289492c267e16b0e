"""The backward pass of a graph, for the outputs that have a gradient in a call.

Note [Outputs without a gradient]
A graph is a single node on autograd's tape. A loss that uses only some of its outputs leaves the others without a gradient. PyTorch would
not visit what only those depend on: such inputs get None, and an infinity there is not multiplied by zero. So each set of outputs with a
gradient gets its own backward pass, derived from the one for all outputs. The missing cotangents are known zeros, and so is everything
computed only from them. Which inputs an output reaches is read from autograd's graph during the trace. A user-defined derivative
(`torch.autograd.Function`) may be nonzero for zero cotangents, so its results are made to depend on them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import torch

from spmd.base._convert import exact_dtypes
from spmd.base._jax import as_recorded, eval_jaxpr, is_jaxpr, is_literal
from spmd.device._storage import load, wrap

_CALLS = frozenset(("pjit", "jit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "remat2"))


@dataclass(frozen=True)
class Backward:
    """The backward pass of one trace.

    Attributes:
        rest: closed jaxpr from the values it needs and the cotangents to those gradients that depend on a cotangent.
        places: index of each needed value among the saved values. Gradients that do not depend on any cotangent come first.
        is_known: which gradients do not depend on any cotangent.
        reached: for each output that takes a cotangent, which gradients depend on it, by autograd's graph.
        constants: closed jaxpr without inputs, whose results follow the saved values in the numbering of `places`.
        num_again: number of further inputs, after the saved values.
    """

    rest: Any
    places: list[int]
    is_known: list[bool]
    reached: list[list[bool]]
    constants: Any
    num_again: int

    @functools.cached_property
    def groups(self) -> dict[tuple[int, ...], list[int]]:
        """Indices of gradients, by the outputs that reach them."""
        found: dict[tuple[int, ...], list[int]] = {}
        for gradient, own in enumerate(zip(*self.reached, strict=True)):
            found.setdefault(tuple(i for i, is_reached in enumerate(own) if is_reached), []).append(gradient)
        return found

    def run(self, *arrays: Any) -> list[Any]:
        """All gradients, from the saved values and all cotangents."""
        return self._gradients(arrays, lambda given: eval_jaxpr(self.rest.jaxpr, self.rest.consts, *given))

    def _gradients(self, arrays: Sequence[Any], rest: Callable[[list[Any]], list[Any]]) -> list[Any]:
        count = len(arrays) - len(self.reached) - self.num_again
        known = [*arrays[:count], *eval_jaxpr(self.constants.jaxpr, self.constants.consts)]
        values, split = [known[i] for i in self.places], sum(self.is_known)
        known, news = iter(values[:split]), iter(rest([*values[split:], *arrays[count:]]))
        return [next(known) if is_known else next(news) for is_known in self.is_known]

    def for_outputs(self, is_given: Sequence[bool], kept: Sequence[Any]) -> tuple[Callable[..., list[Any]], list[int]]:
        """The pass for a subset of the outputs.

        Args:
            is_given: which of the outputs that take a cotangent have one.
            kept: the saved values, or their shapes and dtypes.

        Returns:
            (run, found): a function of the saved values and the given cotangents, and the indices of the gradients that it returns.
        """
        if all(is_given):
            return self.run, list(range(len(self.is_known)))
        found: list[int] = []
        places = [i for i, own in enumerate(zip(*self.reached, strict=True)) if any(r and g for r, g in zip(own, is_given, strict=True))]
        cotangents = self.rest.in_avals[len(self.rest.in_avals) - len(is_given) :]

        def run(*arrays: Any) -> list[Any]:
            rest = iter(arrays[len(kept) :])
            given = [*arrays[: len(kept)], *(next(rest) if g else ZERO for g in is_given)]
            grads = self._gradients(given, lambda values: _results(self.rest, values, len(is_given)))
            found[:] = [i for i in places if grads[i] is not ZERO]
            return [grads[i] for i in found]

        with exact_dtypes():
            closed: Any = jax.make_jaxpr(run)(*map(jax.typeof, kept), *(c for c, g in zip(cotangents, is_given, strict=True) if g))
        return lambda *arrays: eval_jaxpr(closed.jaxpr, closed.consts, *arrays), found


class _Zero:
    """A missing cotangent, or a value computed only from missing ones."""


ZERO = _Zero()


def _results(closed: Any, values: Sequence[Any], num_cotangents: int) -> list[Any]:
    depends = [False] * (len(values) - num_cotangents) + [True] * num_cotangents
    return [value for value, _ in _evaluated(closed, list(zip(values, depends, strict=True)))]


def _evaluated(closed: Any, args: Sequence[tuple[Any, bool]]) -> list[tuple[Any, bool]]:
    """Evaluate a closed jaxpr on (value, whether it depends on a cotangent) pairs; returns such pairs."""
    jaxpr, consts = (closed.jaxpr, closed.consts) if hasattr(closed, "consts") else (closed, ())
    known = dict(zip(jaxpr.constvars, ((c, False) for c in consts), strict=True)) | dict(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> tuple[Any, bool]:
        return (atom.val, False) if is_literal(atom) else known[atom]

    for equation in jaxpr.eqns:
        with as_recorded(equation):
            known.update(zip(equation.outvars, _applied(equation, list(map(read, equation.invars))), strict=True))
    return list(map(read, jaxpr.outvars))


def _applied(equation: Any, operands: list[tuple[Any, bool]]) -> list[tuple[Any, bool]]:
    """The results of an equation. A derivative is linear in the cotangents, so it is zero if all of them are."""
    name, zeros = equation.primitive.name, [value is ZERO for value, _ in operands]
    depends = any(dependent for _, dependent in operands)
    if not any(zeros):
        return [(value, depends) for value in _bound(equation, [value for value, _ in operands])]
    if name in ("add", "add_any") and not all(zeros) and len({v.aval.shape for v in equation.invars}) == 1:
        return [(operands[zeros.index(False)][0], True)]
    if name == "optimization_barrier":
        made = iter(_bound(equation, [value for value, _ in operands if value is not ZERO]) if not all(zeros) else ())
        return [(ZERO if zero else next(made), True) for zero in zeros]
    if all(value is ZERO for value, dependent in operands if dependent):
        return [(ZERO, True)] * len(equation.outvars)
    if name in _CALLS:
        return _evaluated(next(v for v in equation.params.values() if is_jaxpr(v)), operands)
    avals = [v.aval for v in equation.invars]
    arrays = [jnp.zeros(aval.shape, aval.dtype) if value is ZERO else value for aval, (value, _) in zip(avals, operands, strict=True)]
    return [(value, True) for value in _bound(equation, arrays)]


def _bound(equation: Any, arrays: list[Any]) -> list[Any]:
    made = equation.primitive.bind(*arrays, **equation.params)
    return list(made) if equation.primitive.multiple_results else [made]


def reached_by(output: torch.Tensor, inputs: Sequence[torch.Tensor]) -> list[bool]:
    """Which of these leaf tensors `output` depends on, by autograd's graph."""
    variables = [getattr(node, "variable", None) for node in _nodes([output])]
    return [any(variable is tensor for variable in variables) for tensor in inputs]


def tie_derivatives(outputs: Sequence[torch.Tensor]) -> None:
    """Make results of user-defined derivatives zero if no cotangent reaches them, and give them zeros for missing cotangents."""
    for node in _nodes(outputs):
        written_as = getattr(type(node), "_forward_cls", None)
        if written_as is not None and not written_as.__module__.startswith("spmd."):
            node.register_prehook(lambda grads: _tied(grads, grads))
            node.register_hook(_tied)


def _tied(values: Sequence[torch.Tensor | None], grads: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    """The values, unchanged, but depending formally on all of these gradients; XLA optimizes the dependence away."""
    marks = [jnp.any(load(grad) != 0) for grad in grads if grad is not None]
    if not marks:
        return tuple(values)
    mark = jnp.any(jnp.stack(marks))
    return tuple(None if v is None else wrap(jax.lax.select(jnp.broadcast_to(mark, v.shape), load(v), load(v))) for v in values)


def _nodes(outputs: Sequence[torch.Tensor]) -> list[Any]:
    """All nodes of autograd's graph above `outputs`."""
    found: dict[Any, None] = {}
    waiting: list[Any] = [t.grad_fn for t in outputs]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found[node] = None
            waiting += [before for before, _ in node.next_functions]
    return list(found)


__all__ = ["Backward", "reached_by", "tie_derivatives"]
