"""Accelerate's loop over a mesh beside CPU torch: losses, gathers, states, and what is refused."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import mesh
import spmd.compat.torch_xla
import spmd.huggingface
from spmd.device._storage import buffer_of
from tests.huggingface.conftest import forget
from tests.huggingface.scripts import gpt2, on_cpu, texts, training_on
from tests.later import accelerate, transformers
from tests.oracle import TOLERANCE, assert_same

pytestmark = pytest.mark.multidevice(num=8)


class Loop:
    """Accelerate's own example, with `accumulate` micro-batches to a step."""

    def __init__(self, accumulate: int = 1) -> None:
        torch.manual_seed(0)
        self.accelerator = accelerate.Accelerator(gradient_accumulation_steps=accumulate)
        model: Any = gpt2()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        loader = torch.utils.data.DataLoader(texts(24), batch_size=8, shuffle=True)
        schedule = transformers.get_linear_schedule_with_warmup(optimizer, 2, 12)
        self.model, self.optimizer, self.loader, self.schedule = self.accelerator.prepare(model, optimizer, loader, schedule)

    def epoch(self) -> list[torch.Tensor]:
        losses = []
        for batch in self.loader:
            with self.accelerator.accumulate(self.model):
                loss = self.model(**batch).loss
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
            losses.append(self.accelerator.gather_for_metrics(loss.detach().repeat(8)))
        return losses


@pytest.mark.parametrize("accumulate", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_losses_are_those_of_cpu_torch(accumulate: int) -> None:
    with on_cpu():
        loop = Loop(accumulate)
        wanted = [*loop.epoch(), *loop.epoch()]
    with training_on("fsdp") as training:
        loop = Loop(accumulate)
        got = [*loop.epoch(), *loop.epoch()]
        num_programs = training.lazy.num_executables
        loop.epoch()
        assert training.lazy.num_executables == num_programs <= 6, training.lazy.retraces
        got = [loss.cpu() for loss in got]
    assert_same(got, wanted, TOLERANCE[torch.float32])


def test_a_batch_is_split_and_gathers_give_the_global_tensor() -> None:
    with training_on("megatron"):
        accelerator = accelerate.Accelerator()
        loader = accelerator.prepare(torch.utils.data.DataLoader(texts(20), batch_size=8))
        batches = list(loader)
        layout = buffer_of(batches[0]["input_ids"]).annotation
        assert layout is not None and layout.partition_spec == mesh.PartitionSpec("data", None)
        ids = [batch["input_ids"] for batch in batches]
        assert [tuple(x.shape) for x in ids] == [(8, 8), (8, 8), (4, 8)]
        assert_same(torch.cat([x.cpu() for x in ids]), torch.stack([text["input_ids"] for text in texts(20)]))
        for kept in (accelerator.gather(ids[2]), accelerator.reduce(ids[2], "sum"), accelerate.utils.pad_across_processes(ids[2])):
            assert torch.equal(kept.cpu(), ids[2].cpu())
        assert accelerate.utils.gather_object(["a"]) == ["a"]
        assert (accelerator.num_processes, accelerator.device.type, accelerator.is_main_process) == (1, "jax", True)


@pytest.mark.slow
def test_states_and_models_come_back(tmp_path: Path) -> None:
    with training_on("fsdp"):
        loop = Loop()
        loop.epoch()
        loop.accelerator.save_state(str(tmp_path / "state"))
        draws = torch.rand(3, device="jax").cpu()
        loop.accelerator.unwrap_model(loop.model).save_pretrained(tmp_path / "model")
        wanted = [loss.cpu() for loss in loop.epoch()]
        again = Loop()
        again.loader.set_epoch(1)
        again.accelerator.load_state(str(tmp_path / "state"))
        assert_same(torch.rand(3, device="jax").cpu(), draws, (0, 0))
        again.epoch()
        read: Any = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "model")
        prepared = again.accelerator.prepare_model(read)
        assert buffer_of(prepared.transformer.wte.weight).annotation is not None
        assert len(wanted) == 3


def line(mesh_: Any = None, **options: Any) -> spmd.huggingface.Training:
    return spmd.huggingface.train_on(mesh_ or mesh.Mesh(range(8), (8,), ("data",)), **options)


def test_it_comes_before_what_it_changes() -> None:
    accelerate.Accelerator()
    with pytest.raises(spmd.SpmdError, match=r"Accelerate already has a device: cpu\n.*created before\n  fix: call train_on first"):
        line()


def test_it_is_called_once() -> None:
    with line():
        accelerate.Accelerator()
        with pytest.raises(spmd.SpmdError, match="Accelerate already has a device: jax"):
            line()


def test_it_lasts_until_it_is_stopped() -> None:
    kept = weakref.ref(line())  # as scripts call it: the result is dropped
    gc.collect()
    assert accelerate.Accelerator().device.type == "jax"
    assert buffer_of(torch.ones(2, device="jax") + 1).value is None  # it waits
    training = kept()
    assert training is not None
    forget()
    with pytest.raises(spmd.SpmdError, match=r"another train_on is active, over Mesh\(data=8\)\n  fix: keep its result"):
        line()
    training.stop()
    del training
    assert kept() is None
    assert accelerate.Accelerator().device.type == "cpu"


def test_an_axis_that_the_mesh_lacks_is_named_and_nothing_is_replaced() -> None:
    with pytest.raises(spmd.SpmdError, match="has no axis 'rows'"):
        line(batch="rows")
    assert accelerate.Accelerator().device.type == "cpu"


def test_it_works_without_torch_xlas_names() -> None:
    with spmd.compat.torch_xla.installed(), pytest.raises(spmd.SpmdError, match="torch_xla's names are installed"):
        line()


def test_afterwards_all_is_as_before() -> None:
    with line():
        assert accelerate.Accelerator().device.type == "jax"
    assert accelerate.Accelerator().device.type == "cpu"
    x = torch.ones(2, device="jax") + 1
    assert buffer_of(x).value is not None  # it does not wait


def test_the_cpu_stays_the_cpu_where_it_is_asked_for() -> None:
    with line():
        accelerator = accelerate.Accelerator(cpu=True)
        assert accelerator.prepare(torch.nn.Linear(2, 2)).weight.device.type == "cpu"
