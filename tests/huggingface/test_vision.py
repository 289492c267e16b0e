"""Vision-language models and detectors compile: what they read of grids, masks and tokens is known where the host has sent it."""

import copy
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import spmd
from benchmarks import models, zoo_vision
from tests.grids import grid
from tests.oracle import on_device

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning:transformers")
ROWS = models.zoo.ARCHITECTURES | zoo_vision.ARCHITECTURES
SLOW = ("Qwen2-VL", "Qwen2.5-VL", "LLaVA-NeXT", "PaliGemma", "RT-DETR")
CHOOSES = pytest.mark.skipif(sys.version_info >= (3, 13), reason="its layers branch on values, which is a choice up to Python 3.12")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pair(name: str) -> tuple[Any, Any]:
    host = models.build(ROWS[name]).eval()
    return host, copy.deepcopy(host).to("jax")


def require_same(got: models.Named, want: models.Named) -> None:
    models.Comparison(exact=None).require("step", got, want)


def named(*names: str) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in names]


@pytest.mark.parametrize("name", named("LLaVA", "SigLIP 2", "DETR", "PaliGemma", "LLaVA-NeXT", "RT-DETR"))
def test_a_forward_pass_is_torchs_and_other_images_run_the_same_program(name: str) -> None:
    host, device = pair(name)
    forward, num_traces = spmd.compile(lambda **inputs: device(**inputs)), 0
    with torch.no_grad():
        for scale in (1.0, 0.5, 0.25):
            num_traces = forward.num_traces
            inputs = ROWS[name].inputs()
            inputs["pixel_values"] = inputs["pixel_values"] * scale
            require_same(models.tensors(forward(**on_device(inputs))), models.tensors(host(**inputs)))
    assert forward.num_traces == num_traces  # transformers installs hooks in a first call, so the second may be another program


@pytest.mark.parametrize("name", named("Qwen2-VL", "Qwen2.5-VL"))
def test_another_grid_of_patches_is_another_program(name: str) -> None:
    host, device = pair(name)
    forward = spmd.compile(lambda **inputs: device(**inputs))
    first, other = ((1, 4, 4), (1, 4, 8)), ((1, 4, 8), (1, 4, 4))
    num_traces: list[int] = []
    with torch.no_grad():
        for grids in (first, first, other, first):
            inputs = zoo_vision.of_grids(*grids)
            require_same(models.tensors(forward(**on_device(inputs))), models.tensors(host(**inputs)))
            num_traces.append(forward.num_traces)
    assert num_traces[2:] == [num_traces[1] + 1] * 2
    assert forward.retraces[-1].startswith("a value that Python computes from tensor argument")


@pytest.mark.parametrize(
    "name", [*named("LLaVA", "Qwen2-VL"), pytest.param("SigLIP 2", marks=pytest.mark.slow), pytest.param("DETR", marks=CHOOSES)]
)
def test_a_training_step_is_torchs_over_a_mesh(name: str) -> None:
    row = ROWS[name]
    host, device = pair(name)
    want = models.trained(row, host, row.inputs())
    m = grid()
    optimizer = torch.optim.SGD(device.train().parameters(), lr=models.LEARNING_RATE)
    step = spmd.compile(lambda **inputs: models.train_step(device, optimizer, inputs), keep_grads=True)
    given = on_device(row.inputs())
    for value in given.values():
        if isinstance(value, torch.Tensor):
            spmd.mark_sharding(value, m, ("data", *[None] * (value.dim() - 1)))
    require_same(models.state(device, step(**given)), want)


def test_images_that_are_told_apart_by_their_pixels_are_refused() -> None:
    _, device = pair("Idefics3")
    with pytest.raises(spmd.TraceError, match="depends on values, which a traced program does not have"):
        spmd.compile(lambda **inputs: device(**inputs))(**on_device(ROWS["Idefics3"].inputs()))


def test_a_text_with_too_few_places_for_its_image_raises_as_it_does_eagerly() -> None:
    host, device = pair("LLaVA")
    forward = spmd.compile(lambda **inputs: device(**inputs))
    inputs = ROWS["LLaVA"].inputs()
    short = {**inputs, "input_ids": inputs["input_ids"].masked_fill(torch.arange(22) == 0, 5)}
    with torch.no_grad():
        forward(**on_device(inputs))
        with pytest.raises(ValueError, match="do not match"):
            host(**short)
        with pytest.raises(RuntimeError, match="Expected cond to be True"):  # what transformers raises while it is compiled
            forward(**on_device(short))
        require_same(models.tensors(forward(**on_device(inputs))), models.tensors(host(**inputs)))
