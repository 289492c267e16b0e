"""`torch_xla.experimental.gradient_accumulation`: `spmd.gradient_accumulation` with torch_xla's arguments, results and errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from spmd.base._errors import SpmdError, message
from spmd.xla_names._gradient_accumulation import gradient_accumulation as accumulate


class MicroBatchError(SpmdError, ValueError):
    """The tensors do not hold micro-batches."""


class MutationError(SpmdError, AssertionError):
    """A micro-step wrote in place to what it was given."""


def gradient_accumulation(
    train_step: Callable[..., Any], iterable_tensors: Sequence[torch.Tensor], model: torch.nn.Module, *carried_tensors: torch.Tensor
) -> Any:
    """Run `train_step` on every micro-batch and add up the gradients of the mean loss.

    Args:
        train_step: called with one slice of each iterable tensor, then the carried tensors; returns the loss, or (loss,
            *new carried tensors).
        iterable_tensors: tensors with one first dim of k micro-batches.
        model: its parameters get the gradients, added to those they have.
        carried_tensors: values that go from one micro-batch to the next.

    Returns:
        The loss summed over micro-batches and divided by k; with carried tensors (loss, *carried tensors).

    Raises:
        MicroBatchError: no iterable tensors, an empty one, or first dims of different sizes (a ValueError).
        MutationError: `train_step` writes in place to its arguments (an AssertionError).
    """
    sizes = [len(t) if t.dim() else 0 for t in iterable_tensors]
    if not sizes or 0 in sizes or len(set(sizes)) != 1:
        what = "gradient_accumulation needs tensors with one first dim of micro-batches in common"
        raise MicroBatchError(message(what, f"sizes: {sizes}", fix="pass (data, target), k micro-batches stacked in each"))

    def pure(*given: Any) -> Any:
        before = [t._version for t in given]
        result = train_step(*given)
        changed = [i for i, (t, version) in enumerate(zip(given, before, strict=True)) if t._version != version]
        if changed:
            what = f"the micro-step writes in place to its argument {changed[0]}"
            raise MutationError(message(what, fix="return the new value: counter = counter + 1"))
        return result

    loss, *carried = accumulate(pure, iterable_tensors, model, carried_tensors)
    return (loss, *carried) if carried_tensors else loss
