"""Layouts that XLA's partitioner gets wrong change no value: convolutions, scatters and Fourier transforms along dims that are split."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import mesh
import spmd
from tests.oracle import assert_same, batch

pytestmark = pytest.mark.multidevice(num=8)
MESHES = {"2x4": ((2, 4), ("a", "b")), "2x2x2": ((2, 2, 2), ("a", "b", "c"))}
# (rtol, atol): sums of hundreds of products in float32
SUMS = (1e-4, 1e-4)


def _mesh(name: str) -> mesh.Mesh:
    shape, axes = MESHES[name]
    return mesh.Mesh(range(8), shape, axes)


def _convolved(x: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, ...]:
    x, k = x.detach().requires_grad_(), k.detach().requires_grad_()
    out = F.conv2d(x, k, padding=1)
    return out, *torch.autograd.grad(out, (x, k), torch.cos(out.detach()))


def _transposed(x: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, ...]:
    x, k = x.detach().requires_grad_(), k.detach().requires_grad_()
    out = F.conv_transpose2d(x, k, stride=2, padding=1)
    return out, *torch.autograd.grad(out, (x, k), torch.cos(out.detach()))


def _run(fn: Callable[..., Any], compiled: bool, grid: mesh.Mesh, *given: tuple[torch.Tensor, Any]) -> Any:
    marked = [spmd.mark_sharding(t.to("jax"), grid, spec) for t, spec in given]
    return (spmd.compile(fn) if compiled else fn)(*marked)


@pytest.mark.parametrize(("grid", "compiled", "size"), [("2x4", False, 4), ("2x2x2", True, 3)])
@pytest.mark.parametrize(
    ("of_images", "of_kernel"),
    [
        ((None, "a", None, None), (None, None, "a", None)),
        ((None, None, "a", None), (None, None, None, None)),
        ((None, None, "a", None), ("a", None, None, None)),
        ((None, None, "a", "b"), (None, None, "b", None)),
    ],
)
def test_split_height_or_width_of_a_convolution_changes_nothing(
    size: int, of_images: Any, of_kernel: Any, grid: str, compiled: bool
) -> None:
    x, k = batch(4, 8, 12, 12), batch(8, 8, size, size, seed=2)
    got = _run(_convolved, compiled, _mesh(grid), (x, of_images), (k, of_kernel))
    assert_same(got, _convolved(x, k), SUMS)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_split_transposed_convolution_changes_nothing(compiled: bool) -> None:
    x, k = batch(8, 4, 8, 6), batch(4, 1, 4, 4, seed=2)
    got = _run(_transposed, compiled, _mesh("2x2x2"), (x, (None, None, "b", None)), (k, ("a", None, "c", "b")))
    assert_same(got, _transposed(x, k), SUMS)


@pytest.mark.parametrize(
    ("compiled", "of_images"), [(False, ("a", None, None, None)), (True, ("a", None, "b", None)), (True, ("b", "a", None, None))]
)
def test_gradient_of_a_depthwise_convolution_where_devices_hold_copies(compiled: bool, of_images: Any) -> None:
    def fn(x: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, k = x.detach().requires_grad_(), k.detach().requires_grad_()
        out = F.conv2d(x, k, padding=1, groups=8)
        return out, *torch.autograd.grad(out, (x, k), torch.cos(out.detach()))

    x, k = batch(6, 8, 10, 10), batch(16, 1, 3, 3, seed=2)
    assert_same(_run(fn, compiled, _mesh("2x4"), (x, of_images), (k, (None,) * 4)), fn(x, k), SUMS)


def test_images_split_over_all_devices_stay_split() -> None:
    grid = _mesh("2x4")
    x = spmd.mark_sharding(batch(4, 8, 16, 16).to("jax"), grid, ("a", None, "b", None))
    k = spmd.mark_sharding(batch(8, 8, 3, 3, seed=2).to("jax"), grid, (None, None, None, None))
    step = spmd.compile(lambda x, k: F.conv2d(x, k, padding=1))
    step(x, k)
    assert set(step.collectives().counts()) == {"collective-permute"}  # rows at the edges


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(("rows", "grid", "of_tokens"), [(2, "2x4", ("b", None)), (6, "2x4", ("b", "a")), (3, "2x2x2", (("a", "c"), None))])
def test_gradient_of_an_embedding_of_rows_that_are_split_unequally(rows: int, grid: str, of_tokens: Any, compiled: bool) -> None:
    def fn(tokens: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        weight = weight.detach().requires_grad_()
        out = F.embedding(tokens, weight)
        return torch.autograd.grad(out, weight, torch.cos(out.detach()))[0]

    tokens, weight = torch.arange(rows * 6).reshape(rows, 6) % 11, batch(24, 32).double()
    assert_same(_run(fn, compiled, _mesh(grid), (tokens, of_tokens), (weight, (None, None))), fn(tokens, weight))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    ("grid", "of_images", "kernel", "stride"),
    [
        ("2x4", (None, None, "b", None), 2, 1),
        ("2x4", (None, None, "b", "a"), 3, 1),
        ("2x2x2", ("b", None, None, "c"), 3, 2),
        ("2x4", (None, None, "b", "a"), 4, 2),
        ("2x2x2", (None, None, ("a", "b", "c"), None), 2, 1),
    ],
)
def test_gradient_of_a_maximum_in_windows_that_overlap(grid: str, of_images: Any, kernel: int, stride: int, compiled: bool) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        out = F.max_pool2d(x, kernel, stride)
        return torch.autograd.grad(out, x, torch.cos(out.detach()))[0]

    x = batch(2, 4, 16, 16)
    assert_same(_run(fn, compiled, _mesh(grid), (x, of_images)), fn(x))


@pytest.mark.parametrize("fn", [torch.Tensor.index_add, torch.Tensor.index_copy], ids=["index_add", "index_copy"])
def test_rows_that_are_split_unequally_are_added_once(fn: Any) -> None:
    def run(x: torch.Tensor, rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return fn(x, 0, index, torch.cos(rows))

    x, rows, index = batch(24, 4), batch(6, 4, seed=2), torch.tensor([3, 0, 7, 5, 11, 23])
    grid = _mesh("2x4")
    assert_same(_run(run, True, grid, (x, (None, None)), (rows, ("b", None)), (index, ("b",))), run(x, rows, index))


def test_rows_that_are_split_equally_stay_split() -> None:
    grid = _mesh("2x4")
    tokens = spmd.mark_sharding(torch.arange(12).reshape(4, 3).to("jax"), grid, ("b", None))  # 4 rows over 4 of 8 devices
    x = torch.zeros(24, 32, device="jax")
    step = spmd.compile(lambda x, tokens: x.index_put((tokens,), torch.cos(tokens)[..., None].expand(4, 3, 32), accumulate=True))
    step(spmd.mark_sharding(x, grid, (None, None)), tokens)
    assert set(step.collectives().counts()) == {"all-reduce"}


# x, weight and result of plain products that the partitioner gets wrong on a mesh of three axes
THREE_AXES = [
    (("a", "c"), ("c", "b"), (("a", "b"), "c")),
    ((("b", "c"), "a"), ("a", "c"), ("b", "a")),
    ((("a", "c"), "b"), ("a", "c"), ("a", ("b", "c"))),
    (("c", "b"), ("b", ("a", "c")), ("b", None)),
    ((None, "a"), ("a", None), (("c", "b"), "a")),
]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(("of_x", "of_weight", "of_out"), THREE_AXES)
def test_products_over_three_axes(of_x: Any, of_weight: Any, of_out: Any, compiled: bool) -> None:
    grid = _mesh("2x2x2")

    def fn(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = x @ weight
        return spmd.mark_sharding(out, grid, of_out) if out.device.type == "jax" else out

    x, weight = batch(8, 16), batch(16, 8, seed=2)
    assert_same(_run(fn, compiled, grid, (x, of_x), (weight, of_weight)), fn(x, weight), SUMS)


def test_images_and_kernels_over_three_axes() -> None:
    x, k = batch(8, 8, 6, 6), batch(8, 8, 3, 3, seed=2)
    layouts = ((("b", "c"), "a", None, None), (None, "c", None, None))
    got = _run(_transposed, True, _mesh("2x2x2"), (x, layouts[0]), (k, layouts[1]))
    assert_same(got, _transposed(x, k), SUMS)


def test_weights_split_by_two_axes_and_a_batch_by_two_cost_what_they_cost() -> None:
    grid = mesh.Mesh(range(8), (2, 2, 2), ("data", "fsdp", "model"))
    given = (batch(8, 16), (("data", "fsdp"), None)), (batch(16, 32, seed=2), ("fsdp", "model")), (batch(32, 16, seed=3), ("model", "fsdp"))
    marked = [spmd.mark_sharding(t.to("jax"), grid, spec) for t, spec in given]
    step = spmd.compile(lambda x, up, down: spmd.mark_sharding(F.relu(x @ up) @ down, grid, (("data", "fsdp"), None)))
    step(*marked)
    assert step.collectives().counts() == {"all-gather": 2, "all-reduce": 1}  # the weights over "fsdp", the sum over "model"


@pytest.mark.parametrize(("dim", "compiled"), [(0, False), (1, True), (2, True)])
def test_fourier_transforms_along_split_dims(dim: int, compiled: bool) -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = x.detach().requires_grad_()
        half = torch.fft.rfft(x, dim=dim)
        out = torch.fft.irfft(half * torch.fft.fft(x, dim=dim).narrow(dim, 0, half.shape[dim]), dim=dim)
        return out, *torch.autograd.grad(out, x, torch.cos(out.detach()))

    x = batch(8, 12, 10).double()
    assert_same(_run(fn, compiled, _mesh("2x4"), (x, ("a", "b", None))), fn(x))


@pytest.mark.parametrize("devices", [(7, 6, 5, 4, 3, 2, 1, 0), (0, 1, 2, 3)], ids=["another order", "fewer"])
def test_tensors_on_other_devices_are_refused_in_our_words(devices: tuple[int, ...]) -> None:
    here, there = mesh.Mesh(range(8), (8,), ("a",)), mesh.Mesh(devices, (len(devices),), ("a",))
    x, y = (spmd.mark_sharding(batch(8, 8).to("jax"), grid, ("a", None)) for grid in (here, there))
    text = r"are on different devices, or on the same devices(?s:.*)devices \[0, 1, 2, 3, 4, 5, 6, 7\](?s:.*)fix: mark them"
    for operation in (torch.add, torch.matmul):
        with pytest.raises(spmd.SpmdError, match=text):
            operation(x, y)
    differ = "the same devices in another order" if len(devices) == 8 else "different devices"
    with pytest.raises(spmd.SpmdError, match=f"two meshes with {differ}\n"):
        spmd.compile(torch.add)(x, y)
    with pytest.raises(spmd.SpmdError, match=text):
        spmd.compile(lambda x: (x + 1, spmd.mark_sharding(x * 2, there, ("a", None))))(x)
    assert_same(x + spmd.mark_sharding(y, here, ("a", None)), batch(8, 8) * 2)
