"""A training run: creates the objects that a recipe describes, trains, saves checkpoints, and resumes from them.

    run = Run("gpt2.toml", steps=200)
    run.train()                          # 0, or mesh.PREEMPTED if the job received SIGTERM and has saved

A checkpoint contains everything that is needed to resume bit for bit: model, optimizer, schedule, weight average, random streams and
position in the data. It also contains the seconds that the run has taken.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import mesh
import spmd
from spmd.base._errors import message
from spmd.train import _recipe
from spmd.train._clock import Clock
from spmd.train._datasets import dataset_of, held_out_batches, held_out_of, training_batches, with_vocabulary_check
from spmd.train._evaluation import Evaluation
from spmd.train._export import export
from spmd.train._meter import Cost, Meter
from spmd.train._model_and_optimizer import built_model, built_optimizer, built_schedule
from spmd.train._profile import StepTrace
from spmd.train._recipe_file import read_recipe, with_changes
from spmd.train._samples import Sampler
from spmd.train._tokenizers import tokenizer_of
from spmd.train._update import Update
from spmd.train._writers import Writers, writers_of


class Run:
    """One training run: its model, optimizer, data and counters.

    Attributes:
        recipe: the recipe, including `changes`.
        mesh: the mesh of the model and the batches.
        model, optimizer, schedule: ordinary torch objects.
        batches: a loader that yields batches on the devices.
        update: the compiled step, `update.step`, and its loss function.
        step: number of optimizer steps so far.
        clock: seconds by kind of work.

    Args:
        recipe: a recipe, or the path of one.
        changes: changed keys of the top level, as steps=200, and of tables, as optimizer={"lr": 1e-4}.

    Raises:
        RecipeError: the recipe is invalid.
    """

    def __init__(self, recipe: _recipe.Recipe | str | os.PathLike[str], **changes: Any) -> None:
        self.clock = Clock()
        recipe = recipe if isinstance(recipe, _recipe.Recipe) else read_recipe(recipe)
        self.recipe = recipe = with_changes(recipe, changes) if changes else recipe
        self._host = mesh.init()
        if recipe.mesh.devices:
            mesh.virtual_devices(recipe.mesh.devices)
        count = mesh.device_count()
        self.mesh = mesh.Mesh.from_string(recipe.mesh.axes) if recipe.mesh.axes else mesh.Mesh(range(count), (count,), ("data",))
        torch.manual_seed(recipe.seed)
        dataset = dataset_of(recipe.data, recipe.seed)  # before the model, which may take minutes: most errors are in paths
        held_out = held_out_of(recipe, dataset) if recipe.evaluation.every else None
        torch.manual_seed(recipe.seed)  # a dataset may have drawn random numbers
        self.model = built_model(recipe.model, recipe.precision, self.mesh)
        self.optimizer = built_optimizer(recipe.optimizer, self.model)
        self.schedule = built_schedule(recipe.schedule, self.optimizer, recipe.steps)
        self.update = Update(recipe, self.model, self.optimizer)
        vocabulary = getattr(getattr(self.model, "config", None), "vocab_size", 0)
        self.batches = training_batches(recipe, with_vocabulary_check(dataset, vocabulary), self.mesh)
        self._held_out = None if held_out is None else with_vocabulary_check(held_out, vocabulary)
        averaged = self.model if self.update.ema is None else self.update.ema.module
        self._evaluation = Evaluation(averaged, self.update.loss)
        self.step = 0
        self.out = Path(recipe.out)
        self._trace = StepTrace(recipe.profile, self.out / "profile")
        self._sampler = None
        if recipe.samples.every:
            tokenizer = tokenizer_of(recipe.samples.tokenizer or recipe.data.tokenizer, "[samples] tokenizer")
            self._sampler = Sampler(recipe.samples, tokenizer, averaged, self.mesh, recipe.data.seq, recipe.seed)
        units = {"samples": recipe.data.batch}
        if recipe.data.kind in ("tokens", "text"):
            units["tokens"] = recipe.data.batch * recipe.data.seq
        self._meter = Meter(recipe.metrics, self.clock, self._writers(), units)

    def train(self) -> int:
        """Train to the last step, from the latest checkpoint if there is one.

        Returns:
            Exit code of the process: 0, or `mesh.PREEMPTED` if the job received SIGTERM and has saved.
        """
        self._resume()
        self.clock.to("step")
        while self.step < self.recipe.steps:
            for batch in self._timed_batches():
                self._one_step(batch)
                self._after_step()
                if self.step == self.recipe.steps:
                    break
                if mesh.should_stop(self.step):  # checked here, where no loaded batch is lost
                    self._save()
                    self._finish()
                    return mesh.PREEMPTED
        if self.recipe.checkpoint.export:
            with self.clock.during("checkpoint"):
                export(self.model, self.out / f"model-{self.step}")
        self._finish()
        return 0

    @property
    def state(self) -> dict[str, Any]:
        """The objects that are saved in a checkpoint, by name."""
        state = {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule, "batches": self.batches, "clock": self.clock}
        return state | ({"ema": self.update.ema} if self.update.ema is not None else {})

    def _writers(self) -> Writers:
        if self._host.index:
            return Writers(())
        self.out.mkdir(parents=True, exist_ok=True)
        return writers_of(self.recipe.metrics, self.out, self.recipe.steps)

    def _resume(self) -> None:
        folder = self.out / "checkpoints"
        if self.recipe.checkpoint.every and spmd.checkpoint.has_step(folder):
            self.step = spmd.checkpoint.restore(folder, self.state).step
            self._meter.note(self.step, event="resumed")

    def _timed_batches(self) -> Iterator[Any]:
        """The remaining batches of this epoch. The time to load them counts as "data"."""
        batches = iter(self.batches)
        has_batch = self.batches.batch > 0  # batches of this epoch that were used before a restart
        while True:
            with self.clock.during("data"):
                batch = next(batches, None)
            if batch is None:
                break
            has_batch = True
            yield batch
        if not has_batch:
            what = f"[data] contains fewer samples than a batch of {self.recipe.data.batch}"
            raise _recipe.RecipeError(message(what, fix="a smaller [data] batch, or more data"))

    def _one_step(self, batch: Any) -> None:
        """Dispatch a step and queue its metrics."""
        rate = float(self.schedule.get_last_lr()[0])
        with self.clock.during("profile"):
            self._trace.before(self.step + 1)
        numbers, was_compiled = self.clock.calling(self.update.step, batch)
        if was_compiled:
            with self.clock.during("compile"):
                flops = self.update.step.flops() if self._meter.wants_flops else 0
                self._meter.cost = Cost(flops, self.update.step.memory().peak_bytes)
        self.schedule.step()
        self.step += 1
        with self.clock.during("profile"):
            self._trace.after(self.step, numbers)
        self._meter.after_step(self.step, numbers, rate, is_last=self.step == self.recipe.steps, was_compiled=was_compiled)

    def _after_step(self) -> None:
        """Evaluate, sample and save a checkpoint, if they are due after this step."""
        if self._is_due(self.recipe.evaluation.every):
            self.evaluate()
        if self._is_due(self.recipe.samples.every):
            self.sample()
        if self._is_due(self.recipe.checkpoint.every):
            self._save()

    def _is_due(self, every: int) -> bool:
        return every > 0 and (self.step % every == 0 or self.step == self.recipe.steps)

    def evaluate(self) -> dict[str, torch.Tensor]:
        """Mean loss on the held-out data, with the averaged weights if the recipe has [ema].

        Returns:
            0-dim device tensors: "evaluation_loss" and, with the loss cross_entropy, "evaluation_accuracy".

        Raises:
            RecipeError: the recipe has no held-out data.
        """
        if self._held_out is None:
            raise _recipe.RecipeError(message("the recipe has no [evaluation]", fix="[evaluation] every = 100, and paths or own"))
        with self.clock.during("evaluation"), mesh.extended_timeout("evaluating"):
            batches = held_out_batches(self.recipe, self._held_out, self.mesh, self._evaluation.is_masked)
            numbers = self._evaluation.run(batches, self.clock)
        self._meter.note(self.step, **numbers)
        return numbers

    def sample(self) -> list[str]:
        """Texts that the model generates from the recipe's prompts, with the averaged weights if the recipe has [ema].

        Raises:
            RecipeError: the recipe has no prompts.
        """
        if self._sampler is None:
            raise _recipe.RecipeError(message("the recipe has no [samples]", fix="[samples] every = 100, prompts and tokenizer"))
        with self.clock.during("evaluation"), mesh.extended_timeout("drawing samples"):
            texts = self._sampler.draw(self.step, self.clock)
        self._meter.note(self.step, samples=texts)
        return texts

    def _save(self) -> None:
        """Save a checkpoint in the background, unless [checkpoint] every is 0. The next save raises an error of this one."""
        if self.recipe.checkpoint.every:
            with self.clock.during("checkpoint"):
                spmd.checkpoint.save(self.out / "checkpoints", self.step, self.state, keep=self.recipe.checkpoint.keep)

    def _finish(self) -> None:
        self._trace.stop()
        self._meter.finish()
        with self.clock.during("checkpoint"):
            spmd.checkpoint.join()


__all__ = ["Run"]
