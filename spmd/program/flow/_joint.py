"""Traces a function of torch tensors together with its gradient, as two jax functions. The backward pass is that of torch's autograd.

The function and its `torch.autograd.grad` run in one jax trace, as a function of the inputs and the results' cotangents. The equations
that do not depend on a cotangent are the forward pass. The others are the backward pass, which gets its residuals from the forward pass.
So `detach`, `no_grad` and `autograd.Function` behave as in torch, and nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import torch

from spmd.base._convert import exact_dtypes
from spmd.base._errors import TraceError, called_at, message
from spmd.base._jax import eval_jaxpr, split_by_dependence, with_constants_as_inputs
from spmd.base._jax_notes import without_jax_note
from spmd.base._torch import pytree
from spmd.device._random_stream import default_stream
from spmd.device._storage import Buffer, buffer_of, load, wrap
from spmd.program.find._discover import reachable
from spmd.program.flow._round import Round, one_round
from spmd.program.flow._writes import BodyWrites

TensorFunction = Callable[..., Any]


class PureRound(Round):
    """Recorder of a part that may not write to tensors from outside."""

    def replace(self, tensor: torch.Tensor, value: Any) -> None:
        """Give a tensor from outside this value inside the part."""
        buffer = buffer_of(tensor)
        buffer.get()
        self.hold({buffer: value})

    def will_write(self, buffer: Buffer) -> None:
        """Raise TraceError if the buffer is from outside."""
        if buffer not in self.newborn:
            raise TraceError(
                message(
                    "a function that is traced separately writes in place to a tensor from outside",
                    *called_at(),
                    f"the tensor has shape {buffer.shape}",
                    fix="return the new value instead; for running statistics, call the layers one after the other",
                )
            )


@dataclass
class Joint:
    """Forward and backward pass of one traced function.

    Attributes:
        forward, backward: closed jaxprs.
        consts: values from outside, leading inputs of `forward`, each with the buffer that it was read from, or None for a constant.
        captured: tensors with a gradient that the function captures; inputs after its arguments.
        tree: structure of the function's result.
        leaves: for each leaf of the result, None for a tensor, else (value,).
        has_gradient: for each tensor of the result, whether it has a cotangent.
        gradient_of: positions, among arguments and captured tensors, of those whose gradients `backward` returns.
        draws: number of random draws per call.
        num_outputs: number of tensors in the result.
    """

    forward: Any
    backward: Any
    consts: list[tuple[Any, Buffer | None]]
    captured: list[torch.Tensor]
    tree: Any
    leaves: list[Any]
    has_gradient: list[bool]
    gradient_of: list[int]
    draws: int
    num_outputs: int
    _gradient_known: list[bool]

    def outer_values(self) -> list[Any]:
        """Current values of `consts`."""
        return [value if buffer is None else buffer.get() for value, buffer in self.consts]

    def run_forward(self, consts: Sequence[Any], inputs: Sequence[Any], words: Any) -> tuple[list[Any], list[Any]]:
        """(results, residuals) as arrays; `inputs`: arguments, then captured tensors."""
        flat = eval_jaxpr(self.forward.jaxpr, self.forward.consts, *consts, *inputs, words)
        count = self.num_outputs + sum(self._gradient_known)
        return flat[: self.num_outputs], [*flat[count:], *flat[self.num_outputs : count]]

    def run_backward(self, residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        """Gradients in the order of `gradient_of`; `cotangents`: one per result that has one."""
        num_known = sum(self._gradient_known)
        split = len(residuals) - num_known
        known = iter(residuals[split:])
        computed = iter(eval_jaxpr(self.backward.jaxpr, self.backward.consts, *residuals[:split], *cotangents))
        return [next(known) if is_known else next(computed) for is_known in self._gradient_known]

    def results(self, ctx: Any, outputs: Sequence[Any], residuals: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        """Results of an autograd function's forward pass as tensors; saves the residuals in `ctx` for the backward pass."""
        ctx.save_for_backward(*map(wrap, residuals))
        results = tuple(map(wrap, outputs))
        ctx.mark_non_differentiable(*(t for t, takes in zip(results, self.has_gradient, strict=True) if not takes))
        return results


