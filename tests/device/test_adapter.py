"""The adapter between an overload and its rule: one plan for each combination of dtypes and static arguments, torch's promotion."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import spmd
from spmd.device._adapter import Adapter, is_wrapped_number
from spmd.lowering import lookup


def adapter_of(op: Any) -> Adapter:
    lowering = lookup(op)
    assert lowering is not None
    return Adapter(lowering)


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype).to("jax")


def test_calls_of_the_same_dtypes_share_a_plan_whatever_their_shapes() -> None:
    add = adapter_of(torch.ops.aten.add.Tensor)
    first, _ = add.plan((ones(2), ones(2)), {})
    assert add.plan((ones(3, 4), ones(4)), {})[0] is first


@pytest.mark.parametrize(
    "args",
    [(ones(2), ones(2, dtype=torch.int32)), (ones(2, dtype=torch.float64), ones(2)), (ones(2), ones()), (ones(2), 1.5)],
    ids=["another dtype", "the dtypes the other way round", "no dims", "a number"],
)
def test_call_that_promotes_otherwise_has_a_plan_of_its_own(args: tuple[Any, ...]) -> None:
    add = adapter_of(torch.ops.aten.add.Tensor)
    first, _ = add.plan((ones(2), ones(2)), {})
    assert add.plan(args, {})[0] is not first


def test_static_arguments_are_part_of_the_plan() -> None:
    total = adapter_of(torch.ops.aten.sum.dim_IntList)
    first, dynamic = total.plan((ones(2, 3), [0]), {})
    assert len(dynamic) == 1
    assert total.plan((ones(2, 3), [1]), {})[0] is not first
    assert total.plan((ones(2, 3), [0]), {"dtype": torch.float64})[0] is not first
    assert total.plan((ones(5, 3), [0]), {})[0] is first


def test_dynamic_values_come_in_the_order_of_the_arguments() -> None:
    where = adapter_of(torch.ops.aten.where.self)
    a, b = ones(2), 2 * ones(2)
    _, dynamic = where.plan((a > b, a, b), {})
    assert [d.tolist() for d in dynamic] == [[False, False], [1, 1], [2, 2]]


def test_call_that_torch_refuses_makes_no_plan() -> None:
    product = adapter_of(torch.ops.aten.mm.default)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        product.plan((ones(2, 3), ones(2, 3)), {})
    assert not product.plans


@pytest.mark.parametrize(
    ("make", "expected"),
    [(lambda: torch.tensor(2.0), False), (lambda: torch.ones(1), False), (lambda: torch.ones(2)[0], False)],
    ids=["0-dim", "one element", "an element"],
)
def test_tensor_is_no_wrapped_number(make: Any, expected: bool) -> None:
    assert is_wrapped_number(make()) == expected


def test_a_product_with_a_bool_is_one_of_numbers() -> None:
    """XLA takes it for a choice, which makes 0 of what the mask hides."""

    def products(x: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
        return [x * mask, x * mask.float(), mask * x, x.double() * mask, x * (x > 100), (mask.to(x.dtype) * x).sum(), x / mask]

    x, mask = torch.tensor([float("inf"), float("nan"), -2.0]), torch.zeros(3, dtype=torch.bool)
    for run in (products, spmd.compile(products)):
        for got, want in zip(run(x.to("jax"), mask.to("jax")), products(x, mask), strict=True):
            torch.testing.assert_close(got.cpu(), want, equal_nan=True)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_what_a_number_becomes_follows_the_default_dtype(compiled: bool) -> None:
    def step(i: torch.Tensor) -> list[torch.Tensor]:
        made = torch.arange(0.0, 1.0, 0.5, device=i.device), torch.ones(2, device=i.device)
        return [i / 2, i.sqrt(), i * 1.5, torch.where(i > 1, 1.0, 2.0), *made]

    run = spmd.compile(step) if compiled else step
    i = torch.arange(3)
    for dtype in (torch.float32, torch.float64, torch.float16, torch.float32):
        torch.set_default_dtype(dtype)
        try:
            expected, found = step(i), run(i.to("jax"))
        finally:
            torch.set_default_dtype(torch.float32)
        assert [r.dtype for r in found] == [r.dtype for r in expected]
        torch.testing.assert_close([r.cpu() for r in found], expected)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz], ids=str)
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_numbers_too_large_for_eight_bits_become_what_the_cpu_makes_of_them(source: torch.dtype, dtype: torch.dtype) -> None:
    x = torch.tensor([3.3, 449, 500, -1000, 70000, -1e9, float("inf"), float("nan")])
    x = x.nan_to_num(7, 8, 9).to(source) if source == torch.int64 else x.to(source)
    torch.testing.assert_close(x.to("jax").to(dtype).float().cpu(), x.to(dtype).float(), equal_nan=True)


@pytest.mark.parametrize("device", ["cpu", "jax"])
def test_a_number_too_large_for_eight_bits_fills_nothing(device: str) -> None:
    with pytest.raises(RuntimeError, match="without overflow"):
        torch.full((2,), 1000.0, dtype=torch.float8_e4m3fn, device=device)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("op", [torch.add, torch.mul, torch.eq, lambda c, z: torch.addcmul(c, c, z), lambda c, z: c.clone().add_(z)])
def test_complex_tensors_take_a_number_of_eight_bits(op: Callable[..., torch.Tensor], dtype: torch.dtype) -> None:
    c, z = torch.tensor([1 + 2j, 3.0]), torch.tensor(2.0).to(dtype)
    expected, found = op(c, z), op(c.to("jax"), z.to("jax"))
    assert found.dtype is expected.dtype
    torch.testing.assert_close(found.cpu(), expected)


NUMBERS = (128, 200, 300, 1000, 32768, 65505, 65536, 70000, 16777217, 2**31 - 1, -1, -129, -70000, 70000.5, 1e30, 3.4e38, 1e39, 2**40)
OF_A_NUMBER: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "mul": lambda x, n: x * n,
    "rsub": lambda x, n: n - x,
    "div": lambda x, n: x / n,
    "floor divide": lambda x, n: x // n,
    "less": lambda x, n: x < n,
    "where": lambda x, n: torch.where(x > 2, x, n),
    "add in place": lambda x, n: x.clone().add_(n),
    "masked fill": lambda x, n: x.masked_fill(x > 2, n),
    "threshold": lambda x, n: torch.nn.functional.threshold(x, 2, n),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8, torch.uint8, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("op", OF_A_NUMBER.values(), ids=OF_A_NUMBER)
@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
def test_large_numbers_are_those_of_the_cpu(op: Callable[[torch.Tensor, Any], torch.Tensor], dtype: torch.dtype, is_compiled: bool) -> None:
    def outcome(x: torch.Tensor, number: float) -> Any:
        try:
            run = spmd.compile(lambda x: op(x, number)) if is_compiled and x.device.type == "jax" else lambda x: op(x, number)
            return run(x).cpu()
        except (RuntimeError, OverflowError, TypeError) as error:
            return type(error)

    x = torch.tensor([1, 2, 3, 5]).to(dtype)
    for number in NUMBERS:
        expected, found = outcome(x, number), outcome(x.to("jax"), number)
        if isinstance(expected, torch.Tensor):
            torch.testing.assert_close(found, expected, msg=lambda text, number=number: f"{number}: {text}")
        else:
            assert found is expected, number


def test_a_number_that_counts_is_an_input_of_a_few_programs() -> None:
    """Beyond 127 every value had a plan of its own: each cost a compilation, and was kept."""
    x = torch.ones(3).to("jax")
    adapter = adapter_of(torch.ops.aten.mul.Tensor)
    found = {id(adapter.plan((x, number), {})[0]) for number in range(1, 3000)}
    assert len(found) <= 6  # the ranges that some dtype cannot represent


@pytest.mark.parametrize("order", [(1.5, -1.5, -0.0, 3), (-1.5, 1.5, 300.0, -3)])
def test_unsigned_tensors_refuse_negative_floats_also_after_others(order: tuple[float, ...]) -> None:
    """The plan of an earlier number was used, and the number became 0."""

    def filled(device: str, number: float) -> Any:
        try:
            return torch.zeros(2, dtype=torch.uint8, device=device).fill_(number).tolist()
        except RuntimeError as error:
            return str(error)

    assert [filled("jax", number) for number in order] == [filled("cpu", number) for number in order]


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.int64], ids=str)
def test_integers_take_the_integer_part_of_a_factor(dtype: torch.dtype, is_compiled: bool) -> None:
    def products(x: torch.Tensor, factor: float) -> list[torch.Tensor]:
        rows = torch.tensor([0, 1], device=x.device)
        return [
            torch.addcmul(x, x, x, value=factor),
            x.clone().addcmul_(x, x, value=factor),
            torch._foreach_addcmul([x], [x], [x], factor)[0],
            x.index_add(0, rows, x[:2], alpha=factor),
        ]

    x = torch.tensor([1, 2, 3])
    for factor in (1.5, 2.7, 0.5, 2.0, 3, 1):
        expected = products(x.to(dtype), factor)
        run: Any = spmd.compile(products) if is_compiled else products
        found = run(x.to(dtype).to("jax"), factor)
        torch.testing.assert_close([f.cpu() for f in found], expected, rtol=0, atol=0)
