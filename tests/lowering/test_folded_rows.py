"""Products of matrices whose rows were folded from batch and positions: torch's values, and no exchange that the whole array needs not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import mesh
import spmd
from tests.oracle import assert_same, batch

T = torch.Tensor
Product = Callable[[T, T, T], T]

# of x [2, 3, 4], weight [4, 6], bias [6]
PRODUCTS: dict[str, Product] = {
    "addmm": lambda x, w, b: torch.addmm(b, x.view(-1, 4), w).view(2, 3, 6),
    "addmm, scaled": lambda x, w, b: torch.addmm(b, x.view(-1, 4), w, beta=0.5, alpha=2),
    "addmm of zero": lambda x, w, b: torch.addmm(b, x.view(-1, 4), w, beta=0, alpha=0),
    "addmm to a matrix": lambda x, w, b: torch.addmm(b.expand(6, 6), x.view(-1, 4), w),
    "addmm to a row": lambda x, w, b: torch.addmm(b[None], x.view(-1, 4), w),
    "mm": lambda x, w, b: x.reshape(-1, 4).mm(w) + b,
    "mm of what is left of a slice": lambda x, w, b: x[:, 1:].reshape(-1, 4).mm(w) + b,
    "both folded": lambda x, w, b: x.view(-1, 4).t().mm((x @ w + b).view(-1, 6)),
    "folded from other dims": lambda x, w, b: x.view(-1, 4).t().mm((x @ w + b).view(3, 2, 6).view(-1, 6)),
    "folded to other rows": lambda x, w, b: x.view(4, 6).mm(w.view(6, 4)) + b[:4],
    "one row of each": lambda x, w, b: x[:1, :1].reshape(-1, 4).mm(w) + b,
    "transposed on the right": lambda x, w, b: w.t().mm(x.view(-1, 4).t()).t() + b,
    "sum of rows": lambda x, w, b: (x @ w + b).view(-1, 6).sum(0),
    "sum of rows that stays a row": lambda x, w, b: (x @ w + b).view(-1, 6).sum(0, keepdim=True),
    "sum of columns": lambda x, w, b: (x @ w + b).view(-1, 6).sum(1),
    "sum in another dtype": lambda x, w, b: (x.double() @ w.double() + b).view(-1, 6).sum(0, dtype=torch.float32),
    "no columns": lambda x, w, b: x[..., :0].reshape(6, 0).mm(w[:0]) + b,
}


def values_and_gradients(product: Product, *tensors: T) -> tuple[T, ...]:
    leaves = [t.detach().requires_grad_() for t in tensors]
    out = product(*leaves)
    (out * out).sum().backward()
    return out.detach(), *(torch.zeros_like(t) if t.grad is None else t.grad for t in leaves)


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
def test_values_and_gradients_are_torchs(name: str, is_compiled: bool) -> None:
    tensors = batch(2, 3, 4), batch(4, 6, seed=2), batch(6, seed=3)
    run: Any = spmd.compile(values_and_gradients) if is_compiled else values_and_gradients
    want = values_and_gradients(PRODUCTS[name], *tensors)
    for _ in range(2):
        assert_same(run(PRODUCTS[name], *(t.to("jax") for t in tensors)), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    x, w = (10 * batch(2, 3, 4)).to(dtype), (10 * batch(4, 6, seed=2)).to(dtype)
    assert_same(spmd.compile(lambda x, w: x.view(-1, 4).mm(w))(x.to("jax"), w.to("jax")), x.view(-1, 4).mm(w))


def test_second_derivatives() -> None:
    def twice(x: T, w: T) -> T:
        (first,) = torch.autograd.grad(torch.addmm(w[0], x.view(-1, 4), w).tanh().sum(), w, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    x, w = batch(2, 3, 4).requires_grad_(), batch(4, 6, seed=2).requires_grad_()
    here = [t.detach().to("jax").requires_grad_() for t in (x, w)]
    assert_same(spmd.compile(twice)(*here), twice(x, w))


@pytest.mark.multidevice(num=8)
@pytest.mark.parametrize("rank", [3, 4])
def test_batch_and_positions_that_are_split_are_not_gathered(rank: int) -> None:
    grid = mesh.Mesh(range(8), (2, 4), ("data", "seq"))
    w, b = batch(8, 12, seed=2).requires_grad_(), batch(12, seed=3).requires_grad_()
    x = batch(*(4, 8, 2)[: rank - 1], 8)

    def step(x: T, w: T, b: T) -> tuple[T, ...]:
        y = torch.addmm(b, x.view(-1, 8), w).view(*x.shape[:-1], 12)
        loss = y.square().mean()
        return loss, *torch.autograd.grad(loss, (w, b))

    run = spmd.compile(step)
    marked = spmd.mark_sharding(x.to("jax"), grid, ("data", "seq", *[None] * (rank - 2)))
    got = run(marked, *(t.detach().to("jax").requires_grad_() for t in (w, b)))
    assert_same(got, step(x, w, b))
    # what both axes sum: the loss and both gradients
    assert {item.kind for item in run.collectives()} == {"all-reduce"}
    assert sum(item.count * item.num_bytes for item in run.collectives()) == 2 * 4 * (1 + 8 * 12 + 12)
