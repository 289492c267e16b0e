"""Convolutions and pools equal the CPU's in value and gradient."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import spmd
from tests.lowering.against_cpu import check, normal

SIZE = (9, 8, 7)
CONVS: dict[str, dict[str, Any]] = {
    "plain": {},
    "strided": {"stride": 2, "padding": 1},
    "dilated": {"dilation": 2, "padding": 2},
    "grouped": {"groups": 2},
    "depthwise": {"groups": 4},
    "same": {"padding": "same", "dilation": 2},
    "valid": {"padding": "valid"},
}
TRANSPOSED: dict[str, dict[str, Any]] = {
    "plain": {},
    "strided": {"stride": 2, "padding": 1, "output_padding": 1},
    "grouped": {"groups": 2, "stride": 3, "output_padding": 2},
    "dilated": {"dilation": 2, "padding": 3},
}


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("case", CONVS)
def test_convolution_equals_cpu(case: str, rank: int) -> None:
    conv = (F.conv1d, F.conv2d, F.conv3d)[rank - 1]
    weight = normal(8, 4 // CONVS[case].get("groups", 1), *(3, 2, 3)[:rank], seed=1)
    check(conv, normal(2, 4, *SIZE[:rank]), weight, normal(8, seed=2), **CONVS[case])


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("case", TRANSPOSED)
def test_transposed_convolution_equals_cpu(case: str, rank: int) -> None:
    conv = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[rank - 1]
    weight = normal(4, 6 // TRANSPOSED[case].get("groups", 1), *(3, 4, 3)[:rank], seed=1)
    check(conv, normal(2, 4, *(4, 5, 3)[:rank]), weight, **TRANSPOSED[case])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_convolution_keeps_its_dtype(dtype: torch.dtype) -> None:
    check(F.conv2d, normal(1, 2, 5, 5, dtype=dtype), normal(3, 2, 3, 3, seed=1, dtype=dtype))


def test_input_without_batch_and_empty_batch_are_allowed() -> None:
    check(F.conv2d, normal(4, 6, 6), normal(2, 4, 3, 3, seed=1), normal(2, seed=2))
    check(F.conv2d, normal(0, 4, 6, 6), normal(2, 4, 3, 3, seed=1))


def test_second_derivatives_of_a_convolution_equal_cpu() -> None:
    def penalty(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        (g,) = torch.autograd.grad(F.conv2d(x, w, stride=2).pow(3).sum(), x, create_graph=True)
        return g.pow(2).sum()

    check(penalty, normal(1, 2, 5, 5, dtype=torch.float64), normal(3, 2, 3, 3, seed=1, dtype=torch.float64))


def test_wrong_channels_are_named_as_torch_names_them() -> None:
    with pytest.raises(RuntimeError, match="to have 3 channels, but got 2 channels instead"):
        F.conv2d(normal(1, 2, 5, 5).to("jax"), normal(4, 3, 3, 3).to("jax"))


POOLS: dict[str, Any] = {
    "max": lambda x: F.max_pool2d(x, 3, 2, 1),
    "max with indices": lambda x: F.max_pool2d(x, 2, return_indices=True),
    "max dilated": lambda x: F.max_pool2d(x, 2, 1, dilation=2),
    "max ceil": lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True),
    "max 1d": lambda x: F.max_pool1d(x[:, :, 0], 2),
    "max 3d": lambda x: F.max_pool3d(x, (1, 2, 3)),
    "average": lambda x: F.avg_pool2d(x, 3, 2, 1),
    "average without padding": lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False, ceil_mode=True),
    "average by a divisor": lambda x: F.avg_pool2d(x, 2, divisor_override=3),
    "average 3d": lambda x: F.avg_pool3d(x, (1, 2, 2)),
    "lp": lambda x: F.lp_pool2d(x.abs() + 0.1, 2.0, 2),
    "adaptive average": lambda x: F.adaptive_avg_pool2d(x, (3, 1)),
    "adaptive average of uneven windows": lambda x: F.adaptive_avg_pool2d(x, (4, 5)),
    "adaptive max": lambda x: F.adaptive_max_pool2d(x, (3, 4), return_indices=True),
    "adaptive max of uneven windows": lambda x: F.adaptive_max_pool2d(x, (4, 5), return_indices=True),
    "fractional": lambda x: F.fractional_max_pool2d(x, 2, (4, 3), return_indices=True, _random_samples=SAMPLES.to(x.device)),
    "fractional with more samples than planes": lambda x: F.fractional_max_pool2d(x[1], 2, (4, 3), _random_samples=SAMPLES.to(x.device)),
    "unpool": lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2, output_size=x.shape),
}
SAMPLES = torch.tensor([[[0.1, 0.7], [0.5, 0.3], [0.9, 0.2]]] * 2)


@pytest.mark.parametrize("name", POOLS)
def test_pool_equals_cpu(name: str) -> None:
    check(POOLS[name], normal(2, 3, 9, 8))


RESAMPLINGS: dict[str, Any] = {
    **{
        f"{mode}{' aligned' if aligned else ''} to {size}": lambda x, mode=mode, aligned=aligned, size=size: F.interpolate(
            x, size, mode=mode, align_corners=aligned
        )
        for mode in ("bilinear", "bicubic")
        for aligned in (False, True)
        for size in ((12, 5), (6, 6))
    },
    "nearest, repeating": lambda x: F.interpolate(x, scale_factor=2),
    "nearest, skipping": lambda x: F.interpolate(x, (3, 2)),
    "nearest, uneven": lambda x: F.interpolate(x, (7, 11)),
    "nearest-exact": lambda x: F.interpolate(x, (7, 11), mode="nearest-exact"),
    "area": lambda x: F.interpolate(x, (4, 3), mode="area"),
    "antialiased": lambda x: F.interpolate(x, (4, 3), mode="bicubic", antialias=True),
    "by a factor": lambda x: F.interpolate(x, scale_factor=1.7, mode="bilinear"),
    "antialiased, of no effect": lambda x: F.interpolate(x, scale_factor=(1.1, 0.7), mode="bilinear", antialias=True),
    "unfold": lambda x: F.unfold(x, 2, padding=1, stride=2),
    "unfold of overlapping blocks": lambda x: F.unfold(x, (3, 2), dilation=(1, 2)),
    "fold": lambda x: F.fold(x.reshape(2, 12, 9)[:, :, :6], (4, 3), 2),
    "pixel_shuffle": lambda x: F.pixel_unshuffle(F.pixel_shuffle(x.reshape(2, 4, 9, 3), 2), 2),
    "affine_grid": lambda x: F.affine_grid(x[:, :2, :3, 0].repeat(1, 1, 1), [2, 3, 4, 5], align_corners=False),
}


FACTORS = {
    "nearest": 1,
    "nearest-exact": 1,
    "nearest 2d": 2,
    "nearest 3d": 3,
    "nearest-exact 2d": 2,
    "linear": 1,
    "bilinear": 2,
    "bicubic": 2,
    "trilinear": 3,
    "area": 1,
}


@pytest.mark.parametrize("factor", [0.6, 1.02, 1.3, 1.7, 2.05, 2.3])
@pytest.mark.parametrize("mode", FACTORS)
def test_a_scale_factor_selects_the_cpus_elements(mode: str, factor: float) -> None:
    rank = FACTORS[mode]
    for size in (5, 13, 20):
        x = normal(1, 2, size, *(2,) * (rank - 1))
        check(lambda x: F.interpolate(x, scale_factor=(factor, *(1.0,) * (rank - 1)), mode=mode.split()[0]), x)


@pytest.mark.parametrize("name", RESAMPLINGS)
def test_resampling_equals_cpu(name: str) -> None:
    check(RESAMPLINGS[name], normal(2, 3, 6, 6))


@pytest.mark.parametrize(
    ("mode", "padding_mode"),
    [*((m, p) for m in ("bilinear", "nearest") for p in ("zeros", "border", "reflection")), ("bicubic", "reflection")],
)
def test_grid_sample_equals_cpu(mode: str, padding_mode: str) -> None:
    grid = normal(2, 4, 5, 2, seed=1)
    check(F.grid_sample, normal(2, 3, 6, 7), grid, mode=mode, padding_mode=padding_mode, align_corners=False)


@pytest.mark.parametrize("align_corners", [True, False])
@pytest.mark.parametrize("padding_mode", ["zeros", "border", "reflection"])
def test_grid_sample_on_the_centres_of_pixels_has_the_cpus_gradients(padding_mode: str, align_corners: bool) -> None:
    at = torch.linspace(-1, 1, 5) if align_corners else (torch.arange(5) * 2 + 1) / 5 - 1
    grid = torch.stack(torch.meshgrid(at, at, indexing="xy"), -1)[None].requires_grad_()
    image = normal(1, 2, len(at), len(at))
    check(lambda x, at: F.grid_sample(x, at, "bilinear", padding_mode, align_corners).square(), image, grid)


def warped(image: torch.Tensor, sheared: torch.Tensor) -> tuple[torch.Tensor, ...]:
    size = image.shape[-1]
    to_grid = torch.tensor([[2 / (size - 1), 0, -1], [0, 2 / (size - 1), -1], [0, 0, 1]], device=image.device)
    moves = torch.zeros(2, 3, 3, device=image.device) + torch.eye(3, device=image.device)
    moves[:, 0, 1], moves[:, 1, 0] = sheared[:, 0], sheared[:, 1]
    moves = torch.linalg.inv(to_grid @ moves @ torch.linalg.inv(to_grid))
    at = torch.linspace(-1, 1, size, device=image.device)
    y, x = torch.meshgrid(at, at, indexing="ij")
    rows = [moves[:, i, 0, None, None] * x + moves[:, i, 1, None, None] * y + moves[:, i, 2, None, None] for i in range(2)]
    found = F.grid_sample(image, torch.stack(rows, -1), align_corners=True)
    return found.detach(), *torch.autograd.grad(found.pow(2).mean(), (image, sheared))


@pytest.mark.optimized
def test_a_program_weights_the_pixels_that_it_picks() -> None:
    """See Note [One floor]. Many positions are next to a pixel's centre here."""
    image, sheared = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0)), torch.tensor([[0.5, 0.2], [0.0, 0.1]])
    on_host = warped(image.requires_grad_(), sheared.requires_grad_())
    on_device = spmd.compile(warped)(*(t.detach().to("jax").requires_grad_() for t in (image, sheared)))
    for found, expected in zip(on_device[:2], on_host, strict=False):  # the last one jumps at each centre
        torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=1e-5 * expected.abs().max().item())  # sums that cancel


@pytest.mark.parametrize("padding_mode", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
def test_grid_sample_at_positions_that_are_no_numbers_equals_cpu(mode: str, padding_mode: str) -> None:
    nan, infinite = float("nan"), float("inf")
    grid = torch.tensor([[[[nan, 0.0], [0.1, nan], [nan, nan], [infinite, 0], [0, -infinite], [1e9, -1e9]]]])
    x = normal(1, 2, 4, 5)
    found = F.grid_sample(x.to("jax"), grid.to("jax"), mode=mode, padding_mode=padding_mode, align_corners=False)
    expected = F.grid_sample(x, grid, mode=mode, padding_mode=padding_mode, align_corners=False)
    torch.testing.assert_close(found.cpu(), expected, equal_nan=True)