def captured_by(fn: TensorFunction) -> list[torch.Tensor]:
    """Tensors with a gradient that `fn` can reach other than through its arguments."""
    return [t for t in reachable(fn, (), {}).device_tensors() if t.requires_grad]


def _gradients(
    outputs: list[torch.Tensor], sources: list[torch.Tensor], cotangents: Callable[[list[torch.Tensor]], list[torch.Tensor]]
) -> Sequence[torch.Tensor | None]:
    if not outputs or not sources:
        return [None] * len(sources)
    return torch.autograd.grad(outputs, sources, cotangents(outputs), allow_unused=True)


def trace_joint(
    fn: TensorFunction, args: Sequence[torch.Tensor], wanted: Sequence[bool], captured: Sequence[torch.Tensor], words: Any
) -> Joint:
    """Trace `fn(*args)` twice, and its gradients with respect to the `wanted` arguments and the captured tensors.

    Raises:
        TraceError: `fn` changes a Python object from before, or shows a number of the device.
    """
    found, writes = dict[str, Any](), BodyWrites()
    needed = [*wanted, *[True] * len(captured)]
    gradient_of = [i for i, is_needed in enumerate(needed) if is_needed]

    def call(
        arrays: Sequence[Any], now: Any, cotangents: Callable[[list[torch.Tensor]], list[torch.Tensor]]
    ) -> tuple[list[Any], list[Any]]:
        one_thread = torch.autograd.set_multithreading_enabled(False)  # jax's trace belongs to this thread
        with one_round(now, PureRound) as part, one_thread, torch.enable_grad():
            inputs = [wrap(a).requires_grad_(is_wanted) for a, is_wanted in zip(arrays, wanted, strict=False)]
            for tensor, value in zip(captured, arrays[len(args) :], strict=True):
                part.replace(tensor, value)
            with writes.traced():
                leaves, tree = pytree.tree_flatten(fn(*inputs))
            found.update(tree=tree, leaves=[None if isinstance(leaf, torch.Tensor) else (leaf,) for leaf in leaves])
            outputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            found["has_gradient"] = [o.requires_grad for o in outputs]
            sources = [t for t, is_needed in zip([*inputs, *captured], needed, strict=True) if is_needed]
            grads = _gradients([o for o in outputs if o.requires_grad], sources, cotangents)
            found.update(draws=default_stream.draws - part.start_draws, reads={id(value): buffer for buffer, value in part.seen.items()})
            arrays_out = [load(o.detach()) for o in outputs]
            return arrays_out, [jnp.zeros(t.shape, load(t).dtype) if g is None else load(g) for g, t in zip(grads, sources, strict=True)]

    with without_jax_note(), exact_dtypes():
        examples = [jax.typeof(load(t)) for t in (*args, *captured)]
        state = jax.typeof(jnp.asarray(words))
        first = lambda *a: call(a[:-1], a[-1], lambda outs: [wrap(load(o.detach())) for o in outs])[0]  # noqa: E731
        shapes = jax.make_jaxpr(first)(*examples, state).out_avals  # cotangents are inputs of the trace
        flowing = [s for s, takes in zip(shapes, found.get("has_gradient", ()), strict=True) if takes]

        def joint(known: Any, cotangents: Any) -> Any:
            return call(known[:-1], known[-1], lambda outs: [wrap(c) for c in cotangents])

        closed = jax.make_jaxpr(joint)([*examples, state], [s.update(weak_type=False) for s in flowing])
        closed, consts = with_constants_as_inputs(closed)
        num_known = len(closed.in_avals) - len(flowing)
        forward, backward, is_unknown = split_by_dependence(closed, [False] * num_known + [True] * len(flowing))
    num_outputs = len(found["has_gradient"])
    assert not any(is_unknown[:num_outputs])
    return Joint(
        forward,
        backward,
        [(value, found["reads"].get(id(value))) for value in consts],
        list(captured),
        found["tree"],
        found["leaves"],
        found["has_gradient"],
        gradient_of,
        found["draws"],
        num_outputs,
        [not unknown for unknown in is_unknown[num_outputs:]],
    )
