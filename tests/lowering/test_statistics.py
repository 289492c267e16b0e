"""Order statistics beside infinities and NaN; histograms of values at the edges of bins."""

from collections.abc import Callable

import pytest
import torch

import spmd
from tests.lowering.against_cpu import check

inf = float("inf")


@pytest.mark.parametrize(
    "rows", [[[inf, 2.0, inf, 1.0], [1.0, -inf, -inf, 1.0]], [[3, 3, 1, 1], [1, 2, 3, 3]], [[True, False], [True, True]]]
)
def test_mode_counts_what_is_equal(rows: list[list[float]]) -> None:
    check(lambda x: tuple(x.mode(-1)), torch.tensor(rows))


Counts = tuple[torch.Tensor, ...]
HISTOGRAMS: dict[str, Callable[[torch.Tensor, torch.Tensor], Counts]] = {
    "bins": lambda x, w: (*torch.histogram(x, 3), *torch.histogram(x, 7)),
    "range": lambda x, w: (*torch.histogram(x, 6, range=(-2.0, 4.0)), *torch.histogram(x, 10, range=(-0.3, 0.7))),
    "density": lambda x, w: tuple(torch.histogram(x, 12, weight=w, density=True)),
    "edges": lambda x, w: tuple(torch.histogram(x, torch.tensor([-3.0, -1.0, 0.5, 2.0, 3.0], dtype=x.dtype, device=x.device))),
    "histc": lambda x, w: (torch.histc(x, 10), torch.histc(x, 10, -1, 2), torch.histc(x, 9, -1.1, 1.1)),
    "histogramdd": lambda x, w: (r := torch.histogramdd(x.reshape(-1, 2), [3, 7], weight=w[::2]), (r[0], *r[1]))[1],
    "bucketize": lambda x, w: (torch.bucketize(x, torch.linspace(-3, 3, 8, dtype=x.dtype, device=x.device)),),
    "linspace": lambda x, w: (torch.linspace(x.min(), x.max(), 13, dtype=x.dtype, device=x.device),),
    "linspace of numbers": lambda x, w: (torch.linspace(-0.3, 0.7, 50, dtype=x.dtype, device=x.device),),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", HISTOGRAMS)
def test_values_at_the_edges_of_bins_are_counted_as_by_the_cpu(name: str, dtype: torch.dtype) -> None:
    count, is_weighted = HISTOGRAMS[name], name in ("density", "histogramdd")
    step = spmd.compile(lambda x, w: count(x, w))
    for seed in range(8):
        rng = torch.Generator().manual_seed(seed)
        x = torch.randint(-10, 11, (40,), generator=rng).to(dtype) / (1 if seed % 2 else 10)
        w = torch.rand(40, generator=rng).to(dtype)
        for run in (count, step):
            expected, found = count(x, w), run(x.to("jax"), w.to("jax"))
            for i, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
                rtol = atol = None if is_weighted and i == 0 else 0  # sums of weights depend on their order
                torch.testing.assert_close(ours.cpu(), theirs, rtol=rtol, atol=atol)
    assert step.num_traces == 1
