"""Gathers and windows whose tensors have layouts that disagree are compiled, with the values and gradients of CPU tensors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import mesh
import spmd
from spmd import SpmdError
from spmd.device import _partitioner
from tests.oracle import assert_same, batch

pytestmark = pytest.mark.multidevice(num=8)
D, M = "data", "model"


def _mesh(*shape: int) -> mesh.Mesh:
    return mesh.Mesh(range(8), shape, (D, M, "rest")[: len(shape)])


def _compiled(fn: Callable[..., Any], grid: mesh.Mesh, *given: tuple[torch.Tensor, Any]) -> Any:
    return spmd.compile(fn)(*(spmd.mark_sharding(t.to("jax"), grid, spec) for t, spec in given))


def _ids(*shape: int, below: int) -> torch.Tensor:
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(0))


def _with_gradient(selected: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    def fn(ids: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, ...]:
        table = table.detach().requires_grad_()
        out = selected(ids, table)
        return out.detach(), *torch.autograd.grad(out, table, torch.cos(out.detach()))

    return fn


_SELECTED = {
    "embedding": F.embedding,
    "index": lambda ids, table: table[ids],
    "bag": lambda ids, table: F.embedding_bag(ids, table, mode="sum"),
    "rows": lambda ids, table: table[ids].sum(-1),
}


@pytest.mark.parametrize(
    ("op", "columns", "of_table"),
    [
        ("embedding", 3, (None, M)),
        ("embedding", 5, (D, M)),
        ("index", 7, (None, M)),
        ("bag", 5, (None, M)),
        ("rows", 9, (None, M)),
    ],
)
def test_columns_of_ids_that_are_split_unequally_by_the_axis_of_the_table(op: str, columns: int, of_table: Any) -> None:
    fn, ids, table = _with_gradient(_SELECTED[op]), _ids(4, columns, below=16), batch(16, 8)
    assert_same(_compiled(fn, _mesh(2, 4), (ids, (D, M)), (table, of_table)), fn(ids, table))


def test_ids_stay_split_and_the_program_is_the_same_if_they_are_split_equally(monkeypatch: pytest.MonkeyPatch) -> None:
    fn, ids, table = _with_gradient(F.embedding), _ids(4, 8, below=16), batch(16, 8)

    found: list[str] = []
    for settle in (_partitioner.settle, lambda *_: False):
        monkeypatch.setattr(_partitioner, "settle", settle)
        given = [spmd.mark_sharding(t.to("jax"), _mesh(2, 4), spec) for t, spec in ((ids, (D, M)), (table, (None, M)))]
        step = spmd.compile(fn)
        step(*given)
        found.append(step.hlo())
    assert found[0] == found[1]


def test_gather_along_a_split_dim_by_indices_that_are_split_unequally() -> None:
    fn = _with_gradient(lambda ids, x: x.gather(2, ids))
    ids, x = _ids(7, 6, 4, below=11), batch(7, 6, 11)
    specs = (("rest", M), D, None), (D, "rest", M)
    assert_same(_compiled(fn, _mesh(2, 2, 2), (ids, specs[0]), (x, specs[1])), fn(ids, x))


def test_gradient_of_values_that_are_written_at_indices_that_are_split_unequally() -> None:
    def fn(ids: torch.Tensor, x: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = values.detach().requires_grad_()
        out = x.index_put((ids,), values, accumulate=True)
        return out.detach(), *torch.autograd.grad(out, values, torch.cos(out.detach()))

    ids, x, values = _ids(6, 9, below=7), batch(7, 9), batch(6, 9, 9, seed=2)
    specs = (M, ("rest", D)), (D, "rest"), (D, None, None)
    got = _compiled(lambda *given: fn(*given), _mesh(2, 2, 2), *zip((ids, x, values), specs, strict=True))
    assert_same(got, fn(ids, x, values))


@pytest.mark.parametrize(
    ("shape", "of_x", "of_values", "of_positions"),
    [
        ((2, 4), (None, M, None, None), (None, M, None, None), (None, None, M, None)),
        ((2, 4), (None, None, None, M), (None, M, None, None), (None, None, M, None)),
        ((2, 4), (D, M, None, None), (M, D, None, None), (None, None, (D, M), None)),
        ((2, 4), (M, None, None, None), (None, None, None, None), ((D, M), None, None, None)),
        ((2, 2, 2), (D, M, None, None), (D, M, None, None), (M, D, None, None)),  # parts of equal shapes
    ],
)
@pytest.mark.parametrize("channels", [4, 6])
def test_maxima_and_their_positions_have_different_shardings(
    channels: int, shape: tuple[int, ...], of_x: Any, of_values: Any, of_positions: Any
) -> None:
    grid, x = _mesh(*shape), batch(4, channels, 8, 10)

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = x.detach().requires_grad_()
        values, positions = F.max_pool2d(x, 3, 1, 1, return_indices=True)
        if x.device.type == "jax":
            values = spmd.mark_sharding(values, grid, of_values)
            positions = spmd.mark_sharding(positions, grid, of_positions)
        return values.detach(), positions, *torch.autograd.grad(values, x, torch.cos(values.detach()))

    assert_same(_compiled(fn, grid, (x, of_x)), fn(x))


def test_program_that_the_partitioner_cannot_compile_is_refused_by_operation_and_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_partitioner, "settle", lambda *_: False)
    table = torch.nn.Embedding(16, 8)
    model = torch.nn.Sequential(table).to("jax")
    spmd.mark_sharding(table.weight, _mesh(2, 4), (None, M))
    ids = spmd.mark_sharding(_ids(4, 5, below=16).to("jax"), _mesh(2, 4), (D, M))

    def step(ids: torch.Tensor) -> torch.Tensor:
        return model(ids)

    with pytest.raises(SpmdError) as caught:
        spmd.compile(step)(ids)
    text = str(caught.value)
    assert text.startswith("XLA's partitioner cannot compile step for Mesh(data=2, model=4)\n")
    assert "operation gather in model.0, called at test_disagreements.py:" in text and ".step\n" in text
    assert "fix: " in text and "spmd.mark_sharding(x, mesh, (None,) * x.ndim)" in text
