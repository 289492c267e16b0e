"""Products of groups of rows: torch's operator, and the one that transformers' experts use while they are compiled."""

import pytest
import torch

import spmd
from tests.lowering.against_cpu import check, normal

SIZES = [[2, 0, 5], [7, 0, 0], [0, 3, 4]]


def ends(sizes: list[int]) -> torch.Tensor:
    return torch.tensor(sizes).cumsum(0).to(torch.int32)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(
    ("left", "right"),
    [((7, 8), (3, 8, 12)), ((3, 8, 4), (4, 7)), ((8, 7), (7, 4)), ((3, 8, 4), (3, 4, 8))],
    ids=["rows", "columns", "contracted", "batch"],
)
def test_a_grouped_product_equals_the_cpus(left: tuple[int, ...], right: tuple[int, ...], sizes: list[int]) -> None:
    offs = None if len(left) == len(right) == 3 else ends(sizes)

    check(lambda a, b: by_group(a, b, offs), normal(*left), normal(*right, seed=1))


def by_group(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None) -> torch.Tensor:
    """The operator on the device; on the CPU its meaning, since torch's own kernel wants strides of 16 bytes."""
    if not a.is_cpu:
        return torch._grouped_mm(a, b, offs=None if offs is None else offs.to(a.device))
    if offs is None:
        return torch.stack([a[g] @ b[g] for g in range(len(a))])
    ranges = [slice(s, e) for s, e in zip([0, *offs.tolist()], offs.tolist(), strict=False)]
    if b.dim() == 3:
        return torch.cat([a[r] @ b[g] for g, r in enumerate(ranges)])
    if a.dim() == 3:
        return torch.cat([a[g] @ b[:, r] for g, r in enumerate(ranges)], 1)
    return torch.stack([a[:, r] @ b[r] for r in ranges])


@pytest.mark.parametrize("sizes", SIZES)
def test_transformers_experts_read_no_group_size_on_the_host(sizes: list[int]) -> None:
    pytest.importorskip("transformers.integrations.moe", reason="the operator is transformers'")
    offs = ends(sizes)
    check(lambda x, w: fallback(x, w, offs), normal(7, 8), normal(3, 8, 12, seed=1))
    before = spmd.metrics.counters()["host_reads"]
    x, w, on_device = (t.to("jax") for t in (normal(7, 8), normal(3, 8, 12, seed=1), offs))
    spmd.compile(lambda: fallback(x, w, on_device))()
    assert spmd.metrics.counters()["host_reads"] == before


def fallback(x: torch.Tensor, w: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    return torch.ops.transformers.grouped_mm_fallback(x, w, offs.to(x.device))
