"""What torch's CPU refuses, device 'jax' refuses: with the CPU's error, before anything changes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import spmd
from spmd.device._refusals import MetaCheck, TensorSlot

REFUSED: dict[str, Callable[[str], object]] = {
    "shapes_of_gather": lambda d: torch.ones(1, 1, device=d).gather(1, torch.zeros(2, 2, dtype=torch.int64, device=d)),
    "padding_of_a_pool": lambda d: torch.nn.functional.max_pool2d(torch.ones(1, 4, 4, device=d), 2, padding=4),
    "dtypes_of_scatter": lambda d: torch.ones(2, device=d).scatter(
        0, torch.zeros(2, dtype=torch.int64, device=d), torch.ones(2, dtype=torch.float64, device=d)
    ),
    "output_padding_of_a_row": lambda d: torch.conv_transpose1d(
        torch.ones(1, 2, 4, device=d), torch.ones(2, 1, 3, device=d), None, 2, 0, 2
    ),
    "output_padding_of_an_image": lambda d: torch.conv_transpose2d(
        torch.ones(1, 2, 4, 4, device=d), torch.ones(2, 1, 3, 3, device=d), None, (3, 1), 0, (2, 1)
    ),
    "range_of_uniform": lambda d: torch.ones(2, device=d).uniform_(3, -1),
    "range_of_bernoulli": lambda d: torch.ones(2, device=d).bernoulli_(2.0),
    "range_of_random": lambda d: torch.ones(2, device=d).random_(5, 2),
    "range_of_normal": lambda d: torch.ones(2, device=d).normal_(0, -1),
    "expanded_add_": lambda d: torch.ones(1, device=d).expand(3).add_(1),
    "expanded_copy_": lambda d: torch.ones(1, device=d).expand(3).copy_(torch.ones(3, device=d)),
    "expanded_out": lambda d: torch.add(torch.ones(3, device=d), 1, out=torch.ones(1, device=d).expand(3)),
    "mixed_linear": lambda d: torch.nn.Linear(2, 2).to(d)(torch.ones(1, 2, device=d, dtype=torch.float64)),
    "mixed_mm": lambda d: torch.ones(2, 2, device=d) @ torch.ones(2, 2, device=d, dtype=torch.float64),
    "mixed_bmm": lambda d: torch.bmm(torch.ones(1, 2, 2, device=d), torch.ones(1, 2, 2, device=d, dtype=torch.bfloat16)),
    "mixed_addmm": lambda d: torch.addmm(torch.ones(2, device=d), torch.ones(2, 2, device=d).bfloat16(), torch.ones(2, 2, device=d)),
    "mixed_einsum": lambda d: torch.einsum("ij,jk->ik", torch.ones(2, 2, device=d), torch.ones(2, 2, device=d).double()),
    "mixed_conv": lambda d: torch.conv2d(torch.ones(1, 1, 3, 3, device=d), torch.ones(1, 1, 2, 2, device=d).double()),
    "mixed_large": lambda d: torch.ones(1, 300, 300, device=d) @ torch.ones(1, 300, 300, device=d).bfloat16(),
    "mixed_index_add": lambda d: torch.ones(2, device=d).index_add(
        0, torch.zeros(1, dtype=torch.int64, device=d), torch.ones(1, device=d).double()
    ),
    "mixed_attention": lambda d: torch.nn.functional.scaled_dot_product_attention(
        torch.ones(1, 1, 2, 2, device=d), torch.ones(1, 1, 2, 2, device=d).bfloat16(), torch.ones(1, 1, 2, 2, device=d)
    ),
    "mixed_lstm": lambda d: torch.nn.LSTM(2, 2).to(d)(torch.ones(1, 1, 2, device=d).double()),
    "embedding_of_floats": lambda d: torch.nn.functional.embedding(torch.ones(1, device=d), torch.ones(2, 2, device=d)),
    "embedding_of_negative_floats": lambda d: torch.nn.functional.embedding(-torch.ones(1, device=d), torch.ones(2, 2, device=d)),
    "gather_of_negative_floats": lambda d: torch.ones(2, device=d).gather(0, -torch.ones(1, device=d)),
    "selection_by_negative_floats": lambda d: torch.ones(2, device=d).index_select(0, -torch.ones(1, device=d)),
    "take_of_negative_floats": lambda d: torch.ones(2, device=d).take(-torch.ones(1, device=d)),
    "loss_of_shorts": lambda d: torch.nn.functional.nll_loss(torch.ones(1, 2, device=d), torch.full((1,), 7, device=d).short()),
    "copy_of_shorts": lambda d: torch.ones(2, device=d).index_copy(0, torch.zeros(1, device=d).short(), torch.ones(1, device=d)),
    "put_of_ints": lambda d: torch.ones(2, device=d).put(torch.zeros(1, device=d).int(), torch.ones(1, device=d)),
    "weights_of_counts": lambda d: torch.bincount(torch.zeros(3, dtype=torch.int64, device=d), torch.ones(1, device=d)),
    "rank_of_geqrf": lambda d: torch.geqrf(torch.ones(5, device=d)),
    "rank_of_addmm": lambda d: torch.addmm(torch.ones(1, 2, 3, device=d), torch.ones(2, 2, device=d), torch.ones(2, 3, device=d)),
    "shape_of_a_mask": lambda d: torch.ones(4, 6, device=d).masked_select(torch.ones(4, 2, dtype=torch.bool, device=d)),
    "shapes_of_lstsq": lambda d: torch.linalg.lstsq(torch.eye(3, device=d), torch.ones(4, device=d)),
    "range_of_histc": lambda d: torch.ones(2, device=d).histc(4, 1, torch.inf),
    "values_of_put": lambda d: torch.ones(3, device=d).put(torch.zeros(0, dtype=torch.int64, device=d), torch.ones(3, device=d), True),
    "rank_of_bins": lambda d: torch.histogram(torch.ones(3, device=d), torch.ones(1, 2, device=d)),
    "rank_of_boundaries": lambda d: torch.searchsorted(torch.ones((), device=d), torch.ones(3, device=d)),
    "rank_of_svd": lambda d: torch.linalg.svdvals(torch.ones(3, device=d)),
    "gradient_of_an_empty_pool": lambda d: (
        torch.nn.functional.adaptive_max_pool2d(torch.ones(1, 1, 3, 3, device=d, requires_grad=True), 0).sum().backward()
    ),
    "driver_of_lstsq": lambda d: torch.linalg.lstsq(torch.eye(3, device=d), torch.ones(3, 2, device=d), driver="bogus"),
    **{
        f"index_reduce_by_{how}": lambda d, how=how: torch.ones(3, device=d).index_reduce(
            0, torch.zeros(3, dtype=torch.int64, device=d), torch.ones(3, device=d), how
        )
        for how in ("sum", "bogus")
    },
    "slices_of_index_reduce": lambda d: torch.ones(3, 4, device=d).index_reduce(
        0, torch.zeros(2, dtype=torch.int64, device=d), torch.ones(2, 1, device=d), "prod"
    ),
    **{
        f"put_of_{name}": lambda d, put=put: put(torch.zeros(3, 4, device=d), torch.tensor([0, 1, 1], device=d), d)
        for name, put in {
            "shape": lambda x, i, d: x.__setitem__(i, torch.ones(2, 4, device=d)),
            "rows": lambda x, i, d: x.__setitem__((i, i), torch.ones(3, 4, device=d)),
            "matrix": lambda x, i, d: x.__setitem__(i.expand(3, 3), torch.ones(3, 4, 1, device=d)),
            "rank": lambda x, i, d: x.index_put_((i,), torch.ones(1, 3, 4, device=d)),
            "accumulated": lambda x, i, d: x.index_put_((i,), torch.ones(4, 4, device=d), accumulate=True),
            "columns": lambda x, i, d: x.__setitem__((slice(None), i), torch.ones(3, 2, device=d)),
            "mask": lambda x, i, d: x.__setitem__(i > 0, torch.ones(3, 4, device=d)),
            "mask_and_index": lambda x, i, d: x.__setitem__((i > 0, i[:2]), torch.ones(3, device=d)),
            "doubles": lambda x, i, d: x.__setitem__(i, torch.ones(3, 4, device=d).double()),
            "doubles_by_mask": lambda x, i, d: x.__setitem__(i > 0, torch.ones(2, 4, device=d).double()),
            "a_half_by_mask": lambda x, i, d: x.index_put_((i > 0,), torch.ones((), device=d).half(), accumulate=True),
            "ints_by_mask": lambda x, i, d: x.__setitem__((i > 0, i[:2]), torch.ones(2, device=d).int()),
            "too_many_indices": lambda x, i, d: x.index_put_((i, i, i), torch.ones(3, device=d)),
        }.items()
    },
    **{
        f"float8_{name}": lambda d, fn=fn: fn(torch.ones(4, device=d).to(torch.float8_e4m3fn))
        for name, fn in {
            "add": lambda x: x + x,
            "times": lambda x: x * 2,
            "negative": lambda x: -x,
            "sum": lambda x: x.sum(),
            "max": lambda x: x.max(),
            "exp": lambda x: x.exp(),
            "less": lambda x: x < x,
            "sort": lambda x: x.sort(),
            "softmax": lambda x: x.softmax(0),
        }.items()
    },
    "var_of_bools": lambda d: torch.tensor([True, False], device=d).var(0),
    "softmax_of_ints": lambda d: torch.tensor([1, 2], device=d).softmax(0),
    "abs_of_bools": lambda d: torch.tensor([True], device=d).abs(),
    "sub_of_bools": lambda d: torch.ones(1, device=d) - torch.tensor([True], device=d),
    "bits_of_halves": lambda d: torch.ones(1, device=d).half() & torch.ones(1, device=d).half(),
    "shift_of_halves": lambda d: torch.ones(1, device=d).bfloat16() << 3,
    "counts_of_floats": lambda d: torch.ones(2, device=d).bincount(),
    "counts_of_bools": lambda d: torch.ones(2, dtype=torch.bool, device=d).bincount(),
    "float8_and_others": lambda d: torch.ones(1, device=d).to(torch.float8_e5m2) * torch.ones(1, device=d),
    "order_of_complex": lambda d: torch.ones(1, device=d, dtype=torch.complex64) < 1,
    "shifted_add_": lambda d: (x := torch.arange(6.0, device=d))[1:].add_(x[:-1]),
    "shifted_copy_": lambda d: (x := torch.arange(6.0, device=d))[1:].copy_(x[:-1]),
    "shifted_assignment": lambda d: (x := torch.arange(6.0, device=d)).__setitem__(slice(1, None), x[:-1]),
    "transposed_add_": lambda d: (x := torch.ones(3, 3, device=d)).add_(x.t()),
    "shifted_scatter_": lambda d: (x := torch.arange(6.0, device=d))[:3].scatter_(0, torch.tensor([0, 1, 2], device=d), x[1:4]),
    "own_index_add_": lambda d: (x := torch.arange(3.0, device=d)).index_add_(0, torch.tensor([0, 1, 2], device=d), x),
    **{
        f"out_of_{name}": lambda d, fn=fn: fn(torch.ones(2, 2, device=d), torch.ones(2, 2, dtype=torch.float64, device=d))
        for name, fn in {
            "mm": lambda x, out: torch.mm(x, x, out=out),
            "matmul": lambda x, out: torch.matmul(x[0], x[0], out=out[0, 0]),
            "where": lambda x, out: torch.where(x > 0, x, x, out=out),
            "abs": lambda x, out: torch.abs(x, out=out),
            "gelu": lambda x, out: torch.ops.aten.gelu.out(x, out=out),
            "amax": lambda x, out: torch.amax(x, 0, out=out[0]),
            "sum": lambda x, out: torch.sum(x, 0, dtype=torch.int64, out=out[0]),
            "any": lambda x, out: torch.any(x, 0, out=out[0]),
            "frexp": lambda x, out: torch.frexp(x, out=(out, out.int())),
            "cat": lambda x, out: torch.cat([x], out=out.bool()),
            "isin": lambda x, out: torch.isin(x, x, out=out),
            "nan_to_num": lambda x, out: torch.nan_to_num(x, out=out),
            "softmax": lambda x, out: torch.softmax(x, 0, out=out),
            "solve": lambda x, out: torch.linalg.solve(x + torch.eye(2, device=x.device), x, out=out),
            "multinomial": lambda x, out: torch.multinomial(x, 1, out=out),
        }.items()
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_error_is_the_cpu_s(name: str) -> None:
    with pytest.raises(Exception) as cpu:
        REFUSED[name]("cpu")
    with pytest.raises(type(cpu.value)) as device:
        REFUSED[name]("jax")
    assert str(device.value) == str(cpu.value)


def test_a_call_that_is_refused_for_its_shape_does_not_accept_the_dtypes() -> None:
    def refused(fn: Callable[[], object], text: str) -> None:
        for _ in range(2):
            with pytest.raises((RuntimeError, ValueError), match=text):
                fn()

    x, doubles = torch.zeros(3, 4, device="jax"), torch.ones(2, 4, dtype=torch.float64, device="jax")
    i, matrix = torch.tensor([0, 1], device="jax"), torch.zeros(3, 4, dtype=torch.int64, device="jax")
    refused(lambda: x.index_put_((i,), doubles), "source and destination dtypes match")
    refused(lambda: x.index_put_((matrix,), doubles), "shape mismatch")
    refused(lambda: x.index_put_((i,), doubles), "source and destination dtypes match")
    assert not x.any()
    slots = (TensorSlot(0, torch.float32), TensorSlot(1, torch.float64))
    check = MetaCheck(torch.ops.aten.dot.default, slots, {})
    refused(lambda: check.check_on_cpu([torch.ones(2), torch.ones(2, 2)], draws=False), "1D tensors expected")
    refused(lambda: check.check([torch.ones(3), torch.ones(3)]), "dot : expected both vectors to have same dtype")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_elements_of_eight_bits_are_moved_and_not_computed_with(dtype: torch.dtype) -> None:
    x, i = torch.arange(4.0).to(dtype).to("jax"), torch.tensor([3, 0], device="jax")
    assert x.gather(0, i).float().tolist() == [3, 0] and x.flip(0).float().tolist() == [3, 2, 1, 0]
    assert x.scatter(0, i, x[1:3]).float().tolist() == [2, 1, 2, 1] and x.masked_fill(x == 1, 3.0).float().tolist() == [0, 3, 2, 3]


@pytest.mark.parametrize("device", ["cpu", "jax"])
def test_out_may_be_an_input_but_not_a_part_of_one(device: str) -> None:
    x = torch.arange(4.0, device=device)
    torch.add(x, 1, out=x)
    torch.testing.assert_close(x.cpu(), torch.arange(4.0) + 1)
    with pytest.raises(RuntimeError, match="some elements of the input tensor and the written-to tensor"):
        torch.add(x[:3], 1, out=x[1:])
    with pytest.raises(RuntimeError, match="some elements of the input tensor and the written-to tensor"):
        torch.take(x, torch.tensor([3, 2, 1, 0], device=device), out=x)
    torch.testing.assert_close(x.cpu(), torch.arange(4.0) + 1)


@pytest.mark.parametrize("device", ["cpu", "jax"])
def test_out_is_cast_and_resized_with_the_cpus_warnings(device: str) -> None:
    x, counts = torch.ones(2, 2, device=device), torch.zeros(2, 2, dtype=torch.int64, device=device)
    assert torch.bernoulli(x, out=counts).tolist() == [[1, 1], [1, 1]]
    assert torch.lerp(x, 3 * x, 0.5, out=counts.double()).tolist() == [[2.0, 2.0], [2.0, 2.0]]
    assert torch.ones(3, device=device, out=counts).tolist() == [1, 1, 1]  # no warning, which would be an error here
    with pytest.warns(UserWarning, match="An output with one or more elements was resized"):
        torch.add(x, x, out=torch.ones(3, device=device))


@pytest.mark.parametrize("device", ["cpu", "jax"])
def test_an_expanded_tensor_may_be_filled(device: str) -> None:
    x = torch.ones(1, device=device)
    x.expand(3).fill_(2)
    torch.testing.assert_close(x.cpu(), torch.full((1,), 2.0))


@pytest.mark.parametrize("name", ["index_select", "sort", "diagonal_scatter"])
def test_a_later_rank_is_refused_that_no_meta_kernel_checks(name: str) -> None:
    def call(device: str, *, is_valid: bool) -> object:
        x, i = torch.ones(4, 4, device=device), torch.zeros(4, dtype=torch.int64, device=device)
        if name == "index_select":
            return x.index_select(0, i if is_valid else i[None])
        return (x[None] if is_valid else x).sort(-3) if name == "sort" else (x if is_valid else x[0]).diagonal_scatter(x[0])

    with pytest.raises(IndexError) as cpu:
        call("cpu", is_valid=False)
    call("jax", is_valid=True)
    with pytest.raises(IndexError) as device:
        call("jax", is_valid=False)
    assert str(device.value) == str(cpu.value)


def test_a_later_shape_is_refused_and_an_accepted_one_still_computed() -> None:
    index = torch.zeros(2, 2, dtype=torch.int64, device="jax")
    torch.testing.assert_close(torch.ones(2, 2, device="jax").gather(1, index).cpu(), torch.ones(2, 2))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="Size does not match at dimension 0"):
            torch.ones(1, 1, device="jax").gather(1, index)
    torch.testing.assert_close(torch.ones(2, 2, device="jax").gather(1, index).cpu(), torch.ones(2, 2))


def test_a_refused_number_refuses_no_other() -> None:
    x = torch.ones(2, device="jax")
    with pytest.raises(RuntimeError, match="lambda must be in range"):
        torch.nn.functional.softshrink(x, -0.5)
    torch.testing.assert_close(torch.nn.functional.softshrink(x, 0.5).cpu(), torch.full((2,), 0.5))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.uint8, torch.complex64])
def test_a_number_that_the_dtype_does_not_hold_is_refused_after_one_that_it_holds(dtype: torch.dtype) -> None:
    def outcome(fill: Any, device: str, value: Any) -> Any:
        try:
            return fill(torch.zeros(2, dtype=dtype, device=device), value).cpu()
        except RuntimeError as error:
            return str(error)

    fills = [torch.Tensor.fill_, torch.full_like, lambda x, value: x.masked_fill(x == 0, value), lambda x, v: x.new_full((2,), v)]
    for fill in fills:
        for value in (1, 300, -300, 460.0, 65519.0, 1e6, 3.395e38, -1e39, float("inf")):
            expected, found = outcome(fill, "cpu", value), outcome(fill, "jax", value)
            assert torch.equal(found, expected) if isinstance(expected, torch.Tensor) else found == expected, (fill, value)


def test_a_refused_draw_leaves_the_stream_and_the_tensor() -> None:
    torch.manual_seed(0)
    x, state = torch.ones(2, device="jax"), torch.get_device_module("jax").get_rng_state()
    with pytest.raises(RuntimeError, match="cauchy_ expects sigma > 0.0"):
        x.cauchy_(0, -1)
    assert torch.equal(torch.get_device_module("jax").get_rng_state(), state) and x.cpu().tolist() == [1.0, 1.0]


def test_a_compiled_function_refuses_while_it_is_traced() -> None:
    step = spmd.compile(lambda x: torch.nn.functional.avg_pool2d(x, 2, padding=2))
    with pytest.raises(RuntimeError, match="pad should be at most half of effective kernel size"):
        step(torch.ones(1, 4, 4, device="jax"))


def test_a_window_past_the_end_of_its_storage_is_refused() -> None:
    with pytest.raises(RuntimeError, match="out of bounds for storage"):
        torch.ones(4, device="jax").as_strided((2, 2), (200, 200)).cpu()


def test_what_only_a_16_bit_kernel_of_the_cpu_lacks_is_computed() -> None:
    x = torch.arange(6.0).reshape(3, 2)
    with pytest.raises(NotImplementedError, match="not implemented for 'BFloat16'"):
        torch.cdist(x.bfloat16(), x.bfloat16())
    # computed in float32 and rounded once
    assert torch.equal(torch.cdist(x.bfloat16().to("jax"), x.bfloat16().to("jax")).cpu(), torch.cdist(x, x).bfloat16())


def test_asking_the_cpu_draws_nothing_from_its_stream() -> None:
    torch.manual_seed(0)
    want = torch.rand(3)
    torch.manual_seed(0)
    torch.nn.functional.dropout(torch.ones(3, 5, device="jax"), 0.25)
    torch.nn.functional.alpha_dropout(torch.ones(3, 5, device="jax"), 0.25, training=True)
    assert torch.equal(torch.rand(3), want)


@pytest.mark.parametrize("like", [torch.zeros_like, torch.ones_like, lambda x, **kwargs: torch.full_like(x, 2.0, **kwargs)])
def test_a_memory_format_is_refused_by_the_call_that_asks_for_it_and_by_no_other(like: Any) -> None:
    for device in ("cpu", "jax"):
        image, rows = torch.ones(2, 3, 4, 5, device=device).transpose(0, 3), torch.ones(3, 4, 5, device=device).transpose(0, 2)
        assert like(image, memory_format=torch.channels_last).shape == image.shape
        assert like(rows).shape == rows.shape
        with pytest.raises(RuntimeError, match="required rank 4 tensor to use channels_last format"):
            like(rows, memory_format=torch.channels_last)
        with pytest.raises(RuntimeError, match="required rank 5 tensor to use channels_last_3d format"):
            like(image, memory_format=torch.channels_last_3d)
        assert like(rows, memory_format=torch.preserve_format).shape == rows.shape


class Sizes(TorchDispatchMode):
    """Collects the number of elements of every result."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.seen.append(out.numel())
        return out


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (torch.ops.aten.slice_backward.default, ([256, 32, 4096, 128], 3, 64, 2**63 - 1, 1)),
        (torch.ops.aten.select_backward.default, ([256, 32, 4096, 64, 2], 4, 0)),
        (torch.ops.aten.new_zeros.default, ([256, 32, 4096, 128],)),
    ],
    ids=lambda value: value.__name__ if isinstance(value, torch._ops.OpOverload) else "",
)
def test_the_cpu_is_asked_for_small_results(op: Any, args: tuple[Any, ...]) -> None:
    """A trace for 256 chips would write 8 GiB of zeros."""
    check, large = MetaCheck(op, (TensorSlot(0, torch.float32), *args), {}), torch.empty(256, 32, 4096, 64, device="meta")
    with Sizes() as sizes:
        check.check_on_cpu([large], draws=False)
    assert sizes.seen
    assert max(sizes.seen) <= 8**5


