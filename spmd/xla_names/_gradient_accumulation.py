"""`gradient_accumulation`: torch_xla's loop over micro-batches, which adds the mean gradient to the parameters.

    loss, = spmd.gradient_accumulation(train_step, (data, target), model)
    optimizer.step()

The loop includes the backward pass, so `train_step` returns the loss. `spmd.accumulate` leaves the backward pass to the program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from spmd.base._errors import SpmdError, message, shown
from spmd.base._wrong_arguments import require_function, require_module, wrong_argument
from spmd.program.flow._scan import scan


class MicroBatchError(SpmdError, ValueError):
    """The tensors are not a stack of micro-batches."""


def gradient_accumulation(
    train_step: Callable[..., Any],
    iterable_tensors: Sequence[torch.Tensor],
    model: nn.Module,
    carried_tensors: Sequence[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, ...]:
    """Run `train_step` on every micro-batch and accumulate the gradients of the mean loss.

    Args:
        train_step: called with one slice of each iterable tensor, then the carried tensors. Returns the loss, or (loss, *new
            carried tensors).
        iterable_tensors: tensors whose first dim is k, the number of micro-batches.
        model: the gradients are added to those of its parameters.
        carried_tensors: values that are passed from each micro-batch to the next.

    Returns:
        (loss summed over micro-batches and divided by k, *carried tensors).

    Raises:
        MicroBatchError: there are no iterable tensors, their first dims differ, or one is 0 (a ValueError).
        SpmdError: an argument is of a wrong type.
    """
    call = "spmd.gradient_accumulation(train_step, (data, target), model)"
    require_function(train_step, "gradient_accumulation", call)
    require_module(model, "gradient_accumulation", call)
    for name, given in (("iterable_tensors", iterable_tensors), ("carried_tensors", carried_tensors or ())):
        if not isinstance(given, tuple | list) or not all(isinstance(t, torch.Tensor) for t in given):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise wrong_argument(f"{name} of gradient_accumulation must be a tuple of tensors, got {shown(given)}", call)
    if not iterable_tensors:
        what = "gradient_accumulation was given no iterable tensors"
        raise MicroBatchError(message(what, fix="pass (data, target)"))
    sizes = [t.shape[0] if t.dim() else 0 for t in iterable_tensors]
    if len(set(sizes)) != 1 or sizes[0] == 0:
        what = "iterable tensors need the same first dim, the number of micro-batches"
        raise MicroBatchError(message(what, f"first dims: {sizes}", fix="stack k micro-batches in each tensor"))
    rounds = sizes[0]
    parameters = [p for p in model.parameters() if p.requires_grad]
    carried = tuple(carried_tensors or ())

    def micro(state: Any, slices: Any) -> tuple[Any, None]:
        total, gradients, values = state
        with torch.enable_grad():
            result = train_step(*slices, *values)
            loss, new = (result[0], tuple(result[1:])) if carried else (result, ())
            loss = loss / rounds
            found: Any = torch.autograd.grad(loss, parameters, allow_unused=True)
        added = [old if g is None else old + g for old, g in zip(gradients, found, strict=True)]
        return (total + loss.detach(), added, tuple(v.detach() for v in new)), None

    zero = torch.zeros((), dtype=torch.get_default_dtype(), device="jax")
    start = [torch.zeros_like(p) for p in parameters]
    with torch.no_grad():
        (total, gradients, values), _ = scan(micro, (zero, start, carried), tuple(iterable_tensors))
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
    return (total, *values)
