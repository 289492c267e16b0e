"""Folders of images, and a ResNet on them beside the loop by hand: BatchNorm, an average of the weights, held-out data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from spmd.train import RecipeError, Run, recipe_of
from spmd.train._image_folder import ImageFolder
from tests.later import transformers
from tests.oracle import TOLERANCE
from tests.train.recipes import RESNET, by_hand, records, sample_batches, tables

SIZE, BATCH, STEPS = 16, 16, 4


def write_images(folder: Path, each: int, seed: int = 0) -> Path:
    """Three classes, each image with a hue of its class, of uneven sizes."""
    rng = np.random.default_rng(seed)
    for number, name in enumerate(("ants", "bees", "cats")):
        (folder / name).mkdir(parents=True)
        for count in range(each):
            pixels = rng.integers(0, 120, (20 + count, 24, 3)).astype(np.uint8)
            pixels[..., number] += 100
            Image.fromarray(pixels).save(folder / name / f"{count}.png")
    return folder


def test_images_are_square_normalised_and_numbered_by_class(tmp_path: Path) -> None:
    folder = ImageFolder([str(write_images(tmp_path / "a", 2))], SIZE)
    assert len(folder) == 6 and [number for _, number in (folder[i] for i in range(6))] == [0, 0, 1, 1, 2, 2]
    for index in range(6):
        pixels, number = folder[index]
        assert pixels.shape == (3, SIZE, SIZE) and pixels.dtype == torch.float32
        assert float(pixels.min()) >= -1 and float(pixels.max()) <= 1 and int(pixels.mean((1, 2)).argmax()) == number
    assert torch.equal(folder[0][0], ImageFolder([str(tmp_path / "a")], SIZE)[0][0])


def test_what_is_drawn_depends_on_seed_pass_and_sample_alone(tmp_path: Path) -> None:
    folder = str(write_images(tmp_path / "a", 2))
    one, other = (ImageFolder([folder], SIZE, augment=True, seed=3) for _ in range(2))
    assert all(torch.equal(one[i][0], other[i][0]) for i in (5, 0, 3))
    before = one[0][0]
    one.set_epoch(1)
    assert not torch.equal(one[0][0], before)


def test_what_does_not_fit_is_told(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="contain no images"):
        ImageFolder([str(tmp_path)], SIZE)
    write_images(tmp_path / "a", 1)
    with pytest.raises(RecipeError, match="has the class 'ants', which the training data does not have\n  fix: one of bees, cats"):
        ImageFolder([str(tmp_path / "a")], SIZE, classes=["bees", "cats"])


@pytest.mark.multidevice(num=8)
def test_a_resnet_and_its_average_are_those_of_a_loop_by_hand(tmp_path: Path) -> None:
    """The held-out data are no whole number of batches."""
    training, held_out = write_images(tmp_path / "a", 7), write_images(tmp_path / "b", 6, seed=1)
    found = tables(
        tmp_path,
        steps=STEPS,
        model={"config": "ResNetConfig", "auto": "AutoModelForImageClassification", "arguments": RESNET, "rules": "replicated"},
        mesh={"axes": "data=8"},
        optimizer={"name": "SGD", "lr": 0.1, "weight_decay": 1e-3, "arguments": {"momentum": 0.9}},
        ema={"decay": 0.5},
        evaluation={"every": 2, "paths": [str(held_out)]},
        data={"kind": "images", "paths": [str(training)], "size": SIZE, "augment": True, "batch": BATCH},
    )
    run = Run(recipe_of(found))
    assert run.train() == 0
    torch.manual_seed(0)
    model = transformers.ResNetForImageClassification(transformers.ResNetConfig(**RESNET))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
    batches = sample_batches(ImageFolder([str(training)], SIZE, augment=True), BATCH)
    expected = by_hand(found, model, batches, lambda: average.update_parameters(model))
    rtol, atol = TOLERANCE[torch.float32]
    torch.testing.assert_close(list(records(tmp_path / "run").values()), expected, rtol=rtol, atol=atol)
    samples = ImageFolder([str(held_out)], SIZE, classes=["ants", "bees", "cats"])
    pixels, classes = torch.stack([sample for sample, _ in samples]), torch.tensor([number for _, number in samples])
    logits = average.module.eval()(pixels).logits
    found_loss, found_accuracy = records(tmp_path / "run", "evaluation_loss"), records(tmp_path / "run", "evaluation_accuracy")
    assert list(found_loss) == [2, STEPS]
    torch.testing.assert_close(found_loss[STEPS], F.cross_entropy(logits, classes).item(), rtol=rtol, atol=atol)
    assert found_accuracy[STEPS] == pytest.approx((logits.argmax(-1) == classes).float().mean().item())
    assert run.model.training and run.update.step.num_traces == 1