def test_a_position_in_a_large_tensor_is_not_refused_for_the_small_one_that_the_cpu_is_asked_with() -> None:
    x = torch.ones(300, 300, device="jax", requires_grad=True)
    (x[:, 250] + x[-20]).sum().backward()
    assert x.grad is not None
    expected = torch.zeros(300, 300)
    expected[:, 250] += 1
    expected[-20] += 1
    torch.testing.assert_close(x.grad.cpu(), expected)
    row = torch.select_scatter(x.detach(), torch.zeros(300, device="jax"), 0, 299)
    assert row.sum().item() == 299 * 300
    with pytest.raises(IndexError, match="index 300 out of range"):
        torch.select_scatter(x, x[0], 0, 300)
    with pytest.raises(IndexError, match="must be long, int, byte or bool"):
        x[torch.zeros(2, device="jax")]


def test_an_einsum_of_one_tensor_is_a_view() -> None:
    ours, host = torch.arange(9.0).view(3, 3).to("jax"), torch.arange(9.0).view(3, 3)
    for x in (ours, host):
        torch.einsum("ii->i", x).zero_()
        torch.einsum("ij->ji", x)[0] = 5.0
    torch.testing.assert_close(ours.cpu(), host)
    step = spmd.compile(lambda: torch.einsum("ii->i", ours).add_(1))
    torch.testing.assert_close(step().cpu(), torch.einsum("ii->i", host).add_(1))
    torch.testing.assert_close(ours.cpu(), host)


@pytest.mark.parametrize("wrap", [lambda fn: fn, spmd.compile], ids=["eager", "compiled"])
@pytest.mark.parametrize("number", [2**63, 2**64 - 1])
def test_a_python_int_above_int64_is_refused_by_name(number: int, wrap: Any) -> None:
    x = torch.ones(2, device="jax")
    for fn in (lambda: x * number, lambda: number - x, lambda: torch.add(x, x, alpha=number), lambda: x > number):
        with pytest.raises(spmd.UnsupportedOpError, match=f"on device 'jax' got the Python int {number}"):
            wrap(fn)()
    integers = torch.tensor([1, -5])
    assert (integers.to("jax") + (number - 2**64)).tolist() == (integers + number).tolist()  # the fix that the error names
    assert (x * (2**63 - 1)).tolist() == (torch.ones(2) * (2**63 - 1)).tolist()
