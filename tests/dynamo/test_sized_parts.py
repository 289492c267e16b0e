"""torch.compile(dynamic=True): parts of a size, images resized and values looked up have a program for each bucket, at any size."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from spmd.dynamo import graphs
from tests.oracle import assert_same, batch
from tests.sweeps import part_of

SIZES = (5, 6, 7, 8, 9, 11, 13, 16, 17, 21, 30, 40)
LOOSE = (2e-5, 2e-5)


@pytest.fixture(autouse=True)
def _anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from spmd.dynamo import _compile_graph

    torch._dynamo.reset()
    monkeypatch.setattr(_compile_graph, "_made", type(_compile_graph._made)())
    yield
    torch._dynamo.reset()


def weighted(parts: Any) -> torch.Tensor:
    """A sum in which no two parts count the same."""
    return sum((part.square() * (i + 1)).sum() for i, part in enumerate(parts))  # pyright: ignore[reportReturnType]


def rows(x: torch.Tensor) -> torch.Tensor:
    """[1, 6, n]: as long as there are rows."""
    return x.t()[None]


def looked_up(x: torch.Tensor, right: bool) -> torch.Tensor:
    columns = x.detach().sort(0).values.t().contiguous()
    unusual = [torch.full_like(columns[:, 0], number) for number in (float("nan"), float("inf"), float("-inf"))]
    values = torch.stack([columns[:, 1], columns[:, -1], columns.mean(1), columns[:, 0] - 1, columns[:, -1] + 1, *unusual], 1)
    places = torch.searchsorted(columns, values, right=right)
    return (places * x.sum(0)[:, None]).sum()


CASES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "chunk": lambda x: weighted(x.chunk(2)),
    "split": lambda x: weighted(x.split([2, x.shape[0] - 2])),
    "halves": lambda x: weighted([x[: x.shape[0] // 2], x[x.shape[0] // 2 :]]),
    "searchsorted": lambda x: looked_up(x, right=False),
    "searchsorted, right": lambda x: looked_up(x, right=True),
    "bucketize": lambda x: (torch.bucketize(x.detach(), torch.tensor([-1.0, 0.0, 0.5], device=x.device)) * x).sum(),
    "nearest, twice": lambda x: weighted(F.interpolate(rows(x), scale_factor=2, mode="nearest")[0]),
    "nearest, half": lambda x: weighted(F.interpolate(rows(x), scale_factor=0.5, mode="nearest")[0]),
    "nearest, to a size": lambda x: weighted(F.interpolate(rows(x), size=7, mode="nearest")[0]),
    "nearest exact": lambda x: weighted(F.interpolate(rows(x), size=11, mode="nearest-exact")[0]),
    "linear, twice": lambda x: weighted(F.interpolate(rows(x), scale_factor=2, mode="linear")[0]),
    "linear, to a size": lambda x: weighted(F.interpolate(rows(x), size=7, mode="linear")[0]),
    "bilinear, corners": lambda x: weighted(F.interpolate(rows(x)[None], scale_factor=2, mode="bilinear", align_corners=True)[0, 0]),
    "bicubic": lambda x: weighted(F.interpolate(rows(x)[None], size=(6, 9), mode="bicubic")[0, 0]),
}


QUICK = ("chunk", "split", "searchsorted", "nearest, half", "linear, twice", "bicubic")


@pytest.mark.parametrize("name", part_of(CASES, lambda _, name: name in QUICK))
def test_a_bucket_has_a_program_with_the_numbers_of_every_size(name: str) -> None:
    fn = CASES[name]
    fast = torch.compile(fn, backend="spmd", fullgraph=True, dynamic=True)
    for size in SIZES:
        here, there = batch(size, 6, seed=size).requires_grad_(), batch(size, 6, seed=size).to("jax").requires_grad_()
        want, got = fn(here), fast(there)
        want.backward()
        got.backward()
        for have, wish in ((got.detach(), want.detach()), (there.grad, here.grad)):
            scale = max(1.0, float(wish.abs().max()))  # pyright: ignore[reportOptionalMemberAccess]
            assert_same(have.cpu() / scale, wish / scale, LOOSE)  # pyright: ignore[reportOptionalMemberAccess, reportOptionalOperand]
    assert [graph.sizes for graph in graphs()] == [None]
    assert sum(graph.num_programs for graph in graphs()) <= 5  # of 8, 16, 32 and 64 rows, and of what their traces do not hold for


def test_an_operation_before_does_not_decide_the_form_that_is_traced_for_all_sizes() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(rows(x), size=7, mode="nearest").square().sum()

    for _ in range(2):
        torch.compile(fn, backend="spmd", dynamic=False)(batch(9, 6).to("jax"))  # a rule's own record of this size
        torch._dynamo.reset()
    fast = torch.compile(fn, backend="spmd", dynamic=True)
    for size in (9, 12, 14):
        assert_same(fast(batch(size, 6, seed=size).to("jax")), fn(batch(size, 6, seed=size)), LOOSE)
    assert graphs()[-1].sizes is None
