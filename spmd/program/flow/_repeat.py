"""`steps_per_call=n`: one program that runs a step n times over a batch stacked along a new first dim.

The step is traced once, on the first element of the stack. The program is a `jax.lax.scan` of the step whose carry is the state. A learning
rate schedule has one value for all n steps, as if its `step()` were called after every n-th step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch

import mesh
from spmd.base._convert import exact_dtypes
from spmd.base._errors import SpmdError, TraceError, message
from spmd.base._torch import pytree
from spmd.device._random_stream import advanced
from spmd.device._storage import buffer_of, wrap_strided
from spmd.program.find._objects import is_size
from spmd.program.reads import ABSENT, PLAIN, Effect


def first_of_stack(args: Any, kwargs: Any, steps: int) -> tuple[Any, Any]:
    """Arguments of the first of the n steps, with the sharding of the stack without its first entry.

    Raises:
        SpmdError: a tensor argument has no first dim of size `steps`, or that dim is sharded.
    """
    flat, tree = pytree.tree_flatten((args, kwargs), is_leaf=is_size)
    made: dict[int, torch.Tensor] = {}  # the same tensor in two arguments stays one tensor
    for i, value in enumerate(flat):
        if isinstance(value, torch.Tensor):
            require_stack(value, steps)
            key = id(buffer_of(value))
            if key not in made:
                made[key] = _first(value)
            flat[i] = made[key]
    return pytree.tree_unflatten(flat, tree)


def require_stack(stack: torch.Tensor, steps: int) -> None:
    """Raise SpmdError unless `stack` is a device tensor with a first dim of size `steps`."""
    if stack.device.type != "jax" or stack.dim() == 0 or stack.shape[0] != steps:
        raise SpmdError(
            message(
                f"steps_per_call={steps} needs every tensor argument stacked along a first dim of {steps}",
                f"got one of shape {tuple(stack.shape)} on {stack.device}",
                fix="torch.stack the batches of the steps, on device 'jax'",
            )
        )


def _first(stack: torch.Tensor) -> torch.Tensor:
    """The first element of a stack, which has a storage of its own."""
    buffer = buffer_of(stack)
    with exact_dtypes():
        first = wrap_strided(buffer.get()[0], tuple(stack.shape[1:]), stack.stride()[1:])
    annotation = buffer.annotation
    if annotation is not None:
        leading, *rest = annotation.partition_spec
        if leading is not None:
            raise SpmdError(
                message(
                    f"the first dim of a stacked argument is the step and cannot be sharded, but it is sharded over {leading!r}",
                    f"shape {tuple(stack.shape)}, spec {annotation.partition_spec}",
                    fix="put None first: mark_sharding(x, m, (None, 'data', ...))",
                )
            )
        spec = mesh.ShardingSpec(annotation.mesh, mesh.PartitionSpec(*rest))
        buffer_of(first).place(spec.to_jax())
        buffer_of(first).annotation = spec
    return first.requires_grad_(stack.requires_grad)


def require_no_writes(effects: Sequence[Effect], changes_flags: bool) -> None:
    """Raise TraceError if a step writes a value to Python that later steps would read, or that would differ for them.

    `changes_flags`: whether the step changes `requires_grad` of a tensor.
    """
    if changes_flags:
        raise TraceError(
            message(
                "a step with steps_per_call > 1 changes requires_grad of a tensor",
                "all steps are one program, and the later ones would find it changed",
                fix="leave steps_per_call out, or change it between calls: layer.requires_grad_(False)",
            )
        )
    for effect in effects:
        if effect.was_read or effect.key is ABSENT or not isinstance(effect.value, PLAIN):
            raise TraceError(
                message(
                    f"a step with steps_per_call > 1 writes to a Python object: {effect.title}",
                    "all steps are one program, and Python code runs once for all of them",
                    fix="leave steps_per_call out, or keep the value in a buffer of a module",
                )
            )


def repeated(
    run: Callable[..., Any], steps: int, draws: int, writes_arguments: bool, creates_state: bool, keeps_grads: bool
) -> Callable[..., Any]:
    """`run`, a program of one step, as a function of the same arguments with stacked per-step inputs and outputs.

    Args:
        steps: number of steps n.
        draws: number of random draws of one step.

    Raises:
        TraceError: the step writes in place to an argument, which has no single value after n steps; the optimizer creates its state in
            the first step; or gradients are kept.
    """
    if creates_state:
        raise TraceError(
            message(
                "the first step of this optimizer creates its state from gradients, which later steps do not",
                fix="run one step without steps_per_call first",
            )
        )
    if keeps_grads:
        raise TraceError(
            message("a step with steps_per_call > 1 cannot keep its gradients", fix="leave keep_grads out, or return what you need")
        )
    if writes_arguments:
        raise TraceError(
            message("a step with steps_per_call > 1 writes in place to an argument", fix="return the new value, or keep it in the state")
        )

    def many(donated: Any, scalars: Any, read: Any, kept_args: Any, hosts: Any, vector: Any, words: Any) -> Any:
        num_donated = len(donated[0])

        def one(carry: Any, stacked: Any) -> Any:
            state, now = carry
            args, step_hosts = stacked
            state, _, _, outputs = run((state[:num_donated], []), state[num_donated:], read, args, step_hosts, vector, now)
            return (state, advanced(now, draws)), outputs

        (state, _), outputs = jax.lax.scan(one, ([*donated[0], *scalars], words), (kept_args, hosts), length=steps)
        return state, [], [], outputs

    return many
