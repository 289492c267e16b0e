"""What a step makes of its sizes in Python: quotients, parts that shrink while a size grows, errors and effects."""

import decimal
import fractions
import itertools
import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import mesh
import spmd
from tests.oracle import assert_same, batch
from tests.sweeps import every_other

T = torch.Tensor
MAX = 32
ROWS = {"x": {0: spmd.Dim("n", max=MAX)}}


def buffer(x: T) -> T:
    return torch.arange(MAX * 4, dtype=torch.float32, device=x.device).view(MAX, 4)


def rest(x: T) -> int:
    return MAX - x.shape[0]


def half(x: T) -> int:
    return x.shape[0] // 2


# of x float32[N, 4]
SHRINKING: dict[str, Callable[[T], Any]] = {
    "slice from the size": lambda x: buffer(x)[x.shape[0] :].sum(0),
    "slice from what is left": lambda x: (buffer(x)[rest(x) :] * x).sum(0),
    "slice up to what is left": lambda x: buffer(x)[: rest(x)].mean(),
    "filled up": lambda x: torch.cat([x, x.new_zeros(rest(x), 4)]) * buffer(x),
    "filled up at the front": lambda x: torch.cat([x.new_ones(rest(x), 4), x]).cumsum(0),
    "pad at the end": lambda x: F.pad(x, (0, 0, 0, rest(x))) + buffer(x),
    "pad at the front": lambda x: F.pad(x, (0, 0, rest(x), 0), value=2.0) + buffer(x),
    "pad with a negative width": lambda x: F.pad(buffer(x), (0, 0, 0, -rest(x))) * x,
    "split": lambda x: [part.sum(0) for part in buffer(x).split([rest(x), x.shape[0]])],
    "narrow": lambda x: buffer(x).narrow(0, rest(x), x.shape[0]) * x,
    "narrow what is left": lambda x: buffer(x).narrow(0, x.shape[0], rest(x)).amax(0),
    "ones": lambda x: torch.ones(rest(x), 4, device=x.device).sum(0) + x.sum(0),
    "range": lambda x: torch.arange(rest(x), device=x.device).sum() + x.sum(),
    "what is left, returned": lambda x: torch.ones(rest(x), 3, device=x.device) * x.sum(),
    "range, from the size": lambda x: torch.arange(x.shape[0], MAX, device=x.device),
    "product": lambda x: (x[:, :1] @ torch.ones(1, rest(x), device=x.device)).sum(0),
    "rolled by what is left": lambda x: torch.roll(x, rest(x), 0),
    "repeated": lambda x: x.sum(0).expand(rest(x), 4).reshape(-1).sum(),
    "write into a part": lambda x: write(buffer(x), x),
    "squared": lambda x: torch.ones(rest(x), rest(x), device=x.device).triu().sum() + x.sum(),
    "size times what is left": lambda x: torch.ones(x.shape[0], rest(x), device=x.device).reshape(-1).cumsum(0)[-1] + x.sum(),
    "fewer rows": lambda x: x[1:-1].std(0),
    "later rows of a longer table": lambda x: buffer(x)[2 : x.shape[0] + 2].sum(0) if x.shape[0] < 20 else x.sum(0),
}


def in_place(x: T) -> float:
    count = 0.5
    count *= x.shape[0]
    return round(count)


def write(table: T, x: T) -> T:
    table[x.shape[0] :] = 0
    table[: x.shape[0]] += x
    return table


