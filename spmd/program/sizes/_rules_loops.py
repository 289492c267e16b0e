"""Padding rules of loops and branches, whose functions are evaluated like the surrounding program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from spmd.program.sizes._evaluate import Equation, Evaluation, rule
from spmd.program.sizes._formulas import Inexact
from spmd.program.sizes._padded import Dims, Padded


def _arrays(values: Sequence[Padded]) -> tuple[Any, ...]:
    return tuple(v.array for v in values)


def _named(arrays: Sequence[Any], dims: Sequence[Dims]) -> list[Padded]:
    return [Padded(a, d) for a, d in zip(arrays, dims, strict=True)]


@rule("scan")
def scan(ev: Evaluation, eqn: Equation, operands: list[Padded]) -> list[Padded]:
    """Scan over the padded length. Steps beyond the real length keep the carry."""
    room, bodies = ev.room, eqn.param("jaxpr")
    num_consts, num_carry, reverse = (eqn.fixed(k) for k in ("num_consts", "num_carry", "reverse"))
    consts, carry, rows = operands[:num_consts], operands[num_consts : num_consts + num_carry], operands[num_consts + num_carry :]
    length = tuple(eqn.param("length"))
    rows = [room.relaid(v, 0, (length,)) for v in rows]
    varies, count = len(set(length)) > 1, room.real(length)
    carry_dims, row_dims, made = [v.dims for v in carry], [v.dims[1:] for v in rows], list[Dims]()

    def step(state: Any, given: Any) -> Any:
        place, held, parts = given[0], state, given[1:]
        inputs = [*consts, *_named(held, carry_dims), *_named(parts, row_dims)]
        results = ev.call(bodies, inputs)
        new = [room.like(v, d) for v, d in zip(results[:num_carry], carry_dims, strict=True)]
        made[:] = [v.dims for v in results[num_carry:]]
        after = _arrays(new)
        if varies:
            after = tuple(jnp.where(place < count, a, b) for a, b in zip(after, held, strict=True))
        return after, _arrays(results[num_carry:])

    places = jnp.arange(room.size(length), dtype=np.int64)
    last, stacked = lax.scan(step, _arrays(carry), (places, *_arrays(rows)), length=room.size(length), reverse=reverse)
    return [*_named(last, carry_dims), *_named(stacked, [((length,), *d) for d in made])]


@rule("while")
def repeat(ev: Evaluation, eqn: Equation, operands: list[Padded]) -> list[Padded]:
    """Loop with a carry of fixed dims."""
    conditions, bodies = eqn.param("cond_jaxpr"), eqn.param("body_jaxpr")
    of_condition, of_body = eqn.fixed("cond_nconsts"), eqn.fixed("body_nconsts")
    first, second = operands[:of_condition], operands[of_condition : of_condition + of_body]
    carry = operands[of_condition + of_body :]
    dims = [v.dims for v in carry]

    def condition(state: Any) -> Any:
        return ev.call(conditions, [*first, *_named(state, dims)])[0].array

    def body(state: Any) -> Any:
        results = ev.call(bodies, [*second, *_named(state, dims)])
        return _arrays([ev.room.like(v, d) for v, d in zip(results, dims, strict=True)])

    return _named(lax.while_loop(condition, body, _arrays(carry)), dims)


@rule("cond")
def branch(ev: Evaluation, eqn: Equation, operands: list[Padded]) -> list[Padded]:
    """Branches whose results have the dims of the first one."""
    sides = list(zip(*eqn.param("branches"), strict=True))
    index, given = operands[0], operands[1:]
    if index.dims:
        raise Inexact("the index of the branch is not a scalar")
    dims: list[Dims] = []

    def side(closed: Any) -> Any:
        def run(*arrays: Any) -> Any:
            results = ev.call(closed, _named(arrays, [v.dims for v in given]))
            if not dims:
                dims.extend(v.dims for v in results)
            return _arrays([ev.room.like(v, d) for v, d in zip(results, dims, strict=True)])

        return run

    return _named(lax.switch(index.array, [side(c) for c in sides], *_arrays(given)), dims)


__all__ = ["branch", "repeat", "scan"]
