"""The benchmarks' models: sizes as published, weights in and out in Hugging Face's form, real data."""

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import gpt2
import resnet50

from tests.oracle import assert_same


def num_parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_resnet50_has_the_published_number_of_parameters() -> None:
    with torch.device("meta"):
        model = resnet50.build(resnet50.PRESETS["full"])
    assert num_parameters(model) == resnet50.NUM_PARAMETERS == 25_557_032


def test_resnet50_strides_in_the_3x3() -> None:
    with torch.device("meta"):
        model = resnet50.build(resnet50.PRESETS["full"])
    strides = [module.stride for name, module in model.named_modules() if name.startswith("layer2.0.conv")]
    assert strides == [(1, 1), (2, 2), (1, 1)]


@pytest.mark.parametrize(("variant", "padding"), [("own", 47), ("hf", 0)])
def test_gpt2_has_the_124m_shape(variant: str, padding: int) -> None:
    if variant == "hf":
        pytest.importorskip("transformers")
    with torch.device("meta"):
        model = gpt2.build(dataclasses.replace(gpt2.PRESETS["full"], variant=variant))
    assert num_parameters(model) - padding * 768 == 124_439_808


def test_our_block_and_hugging_faces_give_the_same_logits_from_the_same_file(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    own, hf = (dataclasses.replace(gpt2.PRESETS["tiny"], variant=variant) for variant in gpt2.VARIANTS)
    torch.manual_seed(0)
    theirs = gpt2.build(hf).eval()
    gpt2.save_weights(theirs.state_dict(), hf, tmp_path / "model.safetensors")
    ours = gpt2.build(own)
    gpt2.load_weights(ours, own, tmp_path / "model.safetensors")
    tokens_BT, _ = gpt2.batches(own, 1)[0]
    with torch.no_grad():
        assert_same(ours(tokens_BT), theirs(tokens_BT).logits)
    gpt2.save_weights(ours.state_dict(), own, tmp_path / "back.safetensors")
    again = gpt2.build(hf)
    gpt2.load_weights(again, hf, tmp_path / "back.safetensors")
    for name, value in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


def test_text_and_images_are_read(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    text = tmp_path / "text.txt"
    text.write_text("To be, or not to be. " * 20)
    config = gpt2.PRESETS["tiny"]
    x_BT, y_BT = gpt2.batches(config, 1, text)[0]
    assert torch.equal(x_BT[:, 1:], y_BT[:, :-1])
    assert bytes(x_BT[0].tolist()).decode() in "To be, or not to be. " * 20
    for number, color in enumerate(("red", "blue")):
        folder = tmp_path / "images" / color
        folder.mkdir(parents=True)
        image.new("RGB", (80, 100), color).save(folder / f"{number}.png")
    x_NCHW, y_N = resnet50.batches(resnet50.PRESETS["tiny"], 1, tmp_path / "images")[0]
    assert x_NCHW.shape == (16, 3, 32, 32) and set(y_N.tolist()) == {0, 1}
    assert (x_NCHW[y_N == 1, 0] > x_NCHW[y_N == 0, 0].min()).all()  # folders in alphabetical order: blue 0, red 1
