"""Indices out of bounds: raised at once where the host knows them, at the next read where a program was asked to check."""

import pytest
import torch
import torch.nn.functional as F

import spmd
from spmd.device._indices import checked
from tests.device.indexing import OPS, PLACES, Op, outcome
from tests.grids import line
from tests.lowering.against_cpu import assert_equal


def of_device(values: list[int]) -> torch.Tensor:
    """Integers that the host does not know any more."""
    return torch.tensor(values).to("jax") + torch.zeros((), dtype=torch.int64, device="jax")


@pytest.mark.parametrize("name", OPS)
def test_an_index_is_accepted_or_refused_as_by_the_cpu(name: str) -> None:
    w = torch.arange(12.0).reshape(4, 3)
    step = spmd.compile(OPS[name], check_indices=True)
    for place, values in PLACES.items():
        expected = outcome(OPS[name], w, torch.tensor(values))
        known = outcome(OPS[name], w.to("jax"), torch.tensor(values).to("jax"))
        found = outcome(step, w.to("jax"), of_device(values))
        if isinstance(expected, Exception):
            assert type(known) is type(expected), place
            assert isinstance(found, type(expected)) and isinstance(found, spmd.CheckFailed), place
            index = str(values[0] if values[0] < 0 else values[1])
            assert index in str(known) and index in str(found) and "indexing.py" in str(found)
        else:
            for got in (known, found):
                torch.testing.assert_close(got, expected)


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("op", [lambda w, i: w.index_add(0, i, w[:2]), lambda w, i: w.index_reduce(0, i, w[:2], "amax")])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_class_of_the_error_is_that_of_the_cpus_kernel(op: Op, dtype: torch.dtype) -> None:
    w, i = torch.arange(12.0).reshape(4, 3), torch.tensor([1, 7], dtype=dtype)
    assert type(outcome(op, w.to("jax"), i.to("jax"))) is type(outcome(op, w, i))


def test_eager_operations_check_where_they_are_asked_to() -> None:
    w, index = torch.arange(4.0).to("jax"), of_device([1, 5])
    assert w[index].tolist() == [1.0, 3.0]
    with checked(True), pytest.raises(IndexError, match="index 5 is out of bounds for dimension 0 with size 4"):
        w[index].tolist()


@pytest.mark.parametrize(("offsets", "wrong"), [([0, 3], ""), ([1, 2], "has to be 0"), ([0, 4], "greater than input's length 3")])
def test_bags_begin_where_their_input_has_elements(offsets: list[int], wrong: str) -> None:
    w, ids, at = torch.arange(8.0).reshape(4, 2), torch.tensor([1, 0, 3]), torch.tensor(offsets)
    compiled = spmd.compile(lambda i, w, o: F.embedding_bag(i, w, o), check_indices=True)
    for run, given in ((F.embedding_bag, at.to("jax")), (compiled, at.to("jax")), (compiled, of_device(offsets))):
        if wrong:
            with pytest.raises(RuntimeError, match=wrong):
                F.embedding_bag(ids, w, at)
            with pytest.raises(RuntimeError, match=wrong):
                run(ids.to("jax"), w.to("jax"), given).cpu()
        else:
            assert_equal(run(ids.to("jax"), w.to("jax"), given), F.embedding_bag(ids, w, at))


def test_labels_of_several_classes_are_indices_or_end_a_row() -> None:
    scores = torch.randn(1, 3)
    assert F.multilabel_margin_loss(scores.to("jax"), torch.tensor([[1, -1, 0]]).to("jax")).isfinite().item()
    for labels in ([[1, -2, 0]], [[1, -1, 3]]):
        for device in ("cpu", "jax"):
            with pytest.raises(RuntimeError, match="argument #2 'target' is out of range"):
                F.multilabel_margin_loss(scores.to(device), torch.tensor(labels).to(device))


def test_what_is_ignored_is_no_index() -> None:
    logits, target = torch.randn(3, 4), torch.tensor([1, -100, 3])
    step = spmd.compile(lambda x, t: F.cross_entropy(x, t), check_indices=True)
    assert_equal(step(logits.to("jax"), target.to("jax")), F.cross_entropy(logits, target))
    with pytest.raises(IndexError, match="Target 9 is out of bounds"):
        step(logits.to("jax"), of_device([1, -100, 9])).item()


