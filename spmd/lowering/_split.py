"""Runs a rule on each device's shards, as described by a line of text: `split(rule, "b t ., b -> b t .")`.

XLA's partitioner shards matmuls, sums and elementwise operations. For a kernel, a sort or a loop over a dim it may gather the operands
first. The text names the dims of each array argument, in order, and, after the arrow, those of each result. Dims with the same name are
sharded alike, over the axes of the arguments; a dim written `.` is not sharded. The rule then sees one device's shards, so the elements
along a named dim must not depend on each other. Gradients are sharded by the same text.

Programs for TPUs ignore the text: the rule runs on global arrays and XLA's partitioner alone shards its operations, because libtpu has
no interface for `custom_partitioning`, which lets a compiler ask how to shard an operation.
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
    """`rule` on the shards that `text` describes. The returned function also takes the keyword argument `platform`, that of the program.

    Raises:
        ValueError: the text is malformed, or a named dim is missing from a result (the rule cannot reduce over a sharded dim).
    """
    operands, results = _parsed(text)

    def run(*args: Any, platform: str | None = None, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=lambda x: x is None)
        positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
        arrays = [leaves[i] for i in positions]
        ranks = [a.ndim for a in arrays]
        if ranks != [len(dims) for dims in operands]:
            raise ValueError(
                message(
                    f"sharding={text!r} does not match the arrays of a call",
                    f"it describes arrays with {[len(dims) for dims in operands]} dims, the call has arrays with {ranks} dims",
                    fix="name every dim of every array argument in order; '.' is a dim that is never sharded",
                )
            )
        result_type: list[Any] = []

        def of_arrays(*given: Any) -> tuple[Any, ...]:
            filled = list(leaves)
            for position, array in zip(positions, given, strict=True):
                filled[position] = array
            again, named = jax.tree.unflatten(tree, filled)
            out = rule(*again, **named)
            result_type[:] = [type(out)]
            return tuple(out) if isinstance(out, (tuple, list)) else (out,)

        if platform == "tpu":
            out = of_arrays(*arrays)
        else:
            out = _differentiable(of_arrays, operands, results, [()] * len(results))(*arrays)
        return result_type[0](out) if result_type[0] in (tuple, list) else out[0]

    return run


def _parsed(text: str) -> tuple[list[Dims], list[Dims]]:
    left, arrow, right = text.partition("->")
    operands, results = ([tuple(part.split()) for part in side.split(",")] for side in (left, right))
    names = {name for dims in (*operands, *results) for name in dims if name != "."}
    wrong = [n for n in names if not n.isidentifier()]
    if not arrow or wrong:
        raise ValueError(
            message(
                f"sharding={text!r} " + (f"contains {wrong[0]!r}, which is not a name" if wrong else "has no '->' before its results"),
                fix='write one name per dim, as in sharding="batch seq ., batch -> batch seq ."',
            )
        )
    for dims in (*operands, *results):
        if len({n for n in dims if n != "."}) != sum(n != "." for n in dims):
            raise ValueError(message(f"sharding={text!r} uses one name for two dims of an array", fix="write two names, or '.'"))
    for dims in results:
        missing = sorted(names - set(dims))
        if missing:
            raise ValueError(
                message(
                    f"sharding={text!r}: {missing[0]!r} is not a dim of every result",
                    "each device would compute the result from its own shards only",
                    fix=f"write '.' in place of {missing[0]!r}, so that the dim is not sharded",
                )
            )
    return operands, results


def _differentiable(fn: Function, operands: list[Dims], results: list[Dims], summed: list[Dims]) -> Function:
    """`fn` on shards, as is its gradient. A gradient that lacks a named dim is summed over the shards of that dim."""
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
        returned = [operands[i] for i in wanted]
        sums = [tuple(sorted(names - set(dims))) for dims in returned]
        grads = dict(zip(wanted, _differentiable(gradient, taken, returned, sums)(*arrays, *(cotangents[i] for i in given)), strict=True))
        return tuple(grads.get(i) for i in range(len(arrays)))

    call.defvjp(forward, backward)
    return call


def _split(fn: Function, operands: list[Dims], results: list[Dims], summed: list[Dims]) -> Function:
    """`fn` as one operation whose sharding the partitioner asks for. `summed`: per result, names of dims over whose shards it is summed."""

    def whole(*arrays: Any) -> tuple[Any, ...]:
        with exact_dtypes():
            return fn(*arrays)

    def partition(mesh: Any, args: Any, out: Any) -> Any:
        axes: dict[str, Any] = {}
        for dims, arg in zip(operands, args, strict=True):
            spec = (*arg.sharding.spec, *[None] * len(dims))
            for name, axis, size in zip(dims, spec, arg.shape, strict=False):
                if name != "." and axis is not None and size % _num_shards(mesh, axis) == 0:
                    axes.setdefault(name, axis)

        def sharding_of(dims: Dims) -> NamedSharding:
            return NamedSharding(mesh, PartitionSpec(*(axes.get(name) for name in dims)))

        def on_shards(*shards: Any) -> tuple[Any, ...]:
            out = whole(*shards)
            return tuple(_summed(r, [axes[n] for n in names if n in axes]) for r, names in zip(out, summed, strict=True))

        return mesh, on_shards, tuple(map(sharding_of, results)), tuple(map(sharding_of, operands))

    call = custom_partitioning(whole)
    text, unsharded = _sharding_rule(operands, results)
    call.def_partition(partition=partition, sharding_rule=text, need_replication_factors=unsharded)
    return call


def _summed(value: Any, axes: Sequence[Any]) -> Any:
    flat = [axis for entry in axes for axis in (entry if isinstance(entry, tuple) else (entry,))]
    return jax.lax.psum(value, tuple(flat)) if flat else value


def _num_shards(mesh: Any, entry: Any) -> int:
    count = 1
    for axis in entry if isinstance(entry, tuple) else (entry,):
        count *= mesh.shape[axis]
    return count


def _sharding_rule(operands: list[Dims], results: list[Dims]) -> tuple[str, tuple[str, ...]]:
    """(the text as a sharding rule of jax, factors of the unsharded dims). In the rule, every '.' is a factor of its own."""
    unsharded: list[str] = []
    factors: dict[str, str] = {}

    def factor(name: str) -> str:
        if name == ".":
            unsharded.append(f"whole{'i' * (len(unsharded) + 1)}")
            return unsharded[-1]
        return factors.setdefault(name, f"dim{'i' * (len(factors) + 1)}")

    left, right = (", ".join(" ".join(map(factor, dims)) for dims in side) for side in (operands, results))
    return f"{left} -> {right}", tuple(unsharded)


__all__ = ["split"]
