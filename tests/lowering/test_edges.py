"""Infinities, NaN, and nothing at all: the value, or the refusal, is the CPU's."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import spmd
from spmd.lowering.special import HAS_ERFCX
from tests.lowering.against_cpu import check

inf, nan = float("inf"), float("nan")


def of(*values: float, grad: bool = False) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).requires_grad_(grad)


SOME_NAN = of(1, nan, 3, nan, 2, 1, nan, nan, 0, inf, 5, -inf)
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "huber_loss": (
        lambda x, y: F.huber_loss(x, y, reduction="sum"),
        (of(inf, inf, nan, -inf, 0.5, 3.0, grad=True), of(0, inf, 1, 2, 0, 0)),
    ),
    "smooth_l1_loss": (lambda x, y: F.smooth_l1_loss(x, y), (of(inf, nan, 0.5, grad=True), of(0, 1, 0))),
    "soft_margin_loss": (lambda x, y: F.soft_margin_loss(x, y, reduction="none"), (of(100, inf, 1, -3), of(-1, 1, 1, 1))),
    "binary_cross_entropy": (F.binary_cross_entropy, (of(0, 1, 0.5, 0), of(0, 1, 0, 1))),
    "binary_cross_entropy_with_logits": (F.binary_cross_entropy_with_logits, (of(inf, -inf, 0, nan, 100), of(1, 0, 1, 0, 0))),
    "native_dropout_backward": (
        lambda g, mask: torch.ops.aten.native_dropout_backward(g, mask, 2.0),
        (of(inf, nan, 1, -2), torch.tensor([True, False, False, True])),
    ),
    "dropout of all": (lambda x: F.dropout(x, 1.0), (of(inf, nan, 1, -2),)),
    "ldexp": (torch.ldexp, (of(1, inf, nan, 0, 1e-30, 1.0), torch.tensor([3, 200, 2, -3, 200, -100]))),
    "ldexp in float64": (torch.ldexp, (torch.tensor([1.0, 3.0], dtype=torch.float64), torch.tensor([1000, -1000]))),
    "ldexp of floats": (torch.ldexp, (of(1, 2, 3), of(0.5, inf, -inf))),
    "powers by numbers": (
        lambda x: tuple(x**p for p in (inf, -inf, nan, -0.5)),
        (of(-2, -1, -0.5, -0.0, 0, 0.5, 1, 2, inf, -inf, nan, grad=True),),
    ),
    "logit of any eps": (lambda x: tuple(torch.logit(x, eps) for eps in (0.7, 1.0, -1.0, nan)), (of(0.3, 0.5, 0.9, nan),)),
    "default driver of lstsq": (lambda x: tuple(torch.linalg.lstsq(x.reshape(3, 2), x[:3])), (of(1, 2, 3, 4, 5, 7),)),
    "gradients of NaN and -0.0": (
        lambda x: (F.hardtanh(x), F.relu6(x), F.hardshrink(x), F.softshrink(x), torch.logit(x, 0.1), torch.logit(x[1:])),
        (of(nan, -0.0, 0, 0.5, 1, grad=True),),
    ),
    "logit with other bounds": (
        lambda x: tuple(torch.logit(x, eps) for eps in (0.6, 1.0, 1.5, -1.0, nan)),
        (of(-0.5, -0.0, 0, 0.3, 0.7, 1, 1.5, nan, grad=True),),
    ),
    "divisors of the lowest integer": (
        lambda a, b: (torch.gcd(a, b), torch.lcm(a, b), torch.gcd(a, b[:, None]), torch.gcd(a, torch.tensor(6, device=a.device))),
        (torch.tensor([-128, -128, -128, 0, -6, 0], dtype=torch.int8), torch.tensor([127, -128, 6, -128, 4, 0], dtype=torch.int8)),
    ),
    "signs of zeros": (
        lambda x: tuple(
            1 / y
            for y in (
                *(F.elu(x, -1.0), x.clamp(0), x.clamp(max=-0.0), x.clamp(0, 0), x.clamp(-1, nan)),
                *(torch.fmax(x, x.flip(0)), torch.fmin(x, x.flip(0))),
                *(x.div(inf, rounding_mode="floor"), x.div(-inf, rounding_mode="floor")),
            )
        ),
        (of(0, -0.0, nan, -0.0, 0),),
    ),
    "complex functions on their cuts": (
        lambda z: (
            tuple(torch.view_as_real(getattr(torch, f"a{name}")(z)) for name in ("sin", "cos", "tan", "sinh", "cosh", "tanh"))
            + tuple(torch.view_as_real(fn(z)) for fn in (torch.sqrt, torch.rsqrt, lambda z: z**0.5))
        ),
        (torch.complex(of(*(-2, -0.5, -0.0, 0.5, 2) * 2, *(-0.0, 0.0) * 3), of(*(0.0,) * 5, *(-0.0,) * 5, -2, -2, 0.5, 0.5, 2, 2)),),
    ),
    "complex powers of 0": (lambda z: (torch.view_as_real(z ** (1 + 1j)), (z ** (0 * z)).isnan(), z**0), (torch.tensor([0j, 1j]),)),
    "bools to bools": (lambda x: (x**True, x**False, x.clone().pow_(False), x**2), (torch.tensor([True, False]),)),
    "ldexp of complex numbers": (lambda z, n: torch.view_as_real(torch.ldexp(z, n)), (torch.tensor([1j, -2 + 1j]), of(2, -0.5))),
    "gradient": (lambda x: torch.gradient(x)[0], (of(1, inf, 3, nan),)),
    "einsum of nothing": (lambda a, b: torch.einsum("ij,jk->ik", a, b), (torch.zeros(2, 0), torch.zeros(0, 3))),
    **{
        f"{name}, beta {beta}, alpha {alpha}": (functools.partial(getattr(torch, name), beta=beta, alpha=alpha), factors)
        for name, factors in {
            "addmm": (of(nan, inf, 1, 2).reshape(2, 2), of(inf, 1, 2, nan).reshape(2, 2), torch.ones(2, 2)),
            "addmv": (of(nan, inf), of(inf, 1, 2, nan).reshape(2, 2), torch.ones(2)),
            "addbmm": (of(nan, inf, 1, 2).reshape(2, 2), of(inf, 1, 2, nan).reshape(1, 2, 2), torch.ones(1, 2, 2)),
            "baddbmm": (of(nan, inf, 1, 2).reshape(1, 2, 2), of(inf, 1, 2, nan).reshape(1, 2, 2), torch.ones(1, 2, 2)),
            "addr": (of(nan, inf, 1, 2).reshape(2, 2), of(inf, 1), of(1, nan)),
        }.items()
        for beta, alpha in ((0, 1), (1, 0), (0, 0))
    },
    **{
        f"cdist of NaN, p {p}": (functools.partial(torch.cdist, p=p), (SOME_NAN.reshape(6, 2), of(1, 2, 0, inf).reshape(2, 2)))
        for p in (0.0, 0.5, 1.0, 2.0, 3.0, inf)
    },
    **{
        f"pdist of NaN, p {p}": (functools.partial(F.pdist, p=p), (of(1, nan, 3, 2, 5, 2).reshape(3, 2),))
        for p in (0.0, 1.0, 2.0, 3.0, inf)
    },
    **{
        f"{name} of equal rows and equal differences, p {p}": (functools.partial(distances, p=p), (of(*row, grad=True).reshape(4, 3),))
        for p in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, inf)
        for row in ((1, 2, 3, 2, 1, 2, 0, 3, 4, 1, 2, 3),)
        for name, distances in {
            "cdist": lambda x, p: (torch.cdist(x, x, p), torch.cdist(x[None], x.detach()[:2].repeat(2, 1, 1), p)),
            "pdist": F.pdist,
            "pairwise_distance": lambda x, p: F.pairwise_distance(x, x.flip(0), p, 0.0),
        }.items()
    },
    **{
        f"{name} of NaN, right {right}, in {kind}": (search, (edges, of(nan, inf, -inf, 2, 0.5)))
        for right in (False, True)
        for kind, edges in {"numbers": of(1, 2, 3), "NaN behind": of(0, 2, nan, nan), "disorder": of(3, nan, 1, 2, -1)}.items()
        for name, search in {
            "searchsorted": functools.partial(torch.searchsorted, right=right),
            "bucketize": lambda edges, x, right=right: torch.bucketize(x, edges, right=right),
        }.items()
    },
    "multi_margin_loss": (
        F.multi_margin_loss,
        (of(0.5, nan, 1, nan, 0.1, 0.2, 0, 1, 2).reshape(3, 3), torch.tensor([0, 1, 2])),
    ),
    "multi_margin_loss on its margin": (F.multi_margin_loss, (of(1, 0, 2, grad=True).reshape(1, 3), torch.tensor([0]))),
    "multilabel_margin_loss": (F.multilabel_margin_loss, (of(0.5, nan, 1, 0.2).reshape(1, 4), torch.tensor([[0, 2, -1, 1]]))),
    "bincount of nothing": (torch.bincount, (torch.zeros(0, dtype=torch.int64), torch.zeros(0), 3)),
    "max_pool1d of NaN": (lambda x: F.max_pool1d(x, 3, 1, return_indices=True), (SOME_NAN.reshape(1, 1, 12),)),
    "max_pool2d of NaN": (lambda x: F.max_pool2d(x, 2, 1, return_indices=True), (SOME_NAN.reshape(1, 3, 4),)),
    "max_pool3d of NaN": (lambda x: F.max_pool3d(x, 2, 1, return_indices=True), (SOME_NAN.reshape(1, 3, 2, 2),)),
    "max_pool2d of the lowest": (lambda x: F.max_pool2d(x, 2, 1, 1, return_indices=True), (torch.full((1, 3, 3), -inf),)),
    "adaptive_max_pool1d of NaN": (lambda x: F.adaptive_max_pool1d(x, 5, return_indices=True), (SOME_NAN.reshape(1, 1, 12),)),
    "adaptive_max_pool2d of NaN": (lambda x: F.adaptive_max_pool2d(x, (2, 3), return_indices=True), (SOME_NAN.reshape(1, 3, 4),)),
    "fractional_max_pool2d of NaN": (
        lambda x, at: F.fractional_max_pool2d(x, 2, output_size=2, return_indices=True, _random_samples=at),
        (SOME_NAN.reshape(1, 1, 3, 4), torch.full((1, 1, 2), 0.5)),
    ),
    "group_norm of nothing": (lambda x: F.group_norm(x, 2), (torch.zeros(0, 4, 2),)),
}


# Where erfc is below the smallest normal number, and exp(x * x) is not yet infinite.
FAR = {torch.float32: (5.0, 9.0, 9.195, 9.3, 9.419, 9.5, 1e20, inf), torch.float64: (5.0, 26.0, 26.54, 26.6, 26.65, 27.0, 1e200, inf)}


@pytest.mark.parametrize("dtype", FAR)
def test_log_ndtr_of_a_number_far_out_is_the_cpus(dtype: torch.dtype) -> None:
    check(torch.special.log_ndtr, torch.tensor(FAR[dtype][:-2], dtype=dtype) * -(2**0.5))


@pytest.mark.skipif(not HAS_ERFCX, reason="jax 0.10.0 has no erfcx")
@pytest.mark.parametrize("dtype", FAR)
def test_erfcx_of_a_number_far_out_is_the_cpus(dtype: torch.dtype) -> None:
    check(torch.special.erfcx, torch.tensor(FAR[dtype], dtype=dtype))


@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient_are_the_cpus(name: str) -> None:
    fn, args = CASES[name]
    check(fn, *args)


REFUSED: dict[str, Callable[[torch.Tensor], Any]] = {
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "max.dim": lambda x: x.max(0),
    "min.dim": lambda x: x.min(0),
    "median.dim": lambda x: x.median(0),
    "nanmedian.dim": lambda x: x.nanmedian(0),
    "mode": lambda x: x.mode(0),
    "argmax": lambda x: x.argmax(0),
    "complex": lambda x: torch.complex(x.bfloat16(), x.bfloat16()),
    "polar": lambda x: torch.polar(x.bfloat16(), x.bfloat16()),
    "unique of a dim": lambda x: x.unique(dim=1),
    "unique of nothing twice": lambda x: x[:, :0].unique(dim=1),
}


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.int64, torch.uint64], ids=str)
@pytest.mark.parametrize("source", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_floats_that_no_integer_holds_are_converted_as_on_the_cpu(source: torch.dtype, dtype: torch.dtype) -> None:
    x = torch.tensor([-1.0, -1.5, 255.9, 300.0, -300.0, 40000.0, 65536.5, 3e9, -3e9, 1e19, -1e19, 1.9e19, inf, -inf, nan], dtype=source)
    if dtype == torch.uint64 and source.itemsize < 4:
        x = x[:8]  # the CPU makes another number of the others in a vector than alone
    check(lambda x: x.to(dtype), x)
    check(lambda x: torch.zeros(len(x), dtype=dtype, device=x.device).copy_(x), x)


@pytest.mark.parametrize("device", ["cpu", "jax"])
@pytest.mark.parametrize("value", [torch.tensor(3), torch.tensor([1, -1])], ids=["0-dim", "negative"])
def test_bincount_takes_one_dim_of_counts(value: torch.Tensor, device: str) -> None:
    with pytest.raises(RuntimeError, match="bincount only supports 1-d non-negative integral inputs"):
        value.to(device).bincount()


@pytest.mark.parametrize("device", ["cpu", "jax"])
def test_nothing_is_repeated_less_than_no_times(device: str) -> None:
    with pytest.raises(RuntimeError, match="repeats can not be negative"):
        torch.arange(3, device=device).repeat_interleave(torch.tensor([1, -1, 2], device=device))
    assert torch.arange(3, device=device).repeat_interleave(torch.tensor([1, 0, 2], device=device)).tolist() == [0, 2, 2]


@pytest.mark.parametrize("device", ["cpu", "jax"])
def test_index_reduce_takes_an_index_for_each_slice(device: str) -> None:
    x, none = torch.ones(3, 4, device=device), torch.zeros(0, dtype=torch.int64, device=device)
    with pytest.raises(RuntimeError, match=r"Number of indices \(0\) should be equal to source.size\(dim\): \(4\), for dim: 1"):
        x.index_reduce(-1, none, x, "amax")


@pytest.mark.parametrize("copy", [lambda x, f: x.clone(memory_format=f), lambda x, f: x.to(torch.float64, memory_format=f)])
@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.channels_last_3d], ids=str)
def test_a_memory_format_of_another_rank_is_refused(copy: Callable[..., Any], memory_format: torch.memory_format) -> None:
    for device in ("cpu", "jax"):
        with pytest.raises(RuntimeError, match=r"required rank [45] tensor to use channels_last(_3d)? format"):
            copy(torch.ones(3, device=device), memory_format)


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_result_for_nothing_is_refused_as_on_the_cpu(name: str) -> None:
    with pytest.raises((RuntimeError, IndexError)) as cpu:
        REFUSED[name](torch.zeros(0, 2))
    with pytest.raises(type(cpu.value)) as found:
        REFUSED[name](torch.zeros(0, 2, device="jax"))
    assert str(found.value).splitlines()[0] == str(cpu.value).splitlines()[0]


MASK = torch.tensor([True, False, True])
MISFITS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "rows": lambda x, mask: x[mask],
    "columns": lambda x, mask: x[:, mask],
    "after a new dim": lambda x, mask: x[None, mask],
    "two dims": lambda x, mask: x[mask.expand(4, 3)],
    "written": lambda x, mask: x.clone().__setitem__(mask, 1.0),
    "columns written": lambda x, mask: x.clone().__setitem__((slice(None), mask), x[:, :1]),
    "bytes": lambda x, mask: x[mask.to(torch.uint8)],
}


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@pytest.mark.parametrize("name", MISFITS)
def test_a_mask_of_other_sizes_than_the_dims_it_selects_from_is_refused_as_on_the_cpu(name: str) -> None:
    said = []
    for device in ("cpu", "jax"):
        with pytest.raises(IndexError, match="The shape of the mask") as found:
            MISFITS[name](torch.ones(4, 6, device=device), MASK.to(device))
        said.append(str(found.value).splitlines()[0])
    assert said[0] == said[1]


def test_a_mask_beside_positions_selects_as_many_as_there_are() -> None:
    x, rows, columns = torch.arange(12.0).reshape(4, 3), torch.tensor([0, 2]), MASK

    def written(x: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x[rows, columns] = x.new_tensor([50.0, 60.0])
        return x

    check(lambda x, rows, columns: x[rows, columns], x, rows, columns)
    check(written, x, rows, columns)
    with pytest.raises(IndexError, match=r"could not be broadcast together with shapes \[3\], \[2\]"):
        x.to("jax")[torch.tensor([0, 1, 2]).to("jax"), columns.to("jax")]


def test_bools_are_bytes_where_another_dtype_looks_at_them() -> None:
    x = torch.tensor([True, False, True, True])
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.float16):
        check(lambda x, dtype=dtype: x.view(dtype), x)
    check(lambda x: x.view(torch.bool), torch.tensor([0, 1, 1], dtype=torch.uint8))

    def written(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x.view(torch.uint8)[1] = 1
        return x

    check(written, x)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.int64], ids=str)
def test_integers_to_large_powers_wrap_around_as_on_the_cpu(dtype: torch.dtype) -> None:
    x, powers = torch.tensor([2, 3, 5, 7, 0, 1], dtype=dtype), torch.tensor([127, 101, 65, 64, 0, 100], dtype=dtype)
    check(lambda x, powers: x**powers, x, powers)
    check(lambda powers: 3**powers, powers)
    check(lambda x: torch.zeros(2, dtype=torch.bool, device=x.device).fill_(1j), x)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.float32, torch.bfloat16, torch.float64])
def test_rounded_division_has_the_cpus_dtype_and_values(dtype: torch.dtype) -> None:
    def found(device: str) -> list[torch.Tensor]:
        x = torch.tensor([1, 3, 2, 9], dtype=dtype, device=device)
        scalars = [torch.tensor(number, device=device) for number in (7, 7.5)]
        in_place = x.clone()
        in_place //= 2
        truncated = [torch.div(x, n, rounding_mode="trunc") for n in (0.3, 0.7, torch.tensor(0.3, device=device))]
        return [in_place, *truncated, x // 2, x // 0.7, 7 // x, x // x.float(), *(n // x for n in scalars), *(x // n for n in scalars)]

    for ours, its in zip(found("jax"), found("cpu"), strict=True):
        torch.testing.assert_close(ours.cpu(), its, rtol=0, atol=0)


def test_floor_division_of_integers_by_zero_is_refused() -> None:
    x = torch.arange(3, device="jax")
    for divide in (lambda: x // 0, lambda: x.clone().floor_divide_(0), lambda: torch.floor_divide(x, 0)):
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            divide()
    with pytest.raises(spmd.CheckFailed, match="ZeroDivisionError"):
        (5 // x).tolist()
