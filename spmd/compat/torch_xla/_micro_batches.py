"""`torch_xla.experimental.gradient_accumulation`: `spmd.gradient_accumulation` with torch_xla's arguments, results and errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from spmd.base._errors import SpmdError, message
from spmd.xla_names._gradient_accumulation import gradient_accumulation as accumulate


class MutationError(SpmdError, AssertionError):
    """A micro-step wrote in place to its arguments."""


def gradient_accumulation(
    train_step: Callable[..., Any], iterable_tensors: Sequence[torch.Tensor], model: torch.nn.Module, *carried_tensors: torch.Tensor
) -> Any:
    """`spmd.gradient_accumulation`, with the carried tensors as separate arguments.

    Returns:
        The loss summed over micro-batches and divided by their number; with carried tensors (loss, *carried tensors).

    Raises:
        MutationError: `train_step` writes in place to its arguments (an AssertionError).
    """

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
