"""Programs for CPU devices keep images with channels last from one convolution to the next, and compute what PyTorch computes."""

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import mesh
import spmd
from tests.oracle import assert_same, assert_same_model, descend, twins

Function = Callable[[torch.Tensor], torch.Tensor]


class Net(nn.Module):
    """Convolutions of one kind around everything that a channels-last image may meet."""

    def __init__(
        self, conv: Callable[..., nn.Module], norm: Callable[[int], nn.Module], between: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        super().__init__()
        self.first, self.norm, self.second, self.between = conv(4, 8), norm(8), conv(8, 8), between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.norm(self.first(x)))
        return self.between(self.second(h) + h)


def conv(inputs: int, outputs: int) -> nn.Module:
    return nn.Conv2d(inputs, outputs, 3, padding=1)


NETS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: Net(conv, nn.BatchNorm2d, lambda h: h.mean((2, 3))),
    "group norm": lambda: Net(conv, lambda c: nn.GroupNorm(2, c), lambda h: h.flatten(1)),
    "layer norm over columns": lambda: Net(conv, lambda c: nn.LayerNorm(8), lambda h: h.permute(0, 2, 3, 1).softmax(-1)),
    "max pooling": lambda: Net(conv, nn.BatchNorm2d, lambda h: F.max_pool2d(h, 3, 2, 1)),
    "average pooling": lambda: Net(conv, nn.BatchNorm2d, lambda h: F.adaptive_avg_pool2d(F.avg_pool2d(h, 2), 1).flatten(1)),
    "sums over one dim": lambda: Net(conv, nn.BatchNorm2d, lambda h: h.mean(1) * h.amax(3, keepdim=True).mean(1) + h.mean(2)[:, :1]),
    "softmax over channels": lambda: Net(conv, nn.BatchNorm2d, lambda h: h.softmax(1).clamp(0.05, 0.5).where(h > 0, h.new_ones(()))),
    "slices and padding": lambda: Net(conv, nn.BatchNorm2d, lambda h: F.pad(torch.cat([h[:, :4, 1:], h[:, 4:, 1:]], 1), (1, 2, 0, 1))),
    "grouped": lambda: Net(lambda i, o: nn.Conv2d(i, o, 3, 1, 1, groups=4), nn.BatchNorm2d, lambda h: F.interpolate(h, scale_factor=2)),
    "dilated": lambda: Net(lambda i, o: nn.Conv2d(i, o, 3, 1, 2, 2), nn.BatchNorm2d, lambda h: F.gelu(h) / (1 + h.abs())),
    "transposed": lambda: Net(lambda i, o: nn.ConvTranspose2d(i, o, 3, 1, 1), nn.BatchNorm2d, lambda h: F.pixel_shuffle(h, 2)),
    "in place": lambda: Net(conv, nn.BatchNorm2d, lambda h: h.clone().mul_(2).relu_()),
}


def compare(make: Callable[[], nn.Module], x: torch.Tensor) -> None:
    host, device = twins(make)
    steps = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (host, device)]
    compiled = spmd.compile(lambda x: descend(device, steps[1], x))
    for _ in range(3):
        assert_same(compiled(x.to("jax")), descend(host, steps[0], x))
    assert_same_model(device, host)


@pytest.mark.parametrize("make", NETS.values(), ids=NETS)
def test_step_is_pytorchs(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    compare(make, torch.randn(4, 4, 8, 8))


@pytest.mark.parametrize("rank", [1, 3])
def test_step_of_other_ranks_is_pytorchs(rank: int) -> None:
    torch.manual_seed(0)
    conv, norm = getattr(nn, f"Conv{rank}d"), getattr(nn, f"BatchNorm{rank}d")
    compare(lambda: nn.Sequential(conv(4, 8, 3, 2, 1), norm(8), nn.ReLU(), conv(8, 2, 1)), torch.randn(4, 4, *(8,) * rank))


def transposed_images(hlo: str) -> list[str]:
    """Shapes of the 4-dimensional transposes with a copy in a compiled program."""
    return re.findall(r"= f32\[(\d+,\d+,\d+,\d+)\]\S* copy\(%?transpose", hlo)


def test_images_are_not_copied_between_convolutions() -> None:
    """One copy in, one out; weights (3 x 3) are copied as ever."""
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()))).to("jax")
    step = spmd.compile(lambda x: model(x))
    step(torch.randn(4, 8, 16, 16).to("jax"))
    images = [shape for shape in transposed_images(step.hlo()) if "3,3" not in shape]
    assert len(images) <= 2, images


def test_sharded_step_is_the_unsharded_one(mesh_4x2: mesh.Mesh) -> None:
    def losses(specs: tuple[str | None, ...] | None) -> list[float]:
        torch.manual_seed(0)
        model = NETS["batch norm"]().to("jax")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(8, 4, 8, 8).to("jax")
        if specs is not None:
            spmd.mark_sharding(x, mesh_4x2, specs)
        step = spmd.compile(lambda x: descend(model, optimizer, x))
        return [step(x).item() for _ in range(3)]

    assert losses(("data", None, "model", None)) == pytest.approx(losses(None), rel=1e-5)