def test_checks_of_sharded_indices() -> None:
    w, index = torch.arange(32.0).reshape(16, 2), torch.arange(16)
    step = spmd.compile(lambda w, i: w[i] * 2, check_indices=True)
    marked = spmd.mark_sharding(w.to("jax"), line(), ("data", None))
    assert_equal(step(marked, spmd.mark_sharding(index.to("jax"), line(), ("data",))), w[index] * 2)
    index[13] = 16
    result = step(marked, spmd.mark_sharding(of_device(index.tolist()), line(), ("data",)))
    with pytest.raises(IndexError, match="index 16 is out of bounds for dimension 0 with size 16"):
        result.cpu()


def test_an_index_of_the_cpu_is_checked_where_it_lies() -> None:
    with pytest.raises(IndexError, match="index 5 is out of bounds for dimension 0 with size 4"):
        torch.zeros(4, device="jax")[torch.tensor([5])]
    assert torch.zeros(4, 0, device="jax")[torch.tensor([3])].shape == (1, 0)


def test_one_number_that_is_repeated_is_an_index() -> None:
    w = torch.ones(1, 1, device="jax")
    for index in (torch.zeros(1, 5, dtype=torch.int64, device="jax"), torch.zeros(5, 1, dtype=torch.int64, device="jax").T):
        assert w.expand(1, 5).gather(1, index).tolist() == [[1.0] * 5]


@pytest.mark.parametrize("name", OPS)
def test_a_program_looks_at_the_indices_that_it_is_given(name: str) -> None:
    """In the first call, in later ones, and in a view; nothing is traced for other values, known or not."""
    w = torch.arange(12.0).reshape(4, 3)
    step = spmd.compile(lambda w, i: OPS[name](w, i[1:]))
    for values in (PLACES["inside"], *PLACES.values(), PLACES["inside"]):
        given = torch.tensor([77, *values])
        expected = outcome(OPS[name], w, given[1:])
        got = outcome(step, w.to("jax"), given.to("jax"))
        if isinstance(expected, Exception):
            assert type(got) is type(expected), values
            assert str(values[0] if values[0] < 0 else values[1]) in str(got) and "indexing.py" in str(got)
        else:
            torch.testing.assert_close(got, expected)
    step(w.to("jax"), of_device([77, 1, 3]))
    assert step.num_traces == 1


def test_a_step_with_an_index_outside_changes_nothing() -> None:
    table = torch.nn.Embedding(4, 2).to("jax")
    optimizer = torch.optim.SGD(table.parameters(), 0.1, momentum=0.9)

    @spmd.compile
    def train_step(ids: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = table(ids).square().sum()
        loss.backward()
        optimizer.step()
        return loss

    train_step(torch.tensor([0, 3]).to("jax"))
    before = table.weight.detach().cpu()
    with pytest.raises(IndexError, match="index out of range in self: 4"):
        train_step(spmd.mark_sharding(torch.tensor([0, 4]).to("jax"), line(), (None,)))
    assert torch.equal(table.weight.detach().cpu(), before)


def test_an_index_that_was_laid_out_is_known_to_eager_operations() -> None:
    ids = spmd.mark_sharding(torch.arange(8).to("jax"), line(), ("data",))
    with pytest.raises(IndexError, match="index 7 is out of bounds for dimension 0 with size 7"):
        torch.zeros(7, device="jax")[ids]


def test_a_branch_that_is_not_taken_looks_at_no_index() -> None:
    w, ids = torch.arange(4.0).to("jax"), torch.tensor([1, 9]).to("jax")
    step = spmd.compile(lambda take, ids: torch.cond(take, lambda i: w[i], lambda i: w[:2] + i, (ids,)))
    assert step(torch.tensor(False).to("jax"), ids).tolist() == [1.0, 10.0]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.uint8, torch.int16], ids=str)
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_narrow_ids_hold_more_ids_than_these_count(mode: str, dtype: torch.dtype) -> None:
    ids, offsets, weight = (torch.arange(300) % 2).to(dtype), torch.tensor([0, 290]), torch.randn(2, 3)
    try:
        expected = F.embedding_bag(ids, weight, offsets, mode=mode)
    except RuntimeError:
        return  # the CPU has no such bag
    assert_equal(F.embedding_bag(ids.to("jax"), weight.to("jax"), offsets.to("jax"), mode=mode), expected)
