"""Rules that run on each device's own pieces, split as a line of text says: `split(rule, "b t ., b -> b t .")`.

XLA's partitioner splits what it knows: products, sums, elementwise operations. A kernel, a sort or a loop over a dim it may gather whole
first. The text names the dims of each array argument, in order, and behind the arrow of each result. Dims of one name are split alike, over
whatever axes the arguments lie; a dim written `.` is whole on every device. The rule then sees pieces, so a named dim must be one
whose elements do not depend on each other. Gradients are split by the same text.

A program for TPU chips that are not here is split by propagation alone: their compiler cannot ask back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from spmd.base._convert import exact_dtypes
from spmd.base._errors import message

Dims = tuple[str, ...]
Function = Callable[..., tuple[Any, ...]]


def split(rule: Callable[..., Any], text: str) -> Callable[..., Any]:
    """`rule` with its arrays split as `text` says.

    Raises:
        ValueError: the text is of another form, or a result lacks a name (a sum over pieces would be left to the caller).
    """
    operands, results = _parsed(text)

    def run(*args: Any, platform: str | None = None, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=lambda x: x is None)
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
        arrays = [leaves[i] for i in places]
        ranks = [a.ndim for a in arrays]
        if ranks != [len(dims) for dims in operands]:
            raise ValueError(
                message(
                    f"sharding={text!r} does not match the arrays of a call",
                    f"it names arrays of {[len(dims) for dims in operands]} dims, the call has arrays of {ranks} dims",
                    fix="name every dim of every array argument in order; '.' is a dim that is never split",
                )
            )
        form: list[Any] = []

        def of_arrays(*given: Any) -> tuple[Any, ...]:
            filled = list(leaves)
            for place, array in zip(places, given, strict=True):
                filled[place] = array
            again, named = jax.tree.unflatten(tree, filled)
            out = rule(*again, **named)
            form[:] = [type(out)]
            return tuple(out) if isinstance(out, (tuple, list)) else (out,)

        if platform == "tpu":
            out = of_arrays(*arrays)
        else:
            out = _differentiable(of_arrays, operands, results, [()] * len(results))(*arrays)
        return form[0](out) if form[0] in (tuple, list) else out[0]

    return run


def _parsed(text: str) -> tuple[list[Dims], list[Dims]]:
    left, arrow, right = text.partition("->")
    operands, results = ([tuple(part.split()) for part in side.split(",")] for side in (left, right))
    names = {name for dims in (*operands, *results) for name in dims if name != "."}
    wrong = [n for n in names if not n.isidentifier()]
    if not arrow or wrong:
        raise ValueError(
            message(
                f"sharding={text!r} names no dims" + (f": {wrong[0]!r}" if wrong else ""),
                fix='one word per dim, as in sharding="batch seq ., batch -> batch seq ."',
            )
        )
    for dims in (*operands, *results):
        if len({n for n in dims if n != "."}) != sum(n != "." for n in dims):
            raise ValueError(message(f"sharding={text!r} uses one name for two dims of an array", fix="give them two names, or '.'"))
    for dims in results:
        missing = sorted(names - set(dims))
        if missing:
            raise ValueError(
                message(
                    f"sharding={text!r}: {missing[0]!r} is not a dim of every result",
                    "each device would compute the result from its own shards only",
                    fix=f"write '.' in place of {missing[0]!r}, so that the dim is whole on every device",
                )
            )
    return operands, results


def _differentiable(fn: Function, operands: list[Dims], results: list[Dims], summed: list[Dims]) -> Function:
    """`fn` split, and its gradient split by the names of the same dims: what lacks a name is summed over its pieces."""
    plain = _split(fn, operands, results, summed)
    call: Any = jax.custom_vjp(lambda *arrays: plain(*arrays))

    def forward(*arrays: Any) -> Any:
        return plain(*arrays), arrays

    def backward(arrays: Any, cotangents: Any) -> Any:
        wanted = [i for i, a in enumerate(arrays) if jnp.issubdtype(a.dtype, jnp.inexact)]
        given = [i for i, c in enumerate(cotangents) if c.dtype != jax.dtypes.float0]

        def gradient(*both: Any) -> tuple[Any, ...]:
            values, grads = both[: len(arrays)], both[len(arrays) :]

            def of_wanted(*chosen: Any) -> Any:
                filled = list(values)
                for i, value in zip(wanted, chosen, strict=True):
                    filled[i] = value
                out = fn(*filled)
                return [out[i] for i in given]

            return jax.vjp(of_wanted, *(values[i] for i in wanted))[1](list(grads))

        taken = [*operands, *(results[i] for i in given)]
        names = {n for dims in taken for n in dims if n != "."}
        made = [operands[i] for i in wanted]
        sums = [tuple(sorted(names - set(dims))) for dims in made]
        grads = dict(zip(wanted, _differentiable(gradient, taken, made, sums)(*arrays, *(cotangents[i] for i in given)), strict=True))
        return tuple(grads.get(i) for i in range(len(arrays)))

    call.defvjp(forward, backward)
    return call


def _split(fn: Function, operands: list[Dims], results: list[Dims], summed: list[Dims]) -> Function:
    """`fn` as one operation that the partitioner asks how it is split; `summed`: per result the names whose pieces are added up."""

    def whole(*arrays: Any) -> tuple[Any, ...]:
        with exact_dtypes():
            return fn(*arrays)

    def partition(mesh: Any, args: Any, out: Any) -> Any:
        axes: dict[str, Any] = {}
        for dims, arg in zip(operands, args, strict=True):
            spec = (*arg.sharding.spec, *[None] * len(dims))
            for name, axis, size in zip(dims, spec, arg.shape, strict=False):
                if name != "." and axis is not None and size % _count(mesh, axis) == 0:
                    axes.setdefault(name, axis)

        def laid_out(dims: Dims) -> NamedSharding:
            return NamedSharding(mesh, PartitionSpec(*(axes.get(name) for name in dims)))

        def on_pieces(*pieces: Any) -> tuple[Any, ...]:
            made = whole(*pieces)
            return tuple(_summed(r, [axes[n] for n in names if n in axes]) for r, names in zip(made, summed, strict=True))

        return mesh, on_pieces, tuple(map(laid_out, results)), tuple(map(laid_out, operands))

    call = custom_partitioning(whole)
    text, held = _rule(operands, results)
    call.def_partition(partition=partition, sharding_rule=text, need_replication_factors=held)
    return call


def _summed(value: Any, axes: Sequence[Any]) -> Any:
    flat = [axis for entry in axes for axis in (entry if isinstance(entry, tuple) else (entry,))]
    return jax.lax.psum(value, tuple(flat)) if flat else value


def _count(mesh: Any, entry: Any) -> int:
    count = 1
    for axis in entry if isinstance(entry, tuple) else (entry,):
        count *= mesh.shape[axis]
    return count


def _rule(operands: list[Dims], results: list[Dims]) -> tuple[str, tuple[str, ...]]:
    """The text in jax's words, where each dim that stays whole has a name of its own; and these names."""
    held: list[str] = []
    known: dict[str, str] = {}

    def word(name: str) -> str:
        if name == ".":
            held.append(f"whole{'i' * (len(held) + 1)}")
            return held[-1]
        return known.setdefault(name, f"dim{'i' * (len(known) + 1)}")

    left, right = (", ".join(" ".join(map(word, dims)) for dims in side) for side in (operands, results))
    return f"{left} -> {right}", tuple(held)


__all__ = ["split"]
