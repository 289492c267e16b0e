"""A function of tensors that is traced separately from the code around it: a branch, or the body of a loop.

It may read and write tensors from outside. The first, abstract trace finds them. Its gradient is computed by torch's autograd, in a
trace with new leaves in place of the operands and closure tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import torch

from spmd.base._convert import exact_dtypes
from spmd.base._errors import TraceError, called_at, message
from spmd.base._torch import pytree
from spmd.device._checks import Check
from spmd.device._host_copies import is_host_copy
from spmd.device._storage import Buffer, is_device_tensor, load, wrap
from spmd.program.flow._closure import Closure, gradients
from spmd.program.flow._round import CheckedRound, one_round
from spmd.program.flow._writes import BodyWrites

Fn = Callable[..., Any]


@dataclass
class Body:
    """A function of tensors that is traced more than once, with the results of its first trace.

    Attributes:
        fn: takes the operands, returns any container of tensors.
        operands: example operands; a value that is not a device tensor is passed on unchanged.
        words: random state at its start.
        closure: tensors with a gradient that it captures.
        written: buffers from outside that it writes.
        seen: buffers from outside that it reads or writes, with their values before the trace.
        draws: number of random draws in one run.
        shapes: shape and dtype of each result.
        tree: container of the results.
        grads: for each result, whether a gradient flows back from it.
        writes: its writes to Python objects.
        checks: its checks of values.
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
    writes: BodyWrites = field(default_factory=BodyWrites)
    checks: list[Check] = field(default_factory=list[Check])

    def __post_init__(self) -> None:
        """Trace the function once, abstractly."""

        def discover(arrays: list[Any]) -> list[Any]:
            with one_round(self.words, CheckedRound) as round_, self.writes.traced():
                operands = self.bound(arrays)
                for old, new in zip(self.operands, operands, strict=True):
                    if is_device_tensor(old) and old.requires_grad:
                        new.requires_grad_()
                with Closure(round_.newborn.__contains__) as closure:
                    flat, self.tree = pytree.tree_flatten(self.fn(*operands))
                self.closure = list(closure.tensors.values())
                self.grads = [is_device_tensor(t) and t.requires_grad for t in flat]
                outputs = [_as_array(t) for t in flat]
            self.written, self.seen, self.draws = list(round_.written), dict(round_.seen), round_.draws
            self.checks = [check for check, _ in round_.checks]
            return outputs

        with exact_dtypes():
            self.shapes = jax.eval_shape(discover, self.arrays(self.operands))

    @staticmethod
    def arrays(operands: Sequence[Any]) -> list[Any]:
        """Arrays of the device tensors among some operands."""
        return [load(t) for t in operands if is_device_tensor(t)]

    def bound(self, arrays: Sequence[Any]) -> list[Any]:
        """The operands with their device tensors replaced by new ones that hold `arrays`."""
        rest = iter(arrays)
        return [wrap(next(rest)) if is_device_tensor(t) else t for t in self.operands]

    def run(self, arrays: Sequence[Any], words: Any, written: Sequence[Buffer], values: Sequence[Any] | None = None) -> Any:
        """(results, new values of `written`, flags of `checks`) as arrays; `values`: initial values of `written`, by default the current
        ones."""
        with one_round(words, CheckedRound) as round_, self.writes.traced():
            if values is not None:
                round_.hold(dict(zip(written, values, strict=True)))
            with torch.no_grad():
                flat = pytree.tree_leaves(self.fn(*self.bound(arrays)))
            return [_as_array(t) for t in flat], [buffer.get() for buffer in written], round_.flags()

    def pull_back(
        self, arrays: Sequence[Any], closure: Sequence[Any], held: dict[Buffer, Any], words: Any, wanted: Sequence[int], cotangents: Any
    ) -> list[Any]:
        """Gradients, as arrays, of the operands at the positions `wanted` (among the tensors) and of the closure tensors.

        Args:
            arrays, closure: values of the operands and of the closure tensors.
            held: buffers from outside, with their values before the forward run.
            words: random state before the forward run.
            cotangents: one array per result; None if no gradient flows.
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


def _as_array(value: Any) -> Any:
    """A result of a branch or a loop body as an array.

    Raises:
        TraceError: it is not a tensor on device 'jax'.
    """
    if is_device_tensor(value):
        return load(value)
    kind = "a CPU tensor" if is_host_copy(value) else type(value).__name__
    raise TraceError(
        message(
            f"a branch or loop body in a compiled function returns {kind}, not a tensor on device 'jax'",
            *called_at(),
            fix="return tensors on device 'jax'",
        )
    )


__all__ = ["Body", "Fn"]
