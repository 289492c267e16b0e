"""Arguments that are not contiguous: a trace sees the strides that PyTorch would, so it allows and copies what PyTorch does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import mesh
import spmd
from spmd.program.trace._memory_order import memory_order
from tests.grids import grid

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda b: b.t(),
    "columns": lambda b: b[:, 1:],
    "first columns": lambda b: b[:, :5],
    "rows": lambda b: b[1:3],
    "one column": lambda b: b[:, 2],
    "every second": lambda b: b[:, ::2],
    "expanded": lambda b: b[0].expand(3, 8),
    "channels last": lambda b: b.view(2, 2, 4, 2).permute(0, 3, 1, 2),
    "unfolded": lambda b: b.view(-1).unfold(0, 5, 2),
    "one row of a middle dim": lambda b: b.view(2, 2, 8).permute(1, 0, 2)[:, :1],
    "one of each row": lambda b: b[:, :1],
    "every second of odd rows": lambda b: b.view(-1)[:28].view(4, 7)[:, ::2],
    "other numbers": lambda b: b.t().view(torch.int32),
    "empty": lambda b: b[:, 3:3].t(),
}
LOOKS: list[Callable[[torch.Tensor], Any]] = [
    lambda a: a.view(-1),
    lambda a: a.transpose(0, -1).reshape(-1),
    lambda a: a.contiguous(),
    lambda a: a.flatten(),
    lambda a: a[..., :1],
    lambda a: a.view(torch.int16),
    lambda a: a.unsqueeze(0).movedim(0, -1),
    lambda a: a.expand(2, *a.shape),
]


def seen(a: torch.Tensor) -> tuple[Any, list[torch.Tensor | None], torch.Tensor]:
    """What Python sees of `a`, views of it (None where PyTorch allows none), and the argument itself."""
    found: list[torch.Tensor | None] = []
    for look in LOOKS:
        try:
            found.append(look(a))
        except RuntimeError:
            found.append(None)
    return (a.is_contiguous(), a.stride(), tuple(a.shape)), found, a


def described(tensor: torch.Tensor, base: torch.Tensor) -> tuple[Any, ...]:
    shares = tensor.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
    return tensor.cpu().tolist(), tensor.stride(), tensor.storage_offset(), shares


@pytest.mark.parametrize("name", VIEWS)
def test_strides_and_views_are_pytorchs(name: str) -> None:
    step = spmd.compile(seen)
    results = []
    for device, run in (("cpu", seen), ("jax", step)):
        base = torch.arange(32, dtype=torch.float32).view(4, 8).to(device) + 1
        given = VIEWS[name](base)
        strides, views, same = run(given)
        assert same is given
        before = [None if v is None else described(v, base) for v in views]
        base.fill_(-1.0)  # also changes the results that share its memory
        results.append((strides, before, [None if v is None else v.cpu().tolist() for v in views]))
    assert results[0] == results[1]


def test_a_transposed_tensor_is_passed_itself_and_written_through() -> None:
    base = torch.arange(6.0).view(2, 3).to("jax")
    spmd.compile(lambda a, b: a.mul_(b.sum()))(base.t(), base)
    torch.testing.assert_close(base.cpu(), torch.arange(6.0).view(2, 3) * 15)


def test_a_call_with_other_strides_is_traced_again() -> None:
    for device in ("jax", "cpu"):
        base = torch.arange(16.0).view(4, 4).to(device)
        step = spmd.compile(lambda a: a.is_contiguous())
        assert [step(base), step(base.t()), step(base), step(base.clone().t())] == [True, False, True, False]
        assert step.num_traces == 2


def test_columns_of_tables_of_any_width_have_one_program() -> None:
    step = spmd.compile(lambda a: (a.is_contiguous(), a[::2], a.sum()))
    for width in (300, 500):
        table = torch.arange(200.0 * width).view(200, width).to("jax")
        is_contiguous, half, total = step(table[:, 7])
        assert not is_contiguous and half.stride() == (2 * width,) and half.storage_offset() == 7
        torch.testing.assert_close((half.cpu(), total.cpu()), (table[::2, 7].cpu(), table[:, 7].sum().cpu()))
    assert step.num_traces == 1


def test_a_gap_is_not_read_as_a_number() -> None:
    base = torch.ones(4, 8).to("jax")
    assert spmd.compile(lambda a: a.as_strided((3, 8), (8, 1)).sum())(base[:, 1:]).isnan()


def test_a_stack_of_strided_batches_is_one_batch_per_step() -> None:
    stack = torch.arange(24.0).view(3, 4, 2).to("jax")
    step = spmd.compile(lambda a: a.sum(0), steps_per_call=3)
    for view in (stack.transpose(1, 2), stack[:, 1:], stack.view(4, 3, 2).transpose(0, 1)):
        torch.testing.assert_close(step(view).cpu(), view.sum(1).cpu())


@pytest.mark.parametrize("name", ["transposed", "columns", "first columns", "every second", "one column", "expanded"])
def test_views_of_a_sharded_tensor(name: str) -> None:
    host = torch.arange(32.0).view(4, 8)
    device = spmd.mark_sharding(host.to("jax"), grid(), mesh.PartitionSpec("data", "model"))

    def both(a: torch.Tensor) -> tuple[bool, torch.Tensor]:
        return a.is_contiguous(), a @ a.transpose(0, -1)

    results = both(VIEWS[name](host)), spmd.compile(both)(VIEWS[name](device))
    assert results[0][0] == results[1][0]
    torch.testing.assert_close(results[1][1].cpu(), results[0][1])


def test_the_order_of_memory() -> None:
    assert memory_order((4, 5), (6, 1)).extents == (4, 6)
    assert memory_order((5, 4), (1, 6)).extents == (4, 6)
    assert memory_order((4,), (6,)).extents == (4, 6)
    assert memory_order((400, 50), (900, 3)) == ((400, 50), (900, 3), (400, 51, 2), (102, 2), (900, 3, 1))
    assert memory_order((3, 3), (1, 1)).extents == (5,)  # overlapping: all that lies in between
    assert memory_order((4, 3), (7, 2)).extents == (26,)  # rows of three and a half steps
    assert memory_order((400, 50), (901, 3)).extents == (400, 51, 2)


def test_slices_at_every_place_have_one_program() -> None:
    data = torch.arange(24.0).view(2, 12)
    moved, step = data.to("jax"), spmd.compile(lambda a: a * 2)
    for i in range(0, 12, 4):
        torch.testing.assert_close(step(moved[:, i : i + 4]).cpu(), data[:, i : i + 4] * 2)
    assert step.num_traces == 1


@pytest.mark.parametrize("is_argument", [True, False])
def test_gradients_that_are_kept_have_the_strides_of_their_tensors(is_argument: bool, recwarn: pytest.WarningsRecorder) -> None:
    found = []
    for device in ("cpu", "jax"):
        x = torch.arange(12.0).view(3, 4).to(device).t().detach().requires_grad_()

        def step(a: torch.Tensor, x: torch.Tensor = x) -> None:
            ((a if is_argument else x) ** 2).sum().backward()

        run = step if device == "cpu" else spmd.compile(step, keep_grads=True)
        for _ in range(2):
            run(x)
        assert x.grad is not None
        found.append((x.grad.tolist(), x.grad.stride()))
    assert found[0] == found[1]
    assert not [w for w in recwarn if "layout contract" in str(w.message)]