QUOTIENTS: dict[str, Callable[[T], Any]] = {
    "a multiple of 4": lambda x: x[: x.shape[0] // 4 * 4].sum(0),
    "a multiple of 8, as a number": lambda x: x * (x.shape[0] // 8 * 8),
    "half": lambda x: x[: half(x)].sum(0),
    "half of it, twice": lambda x: x[: half(x) + half(x)].sum(0),
    "both halves": lambda x: x[half(x) :].sum(0) - x[: half(x)].sum(0),
    "rounded": lambda x: x * round(x.shape[0] / 4),
    "up": lambda x: x * -(-x.shape[0] // 4) * 4,
    "square of a half": lambda x: x * half(x) ** 2,
    "half of the square": lambda x: x * (x.shape[0] ** 2 // 2),
    "triangle": lambda x: x * (x.shape[0] * (x.shape[0] + 1) // 2),
    "third of a square": lambda x: x * (x.shape[0] ** 2 // 3),
    "quotient of a constant": lambda x: x * (100 // x.shape[0]),
    "chunks": lambda x: [part.sum(0) for part in x.chunk(2)],
    "greatest divisor": lambda x: x * math.gcd(x.shape[0], 10),
    "least multiple": lambda x: x * math.lcm(x.shape[0], 3),
    "part, rounded down": lambda x: x[: int(0.5 * x.shape[0])].sum(0),
    "part of a float, rounded down": lambda x: x * (0.5 * x.shape[0] // 1),
    "inverse": lambda x: x * (1.0 / x.shape[0]),
    "float above": lambda x: x * 2 if 10.5 > x.shape[0] else x,  # noqa: SIM300
    "float above, by a function": lambda x: x * 2 if operator.gt(10.5, x.shape[0]) else x,
    "least of a float": lambda x: x * min(10.5, x.shape[0]),
    "least of a few": lambda x: x * max([3.5, x.shape[0], 14.5]),
    "sum with a float": lambda x: x * (sum([0.5, x.shape[0]]) // 2),
    "number of numpy": lambda x: x * float(np.float64(0.5) * x.shape[0] // 1),
    "times a number of numpy": lambda x: x * int(x.shape[0] * np.int64(3) // 2),
    "fraction": lambda x: x * float(fractions.Fraction(x.shape[0], 4).denominator),
    "decimal": lambda x: x * float(decimal.Decimal(x.shape[0]) // 4),
    "float in place": lambda x: x * in_place(x),
    "root": lambda x: x * math.isqrt(x.shape[0]),
    "choose": lambda x: x * math.comb(x.shape[0], 2),
    "power": lambda x: x * (0.5 ** x.shape[0]),
    "warm-up": lambda x: x * min(1.0, x.shape[0] / 20),
    "ceil": lambda x: x * math.ceil(x.shape[0] / 3),
    "item of a list": lambda x: x * ([1.0] * 8 + [2.0] * 8 + [3.0] * 20)[x.shape[0]],
    "part of a list": lambda x: x * sum(([1.0] * 8 + [2.0] * 28)[: x.shape[0]]),
    "text": lambda x: x * len(str(x.shape[0])),
    "text of it": lambda x: x * len(f"{x.shape[0]:x}"),
    "many": lambda x: x * len([0] * x.shape[0]),
    "of a few": lambda x: x * len(list(itertools.islice([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], x.shape[0]))),
    "taken out": lambda x: x * [1.0, 1.0, 1.0, 1.0, *[2.0] * 5, *[1.0] * 30].pop(x.shape[0]),
    "sine": lambda x: x * math.sin(x.shape[0] * math.pi / 2),
    "of numpy": lambda x: x * float(np.gcd(x.shape[0], 6)),
    "an array of numpy": lambda x: x * torch.from_numpy(np.hanning(x.shape[0] + 2)[1:-1].astype(np.float32)).to(x.device)[:, None],
    "filled in": lambda x: x * len("ab".ljust(x.shape[0])),
    "parity": lambda x: x * (-1) ** x.shape[0],
    "bits": lambda x: x * (x.shape[0] & 1),
    "in a set": lambda x: x * (x.shape[0] in {7, 9}),
    "strided": lambda x: x[::3].sum(0),
    "windows": lambda x: x.unfold(0, 2, 2).sum(),
    "view of a multiple": lambda x: x[: x.shape[0] // 4 * 4].reshape(-1, 4, 4).sum(1).amax(0),
}

STEPS = {**SHRINKING, **QUOTIENTS}


ALL = (7, 20, 12, 9, 13, 30, 10, 15, 4, 31, 16)


@pytest.mark.parametrize("sizes", [(7, 20, 9, 4, 31), pytest.param(ALL, marks=pytest.mark.slow)], ids=["some", "all"])
@pytest.mark.parametrize("name", every_other(STEPS))
def test_values_are_those_of_the_size(name: str, sizes: tuple[int, ...]) -> None:
    step = spmd.compile(STEPS[name], dynamic=ROWS)
    for size in sizes:
        x = batch(size, 4, seed=size)
        assert_same(step(x.to("jax")), STEPS[name](x))


@pytest.mark.parametrize("name", ["filled up", "split", "a multiple of 4", "half", "both halves", "chunks", "strided", "rounded", "up"])
def test_rows_over_a_mesh_have_the_values_of_the_size(name: str) -> None:
    data = mesh.Mesh(range(8), (8,), ("data",))
    step = spmd.compile(STEPS[name], dynamic=ROWS)
    for size in (7, 20, 12, 9, 16, 30):
        x = batch(size, 4, seed=size)
        assert_same(step(spmd.mark_sharding(x.to("jax"), data, ("data", None))), STEPS[name](x))


class Meter:
    def __init__(self) -> None:
        self.total, self.count, self.most, self.mean, self.log = 0.0, 0, 0, 0.0, list[Any]()

    def of_sums(self, x: T) -> Any:
        self.total += x.mean().item() * x.shape[0]
        self.count += x.shape[0]
        return x.sum() * self.count, self.count

    def of_means(self, x: T) -> Any:
        self.mean = 0.9 * self.mean + 0.1 * x.shape[0]
        return x.sum() * self.mean

    def of_most(self, x: T) -> Any:
        self.most = max(self.most, x.shape[0])
        return x.sum() * 2

    def of_turns(self, x: T) -> Any:
        self.count += x.shape[0]
        return x.sum() * 2 if self.count % 2 else x.sum() * 3

    def of_shapes(self, x: T) -> Any:
        self.log.append((x.shape, x.shape[0] * 0.5, {"n": x.numel()}, x.shape[0] // 2))
        return x.sum(), x.shape, [x.shape[0] / 2, x.size(0) - 1]

    def of_text(self, x: T) -> Any:
        self.log.append(f"{x.shape[0]} of {list(x.shape)}")
        self.log.append((str(x.shape), slice(0, x.shape[0]), range(x.shape[0])))
        return x.sum()


@pytest.mark.parametrize("name", [name for name in vars(Meter) if name.startswith("of_")])
def test_what_is_written_to_python_objects_is_of_the_calls_size(name: str) -> None:
    ours, theirs = Meter(), Meter()
    step: Any = spmd.compile(getattr(ours, name), dynamic=ROWS)
    for size in (7, 12, 9, 20, 3, 7, 15, 22, 5):
        x = batch(size, 4, seed=size).double()
        found, expected = step(x.to("jax")), getattr(theirs, name)(x)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12, check_device=False)  # float64: last bits
        assert vars(ours) == {**vars(theirs), "total": pytest.approx(theirs.total, abs=1e-12)}
        assert repr(ours.log) == repr(theirs.log)  # a torch.Size is one


def test_a_part_of_the_state_that_is_returned_has_the_calls_size() -> None:
    table = {kind: torch.arange(float(MAX)).to(kind) for kind in ("cpu", "jax")}
    step = spmd.compile(lambda x: (x.sum(), table["jax"][: x.shape[0]]), dynamic=ROWS)
    for size in (7, 12, 9):
        x = batch(size, 4)
        assert_same(step(x.to("jax")), (x.sum(), table["cpu"][:size]))


def test_an_error_for_other_sizes_is_raised_for_these_alone() -> None:
    table = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))

    def fn(x: T) -> T:
        if x.shape[0] > 20:
            raise ValueError(f"too long: {x.shape[0]}")
        return (x + table.to(x.device)[: x.shape[0]]).sum(0)

    step = spmd.compile(fn, dynamic=ROWS)
    for size in (7, 22, 12, 30, 20, 9):
        x = batch(size, 4)
        if size > 20:
            with pytest.raises(ValueError, match=f"too long: {size}"):
                step(x.to("jax"))
        else:
            assert_same(step(x.to("jax")), fn(x))
    assert step.num_executables == 3


def test_where_a_size_is_divided_and_rounded_each_remainder_has_traces_of_its_own() -> None:
    step = spmd.compile(lambda x: x[: x.shape[0] // 2].sum(0), dynamic=ROWS)
    for size in range(4, MAX + 1):
        x = batch(size, 4, seed=size)
        assert_same(step(x.to("jax")), x[: size // 2].sum(0))
    assert step.num_executables == 6  # buckets of 8, 16 and 32 rows; even and odd
    assert step.num_traces <= 16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("number", [lambda n: 1 / n, lambda n: 3 / (n + 1.5), lambda n: math.exp(-n / 100), lambda n: math.pow(n, 0.3)])
def test_numbers_of_few_figures_are_not_taken_for_others(dtype: torch.dtype, number: Callable[[int], float]) -> None:
    step = spmd.compile(lambda x: x * torch.tensor(number(x.shape[0]), dtype=dtype, device=x.device), dynamic=ROWS)
    for size in (7, 20, 30, 25):
        x = batch(size, 4).to(dtype)
        assert torch.equal(step(x.to("jax")).cpu(), x * torch.tensor(number(size), dtype=dtype))


def test_numbers_of_an_extent_that_two_sizes_make() -> None:
    dims = {"x": {0: spmd.Dim("n", max=16), 1: spmd.Dim("m", max=16)}}

    def fn(x: T) -> list[T]:
        longer = torch.cat([x, x.mean(1, keepdim=True)], 1)
        return [longer.std(), torch.cat([x.sum(0), x.sum(1)]).var(), x * (x.shape[0] - x.shape[1])]

    step = spmd.compile(fn, dynamic=dims)
    for n, m in ((3, 5), (9, 16), (7, 4), (12, 12)):
        x = batch(n, m, seed=n)
        assert_same(step(x.to("jax")), fn(x))
    assert step.num_traces == 5


def test_infinities_are_not_taken_for_padding() -> None:
    dims = {"x": {0: spmd.Dim("n", max=8), 1: spmd.Dim("m", max=8)}}
    step = spmd.compile(lambda x: x.reshape(-1).topk(4), dynamic=dims)
    for n, m in ((3, 5), (5, 3), (7, 7)):
        x = torch.full((n, m), -math.inf)
        x[1, 1] = 1.0
        values, places = step(x.to("jax"))
        assert_same(values, x.reshape(-1).topk(4).values)
        assert len(set(places.tolist())) == 4
        assert max(places.tolist()) < n * m
