"""Replaces parts of the Trainer while a training is active: its device, placement of models, the reading of losses, random states.

Note [The filter of losses]. `logging_nan_inf_filter` reads every loss between the gradients and the clipping. That would split a step
into two programs and make the host wait for each. Instead, the step computes the logged value by the same formula.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from spmd.device._deferred import end_step
from spmd.patches._table import current, replaced
from spmd.rules._training_layouts import Layouts

_TRAINER = "transformers.trainer.Trainer"
_DEVICES = "transformers.training_args.TrainingArguments._setup_devices"
_BF16 = "transformers.training_args.is_torch_bf16_gpu_available"
_FILTER = "logging_nan_inf_filter"


@contextmanager
def placing(layouts: Layouts) -> Generator[None]:
    """While active, what a Trainer trains is laid out over the mesh of `layouts`."""
    import_module(_TRAINER.rpartition(".")[0])
    with ExitStack() as stack:
        stack.enter_context(replaced(_DEVICES, _devices()))
        stack.enter_context(replaced(_BF16, lambda: True))
        for name, made in (
            ("_move_model_to_device", _move_model(layouts)),
            ("_prepare_inputs", _prepare_inputs(layouts)),
            ("training_step", _training_step()),
            ("floating_point_ops", _floating_point_ops()),
            ("_save_rng_state", _save_random_states()),
            ("_load_rng_state", _load_random_states()),
        ):
            stack.enter_context(replaced(f"{_TRAINER}.{name}", made))
        yield


def _devices() -> Any:
    setup: Any = current(_DEVICES)

    def device(self: Any) -> torch.device:
        """Accelerate's device, counted as one, because the Trainer sees a single device in this process."""
        found = setup.func(self)
        if self.use_cpu:
            return found
        self._n_gpu = 1
        return self.distributed_state.device

    made = cached_property(device)
    made.__set_name__(object, "_setup_devices")
    return made


def _move_model(layouts: Layouts) -> Any:
    move: Any = current(f"{_TRAINER}._move_model_to_device")

    def moved(self: Any, model: nn.Module, device: torch.device) -> None:
        """Lay out the model before the move, so that no device ever has the whole model."""
        if device.type == "jax":
            layouts.lay_out_model(model)
        move(self, model, device)

    return moved


def _prepare_inputs(layouts: Layouts) -> Any:
    prepare: Any = current(f"{_TRAINER}._prepare_inputs")

    def prepared(self: Any, inputs: Any) -> Any:
        """Lay out batches of loaders that Accelerate did not prepare."""
        return prepare(self, layouts.placed(inputs) if self.args.device.type == "jax" else inputs)

    return prepared


def _training_step() -> Any:
    """Return a loss that the loop need not read, see Note [The filter of losses]. With accumulation, run a program per micro-batch."""
    step: Any = current(f"{_TRAINER}.training_step")

    def stepped(self: Any, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        _switch_on(self)
        loss = step(self, model, inputs, num_items_in_batch)
        if not self.accelerator.sync_gradients:
            end_step()  # a single program for all would grow with their number
        logged = getattr(self, "_tr_loss", None)
        if loss.device.type != "jax" or not isinstance(logged, torch.Tensor) or not getattr(self.args, _FILTER):
            return loss
        vars(self)["_spmd_filter"] = True
        setattr(self.args, _FILTER, False)
        average = logged.clone()
        average.div_(1 + self.state.global_step - self._globalstep_last_logged)  # in place, so that the number is an input of the program
        return torch.where(torch.isfinite(loss), loss, average)

    return stepped


def _floating_point_ops() -> Any:
    """Restore the filter in the call that the loop makes next."""
    count: Any = current(f"{_TRAINER}.floating_point_ops")

    def counted(self: Any, inputs: Any) -> int:
        _switch_on(self)
        return count(self, inputs)

    return counted


def _switch_on(trainer: Any) -> None:
    """Restore the filter in the training arguments."""
    if vars(trainer).pop("_spmd_filter", False):
        setattr(trainer.args, _FILTER, True)


def _save_random_states() -> Any:
    save: Any = current(f"{_TRAINER}._save_rng_state")

    def saved(self: Any, output_dir: str) -> None:
        save(self, output_dir)
        if self.args.device.type == "jax":
            file = Path(output_dir) / "rng_state.pth"
            states = torch.load(file, weights_only=False)
            torch.save({**states, "jax": torch.jax.get_rng_state()}, file)  # pyright: ignore[reportAttributeAccessIssue]

    return saved


def _load_random_states() -> Any:
    load: Any = current(f"{_TRAINER}._load_rng_state")

    def loaded(self: Any, checkpoint: str | None) -> None:
        load(self, checkpoint)
        file = None if checkpoint is None else Path(checkpoint) / "rng_state.pth"
        if file is not None and file.is_file() and self.args.device.type == "jax":
            state = torch.load(file, weights_only=False).get("jax")
            if state is not None:
                torch.jax.set_rng_state(state)  # pyright: ignore[reportAttributeAccessIssue]

    return loaded


__all__ = ["placing"]
