"""`F.embedding_bag` on the device: values, dtypes and gradients of torch, for bags of one size and for others."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import spmd  # noqa: F401  (registers the device)
from tests.oracle import assert_same, batch, on_device

CASES: list[dict[str, Any]] = [
    {"mode": "sum"},
    {"mode": "mean"},
    {},
    {"mode": "max"},
    {"mode": "sum", "padding_idx": 3},
    {"mode": "mean", "padding_idx": -13},
    {"mode": "sum", "per_sample_weights": batch(4, 5, seed=3)},
    {"mode": "sum", "per_sample_weights": batch(4, 5, seed=3), "padding_idx": 3},
    {"mode": "sum", "max_norm": 0.5},
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_bags_of_one_size_are_torchs(case: dict[str, Any], dtype: torch.dtype) -> None:
    ids = torch.randint(0, 16, (4, 5), generator=torch.Generator().manual_seed(0))
    ids[0] = 3  # a bag of nothing but padding
    case = {k: v.to(dtype) if isinstance(v, torch.Tensor) else v for k, v in case.items()}
    results: list[Any] = []
    for move in (lambda t: t, on_device):
        weight = move(batch(16, 8).to(dtype)).requires_grad_(not case.get("max_norm"))
        options = {name: move(value) for name, value in case.items()}
        factors = options.get("per_sample_weights")
        if factors is not None:
            factors = options["per_sample_weights"] = factors.detach().clone().requires_grad_()
        out = F.embedding_bag(move(ids), weight, **options)
        if out.requires_grad:
            out.square().sum().backward()
        results.append([out.detach(), weight.grad, None if factors is None else factors.grad])
    tolerance = (3e-2, 5e-2) if dtype == torch.bfloat16 else None  # torch sums rows of 16 bits in another order and width
    assert_same(results[1], results[0], tolerance)


def test_bags_by_offsets_are_torchs() -> None:
    ids, offsets, weight = torch.tensor([1, 2, 4, 5, 4, 3, 2, 9]), torch.tensor([0, 4]), batch(16, 8)
    assert_same(F.embedding_bag(ids.to("jax"), weight.to("jax"), offsets.to("jax")), F.embedding_bag(ids, weight, offsets))


def test_on_the_host_it_is_torchs_own() -> None:
    ids, weight = torch.arange(6).reshape(2, 3), batch(16, 8)
    assert torch.equal(F.embedding_bag(ids, weight, mode="sum"), weight[ids].sum(1))


REFUSED: dict[str, dict[str, Any]] = {
    "one offset": {"offsets": torch.tensor([0])},
    "offsets": {"offsets": torch.tensor([0, 1])},
    "padding_idx above": {"padding_idx": 9},
    "padding_idx below": {"padding_idx": -7},
    "mode": {"mode": "prod"},
}


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_the_cpu_refuses_raise_its_error(name: str) -> None:
    ids, weight = torch.tensor([[0, 1, 2]]), torch.ones(6, 3)
    with pytest.raises((ValueError, RuntimeError)) as cpu:
        F.embedding_bag(ids, weight, **REFUSED[name])
    moved = {key: value.to("jax") if isinstance(value, torch.Tensor) else value for key, value in REFUSED[name].items()}
    with pytest.raises(cpu.type) as ours:
        F.embedding_bag(ids.to("jax"), weight.to("jax"), **moved)
    assert str(ours.value) == str(cpu.value)


def test_a_max_norm_of_zero_is_obeyed() -> None:
    ids, weight = torch.tensor([[0, 1, 2]]), torch.ones(6, 3)
    ours = F.embedding_bag(ids.to("jax"), weight.to("jax"), max_norm=0.0)
    torch.testing.assert_close(ours.cpu(), F.embedding_bag(ids, weight.clone(), max_norm=0.0))
