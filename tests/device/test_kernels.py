"""Kernels that follow from a lowering: in-place and out= forms are read off the schemas, and what has none says so."""

from typing import Any

import pytest
import torch

import spmd  # noqa: F401  (registers the device)
from spmd.base._errors import UnsupportedOpError
from spmd.device._kernels import variants_of

ATEN = torch.ops.aten


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (ATEN.add.Tensor, {"aten.add_.Tensor", "aten.add.out"}),
        (ATEN.relu.default, {"aten.relu_.default", "aten.relu.out"}),
        (ATEN.topk.default, {"aten.topk.values"}),
        (ATEN.sum.dim_IntList, {"aten.sum.IntList_out"}),
    ],
    ids=lambda value: "forms" if isinstance(value, set) else str(value),
)
def test_forms_that_mean_the_same_are_found(op: torch._ops.OpOverload, expected: set[str]) -> None:
    assert {str(other) for other in variants_of(op)} == expected


def test_in_place_form_returns_its_input_and_keeps_its_dtype() -> None:
    counts = torch.tensor([1, 2]).to("jax")
    assert counts.mul_(2) is counts
    assert counts.dtype == torch.int64 and counts.tolist() == [2, 4]
    with pytest.raises(RuntimeError, match="result type Float can't be cast to the desired output type Long"):
        counts.add_(0.5)
    assert counts.tolist() == [2, 4]


def test_in_place_form_writes_through_a_view() -> None:
    base = torch.zeros(2, 2).to("jax")
    base[:, 0].add_(1)
    assert base.tolist() == [[1, 0], [1, 0]]


def test_out_form_fills_and_resizes_what_it_is_given() -> None:
    a, out = torch.ones(3).to("jax"), torch.empty(0, device="jax")
    assert torch.add(a, a, out=out) is out
    assert out.tolist() == [2, 2, 2]


def test_out_form_warns_where_it_drops_elements() -> None:
    for device in ("cpu", "jax"):
        a, out, columns = torch.ones(3, device=device), torch.empty(2, device=device), torch.ones(2, 3, device=device)
        with pytest.warns(UserWarning, match=r"resized since it had shape \[2\], which does not match the required output shape \[3\]"):
            torch.add(a, a, out=out)
        with pytest.warns(UserWarning, match=r"resized since it had shape \[3\], which does not match the required output shape \[2\]"):
            torch.sum(columns, 1, out=out)
        assert out.tolist() == [3, 3]


@pytest.mark.parametrize("device", ["cpu", "jax"])
def test_out_form_of_positions_is_int64(device: str) -> None:
    x, narrow = torch.ones(2, 3, device=device), torch.empty(2, dtype=torch.int32, device=device)
    outs = (torch.empty(2, device=device), narrow)
    for op in (
        lambda: torch.argmax(x, 1, out=narrow),
        lambda: torch.argmin(x, 1, out=narrow),
        lambda: torch.max(x, 1, out=outs),
        lambda: torch.min(x, 1, out=outs),
        lambda: torch.median(x, 1, out=outs),
        lambda: torch.nonzero(x, out=narrow),
        lambda: torch.searchsorted(x, x, out=narrow.float()),
    ):
        with pytest.raises(RuntimeError, match=r"dtype|scalar type"):
            op()


@pytest.mark.parametrize("op", [torch.sum, torch.prod, torch.cumsum, torch.cumprod, torch.mean, torch.nansum])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_out_form_is_computed_in_the_dtype_of_out(op: Any, dtype: torch.dtype) -> None:
    x = torch.tensor([[0.1, 1.3, 0.7], [0.3, 1e-9, 1.1]])
    expected = op(x, 1, out=torch.empty(0, dtype=dtype))
    found = op(x.to("jax"), 1, out=torch.empty(0, dtype=dtype, device="jax"))
    assert found.dtype == dtype
    torch.testing.assert_close(found.cpu(), expected)


