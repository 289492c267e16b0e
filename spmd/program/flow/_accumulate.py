"""`spmd.accumulate(k)`: a loop over k micro-batches that is traced twice, for any k.

    @spmd.compile
    def step(xs, ys):                      # [k, batch, ...]
        opt.zero_grad()
        losses = spmd.accumulate(k)(micro)(xs, ys)
        opt.step()
        return losses.mean()

It is equivalent to `[micro(xs[i], ys[i]) for i in range(k)]` with stacked results. In eager mode it runs this loop. In a compiled
function the first micro-batch is traced as it stands, so that gradients are created as in PyTorch. The other micro-batches are one
`jax.lax.scan`, whose carry is every buffer that a micro-batch writes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import torch

from spmd.base._convert import exact_dtypes
from spmd.base._errors import SpmdError, message
from spmd.base._torch import pytree
from spmd.base._wrong_arguments import require_function
from spmd.device._checks import Check
from spmd.device._random_stream import advanced, default_stream
from spmd.device._storage import Buffer, load, recording, wrap
from spmd.program.flow._round import CheckedRound, one_round, pass_on, stored_value, words_now
from spmd.program.flow._writes import BodyWrites


def accumulate(rounds: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Run a function on each of `rounds` micro-batches and stack its results.

    Args:
        rounds: number of micro-batches k, at least 1.

    Returns:
        A decorator: the decorated function takes tensors with a first dim of size k and returns its results stacked along
        a new first dim of size k.

    Raises:
        SpmdError: `rounds` is no int of at least 1, what is decorated is no function, or an argument has no first dim of size k.
        TraceError: inside a compiled function, every micro-batch changes a Python object.
    """
    if type(rounds) is not int or rounds < 1:
        raise SpmdError(message(f"accumulate got {rounds!r} micro-batches, but needs at least 1", fix="spmd.accumulate(4)"))

    def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
        require_function(fn, "accumulate", f"spmd.accumulate({rounds})(micro)(x, y)")

        def run(*args: torch.Tensor) -> Any:
            for arg in args:
                if arg.dim() == 0 or arg.shape[0] != rounds:
                    raise SpmdError(
                        message(
                            f"accumulate({rounds}) needs every argument stacked along a first dim of {rounds}",
                            f"got one of shape {tuple(arg.shape)}",
                            fix=f"reshape the batch to [{rounds}, batch // {rounds}, ...]",
                        )
                    )
            first = _detached(fn(*(arg[0] for arg in args)))
            if rounds == 1:
                return pytree.tree_map(lambda t: t.unsqueeze(0), first)
            if recording.get() is None:
                rest = [_detached(fn(*(arg[i] for arg in args))) for i in range(1, rounds)]
                return pytree.tree_map(lambda *ts: torch.stack(ts), first, *rest)
            with exact_dtypes():
                stacked = _scanned(fn, [load(arg)[1:] for arg in args], rounds - 1)
            return pytree.tree_map(lambda head, tail: torch.cat([head.unsqueeze(0), tail]), first, stacked)

        return run

    return decorate


def _scanned(fn: Callable[..., Any], stacks: list[Any], rounds: int) -> Any:
    """Run micro-batches as one scan. The carry is the buffers that a micro-batch writes and the random state.

    Args:
        stacks: arrays of shape [rounds, batch, ...].

    Returns:
        The results, stacked along a new first dim.
    """
    words = words_now()
    tree: list[Any] = []
    carried: list[Buffer] = []
    checks: list[Check] = []
    draws = [0]
    writes = BodyWrites(is_micro_batch=True)

    def discover(slices: list[Any], now: Any) -> None:
        with one_round(now, CheckedRound) as round_, writes.traced():
            fn(*map(wrap, slices))
        checks.extend(check for check, _ in round_.checks)
        carried.extend(round_.written)
        draws[0] = round_.draws

    jax.eval_shape(discover, [stack[0] for stack in stacks], words)

    def one(carry: Any, slices: list[Any]) -> Any:
        values, now = carry
        with one_round(now, CheckedRound) as round_, writes.traced():
            round_.hold(dict(zip(carried, values, strict=True)))
            flat, spec = pytree.tree_flatten(fn(*map(wrap, slices)))
            tree.append(spec)
            outputs = [load(t) for t in flat]
            new = [stored_value(buffer) for buffer in carried]
            flags = round_.flags()
        return (new, advanced(now, draws[0])), (outputs, flags)

    start = [stored_value(buffer) for buffer in carried]
    (final, _), (outputs, flags) = jax.lax.scan(one, (start, words), stacks, length=rounds)
    pass_on(checks, flags)
    for buffer, value in zip(carried, final, strict=True):
        buffer.set(value)
    default_stream.draws += draws[0] * rounds
    return pytree.tree_unflatten([wrap(o) for o in outputs], tree[-1])


def _detached(result: Any) -> Any:
    return pytree.tree_map(lambda t: t.detach() if isinstance(t, torch.Tensor) else t, result)
