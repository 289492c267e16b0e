"""Running averages whose count torch reads on the host: `AveragedModel`, and BatchNorm with `momentum=None`.

`AveragedModel.update_parameters` copies in its first call and averages afterwards. A cumulative BatchNorm divides by the number of
batches so far. In a trace both counts stay on the device. `AveragedModel` computes both results and selects by the count, so that
one program serves all calls. It averages one tensor at a time, as on the CPU: torch's form for lists refuses integer buffers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel

from spmd.base._torch import BatchNorm
from spmd.device._copy import from_host
from spmd.device._storage import is_device_tensor
from spmd.patches._table import current, replace, replaced


def register() -> None:
    """Let `AveragedModel` average as on the CPU, for the rest of the process."""
    target = "torch.optim.swa_utils._get_foreach_kernels_supported_devices"
    of_torch = current(target)
    replace(target, lambda: [kind for kind in of_torch() if kind != "jax"])


def move_counts_to_device(modules: Iterable[tuple[str, torch.nn.Module]]) -> None:
    """Move the count of each `AveragedModel` to the device of its parameters. (Torch leaves it on the CPU.)"""
    for _, module in modules:
        if (
            isinstance(module, AveragedModel)
            and not is_device_tensor(module.n_averaged)
            and any(map(is_device_tensor, module.parameters()))
        ):
            module.n_averaged = from_host(module.n_averaged)


@contextmanager
def counting_on_device() -> Generator[None]:
    """While active, these averages do not read their counts on the host."""
    update, forward = AveragedModel.update_parameters, BatchNorm.forward
    with (
        replaced("torch.optim.swa_utils.AveragedModel.update_parameters", lambda self, model: _update(update, self, model)),
        replaced("torch.nn.modules.batchnorm._BatchNorm.forward", lambda self, input: _normalised(forward, self, input)),
    ):
        yield


def replaced_counts(modules: Iterable[tuple[str, torch.nn.Module]]) -> set[tuple[int, str]]:
    """The dict entries (id of the dict, key) that `counting_on_device` replaces temporarily."""
    return {(id(m._buffers), "n_averaged") for _, m in modules if isinstance(m, AveragedModel)}


class _Positive(torch.Tensor):
    """A count for which `count == 0` is False and `count > 0` is True in Python, without reading its value."""

    __hash__ = torch.Tensor.__hash__

    def __eq__(self, other: Any) -> Any:
        return False if type(other) is int and other == 0 else super().__eq__(other)

    def __gt__(self, other: Any) -> Any:
        return True if type(other) is int and other == 0 else super().__gt__(other)


@torch.no_grad()
def _update(torchs: Callable[..., None], averaged: AveragedModel, model: torch.nn.Module) -> None:
    """`averaged.update_parameters(model)`: averages as torch does, then selects the model's own values if it is the first call."""
    count = averaged.n_averaged
    if not is_device_tensor(count):
        torchs(averaged, model)
        return
    is_first = count == 0
    averaged._buffers["n_averaged"] = count.as_subclass(_Positive)
    try:
        torchs(averaged, model)
    finally:
        averaged._buffers["n_averaged"] = count

    def values(module: torch.nn.Module) -> Iterable[torch.Tensor]:
        return itertools.chain(module.parameters(), module.buffers()) if averaged.use_buffers else module.parameters()

    for average, value in zip(values(averaged.module), values(model), strict=True):
        average.copy_(torch.where(is_first, value.to(average.device), average))


def _normalised(torchs: Callable[..., torch.Tensor], norm: Any, input: torch.Tensor) -> torch.Tensor:
    """`norm.forward(input)`: with `momentum=None`, computes the statistics of the batch, then averages them into the running ones."""
    count = norm.num_batches_tracked
    if norm.momentum is not None or not (norm.training and norm.track_running_stats) or not is_device_tensor(count):
        return torchs(norm, input)
    buffers = norm._buffers
    running = {name: buffers[name] for name in ("running_mean", "running_var")}
    buffers.update({name: torch.zeros_like(value) for name, value in running.items()})
    attributes = vars(norm)  # through the dict, so that a trace records neither a write of the function nor a guard on this value
    attributes["momentum"] = 1.0
    try:
        out = torchs(norm, input)
        with torch.no_grad():
            for name, value in running.items():
                value.lerp_(buffers[name], (1.0 / count).to(value.dtype))
    finally:
        attributes["momentum"] = None
        buffers.update(running)
    return out


__all__ = ["counting_on_device", "move_counts_to_device", "register", "replaced_counts"]