def test_out_form_casts_as_torch_does_and_refuses_what_torch_refuses() -> None:
    a, wide, whole = torch.ones(2).to("jax"), torch.zeros(2, dtype=torch.float64).to("jax"), torch.zeros(2, dtype=torch.int64).to("jax")
    assert torch.add(a, a, out=wide).tolist() == [2, 2] and wide.dtype == torch.float64
    with pytest.raises(RuntimeError, match="can't be cast to the desired output type Long"):
        torch.add(a, a, out=whole)


def test_results_that_are_several_fill_outs_that_are_several() -> None:
    values, indices = torch.empty(2, device="jax"), torch.empty(2, dtype=torch.int64, device="jax")
    torch.topk(torch.tensor([1.0, 3.0, 2.0]).to("jax"), 2, out=(values, indices))
    assert (values.tolist(), indices.tolist()) == ([3, 2], [1, 2])


def test_operator_without_a_kernel_is_named_with_its_arguments_and_the_way_out() -> None:
    x = torch.ones(3, device="jax")
    with pytest.raises(
        UnsupportedOpError, match=r'aten\._dirichlet_grad\.default[\s\S]*float32\[3\][\s\S]*@spmd\.lowering\.lower\("_dirichlet_grad"\)'
    ):
        torch._dirichlet_grad(x, x, x)


@pytest.mark.parametrize(
    "loss",
    [
        lambda w, ids: torch.nn.functional.embedding(ids, w, sparse=True).sum(),
        lambda w, ids: torch.nn.functional.embedding_bag(ids[None], w, sparse=True).sum(),
        lambda w, ids: torch.nn.functional.embedding_bag(ids, w, ids[:1], mode="sum", sparse=True).sum(),
        lambda w, ids: w.gather(0, ids[:, None], sparse_grad=True).sum(),
    ],
    ids=["embedding", "bag", "bag with offsets", "gather"],
)
def test_a_sparse_gradient_is_refused_and_the_values_are_computed(loss: Any) -> None:
    w, ids = torch.ones(4, 3, device="jax", requires_grad=True), torch.tensor([0, 1, 2, 0]).to("jax")
    with torch.no_grad():
        assert loss(w, ids).item() == loss(torch.ones(4, 3), ids.cpu()).item()
    with pytest.raises(UnsupportedOpError, match=r"sparse tensor: device 'jax' has only dense tensors(?s:.*)fix: sparse=False"):
        loss(w, ids).backward()
    assert w.grad is None


ENTRIES = torch.tensor([[0, 1, 2], [2, 0, 1]]), torch.tensor([1.0, 2.0, 3.0])


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning", "ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize(
    ("use", "said"),
    [
        (lambda x, a: a @ x, "sparse tensor: device 'jax' has only dense tensors"),
        (lambda x, a: a.to_sparse_csr() @ x, "sparse tensor: device 'jax' has only dense tensors"),
        (lambda x, a: a.to_sparse_csr().to(x.device) @ x, "layout torch.sparse_csr on device 'jax', which has only dense tensors"),
        (lambda x, a: x.to_sparse(), "_to_sparse.default of a sparse tensor"),
        (lambda x, a: torch.nested.nested_tensor([x, x[:2]]) * 2, "of a nested tensor: device 'jax' supports only tensors of one shape"),
    ],
    ids=["coo", "csr", "csr moved", "to_sparse", "nested"],
)
def test_tensors_that_are_not_dense_are_refused_in_words_of_ours(use: Any, said: str) -> None:
    sparse = torch.sparse_coo_tensor(*ENTRIES, (3, 3), check_invariants=True)
    with pytest.raises(UnsupportedOpError, match=f"{said}(?s:.*)fix: "):
        use(torch.ones(3, 3, device="jax"), sparse)


def test_resize_keeps_the_elements_that_stay() -> None:
    x = torch.arange(4.0).to("jax")
    assert x.resize_(2, 2) is x and x.tolist() == [[0, 1], [2, 3]]
    assert x.resize_(3).tolist() == [0, 1, 2]
