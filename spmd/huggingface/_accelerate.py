"""Replaces parts of Accelerate while a training is active: its device, `prepare` of a model, loading of batches, random states.

There is one process, so `gather`, `reduce` and `pad_across_processes` of a tensor return the tensor, which is global.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from spmd.device._deferred import end_step
from spmd.patches._table import current, replaced
from spmd.rules._training_layouts import Layouts

_PREPARE_MODEL = "accelerate.accelerator.Accelerator.prepare_model"
_SEND = "accelerate.data_loader.send_to_device"
_STATES = "random_states_jax.pt"


@contextmanager
def placing(layouts: Layouts) -> Generator[None]:
    """While active, what Accelerate prepares is laid out over the mesh of `layouts`."""
    import_module("accelerate.accelerator")  # which imports the other modules
    with ExitStack() as stack:
        stack.enter_context(replaced("accelerate.state.PartialState.default_device", property(lambda self: torch.device("jax"))))
        stack.enter_context(replaced(_PREPARE_MODEL, _prepare_model(layouts)))
        stack.enter_context(replaced(_SEND, _send_to_device(layouts)))
        yield


def _prepare_model(layouts: Layouts) -> Any:
    prepare_model: Any = current(_PREPARE_MODEL)

    def prepared(self: Any, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False) -> nn.Module:
        if self.device.type == "jax" and not getattr(model, "_is_accelerate_prepared", False):
            layouts.lay_out_model(model)
            _keep_random_state(self)
        return prepare_model(self, model, device_placement=device_placement, evaluation_mode=evaluation_mode)

    return prepared


def _send_to_device(layouts: Layouts) -> Any:
    send: Any = current(_SEND)

    def sent(tensor: Any, device: Any, non_blocking: bool = False, skip_keys: Any = None) -> Any:
        """Lay out a batch of Accelerate's loaders. Asking for a batch ends the previous step."""
        if torch.device(device).type == "jax":
            end_step()
            tensor = layouts.placed(tensor)
        return send(tensor, device, non_blocking=non_blocking, skip_keys=skip_keys)

    return sent


def _keep_random_state(accelerator: Any) -> None:
    """Make `save_state` and `load_state` include the device's random state, through their hooks."""
    if vars(accelerator).get("_spmd_keeps_random_state"):
        return
    accelerator._spmd_keeps_random_state = True

    def save(models: Any, weights: Any, output_dir: str) -> None:
        torch.save(torch.jax.get_rng_state(), Path(output_dir) / _STATES)  # pyright: ignore[reportAttributeAccessIssue]

    def load(models: Any, input_dir: str) -> None:
        states = Path(input_dir) / _STATES
        if states.is_file():
            torch.jax.set_rng_state(torch.load(states, weights_only=True))  # pyright: ignore[reportAttributeAccessIssue]

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)


__all__ = ["placing"]
