"""Values that the host knows of a compiled function's inputs decide what its programs are: sizes, masks, branches, texts."""

import copy
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import spmd
from spmd.base._jax import evaluated
from spmd.program.trace import _host_programs
from tests.grids import line
from tests.oracle import assert_same, batch, on_device
from tests.waits import waiting

NOT_KNOWN = "only the compiled program will have|known only when the compiled program runs"

GRID, OTHER = torch.tensor([[2, 3], [1, 2]]), torch.tensor([[1, 4], [2, 2]])


def by_key(x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    return x * {"2": 2.0, "1": 3.0}[f"{grid[0, 0]}"]


def grouped(x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    """As Qwen2-VL makes positions: loops over sizes, and arithmetic of tensors that Python then reads."""
    parts, at = [], 0
    for height, width in grid:
        rows = torch.arange(height, device=x.device).repeat_interleave(width.item())
        parts.append(rows + at)
        at += max(height, width) // 2
    return x[torch.cat(parts)]


def padded(x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    height, width = grid[0].tolist()
    return torch.nn.functional.interpolate(x[None, None, :6].reshape(1, 1, 2, 3), size=(height, width), mode="bilinear")


ASKS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "tolist": lambda x, grid: x[: sum(grid.prod(-1).tolist())] * 2,
    "split": lambda x, grid: torch.split(x[: int(grid.prod(-1).sum())], grid.prod(-1).tolist()),
    "size": lambda x, grid: x.new_ones(grid[0, 0].item(), grid[0, 1].item()) * x[0],
    "range": lambda x, grid: sum(x[i] for i in range(grid[0, 1].item())),
    "slice": lambda x, grid: x[: grid[0, 1].item()],
    "branch": lambda x, grid: x + 1 if grid[0, 0] > 1 else x - 1,
    "key": by_key,
    "numpy": lambda x, grid: x[torch.from_numpy(grid.cpu().numpy()[0]).to("jax")] if x.device.type == "jax" else x[grid[0]],
    "mask": lambda x, grid: x[:2][grid[:, 0] == 2],
    "nonzero": lambda x, grid: (grid == 2).nonzero() + x[:1].long(),
    "repeat": lambda x, grid: x[:2].repeat_interleave(grid[:, 0]),
    "unique": lambda x, grid: torch.unique(grid) + x[:1].long(),
    "equal": lambda x, grid: x if torch.equal(grid[0], grid[1]) else -x,
    "one_hot": lambda x, grid: torch.nn.functional.one_hot(grid) + x[:1].long(),
    "grouped": grouped,
    "interpolate": padded,
    "text": lambda x, grid: x * {"2": 2.0, "1": 3.0}[str(grid[0, 0].item())],
    "format": lambda x, grid: x * {"02": 2.0, "01": 3.0}[format(grid[0, 0].item(), "02d")],
    "method": lambda x, grid: x * grid[0, 1].item().bit_length(),
    "attribute": lambda x, grid: x * grid[0, 0].item().real,
    "class": lambda x, grid: x * grid[0, 0].item().__class__("3"),
    "array": lambda x, grid: x[torch.tensor(np.arange(5)[: grid[0, 0].item()].tolist())],
    "beside an array": lambda x, grid: x * float((np.ones(2) * grid[0, 0].item()).sum()),
}
ALIKE = {"equal", "mask", "nonzero", "repeat", "unique"}  # both grids have the same answer: a bool, or a size


@pytest.mark.parametrize("name", list(ASKS))
def test_python_is_told_what_the_host_knows_and_each_answer_has_its_program(name: str) -> None:
    x, fn = batch(12), ASKS[name]
    step = spmd.compile(fn)
    before = spmd.metrics.counters().get("host_reads", 0)
    found = [step(*on_device((x, grid))) for grid in (GRID, OTHER, GRID.clone())]
    assert spmd.metrics.counters().get("host_reads", 0) == before
    for got, grid in zip(found, (GRID, OTHER, GRID), strict=True):
        assert_same(got, fn(x, grid))
    assert step.num_traces == (1 if name in ALIKE else 2)
    for reason in step.retraces:
        assert re.match(r"a value that Python computes from tensor argument 1 \(int64\[2, 2\]\) changed from .* to .*", reason)


def test_a_gradient_flows_past_what_python_was_told() -> None:
    def step(x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        return sum((part.square().sum() for part in torch.split(x, grid.prod(-1).tolist())), x.new_zeros(())).sqrt()

    for grid in (GRID, OTHER):
        host = batch(8).requires_grad_()
        device = batch(8).to("jax").requires_grad_()
        step(host[: int(grid.prod(-1).sum())], grid).backward()
        spmd.compile(lambda x, grid: step(x[: int(grid.prod(-1).sum())], grid).backward(), keep_grads=True)(device, grid.to("jax"))
        assert_same(device.grad, host.grad)


def test_another_input_with_the_same_answers_runs_the_same_program() -> None:
    step = spmd.compile(lambda x, mask: x * 2 if mask.all() else x * 3)
    x = batch(4)
    for mask, factor in (([1, 1, 0, 1], 3), ([0, 1, 1, 1], 3), ([1, 1, 1, 1], 2), ([0, 0, 0, 0], 3)):
        assert_same(step(x.to("jax"), torch.tensor(mask).to("jax")), x * factor)
    assert step.num_traces == 2
    assert step.retraces[0].startswith("a value that Python computes from tensor argument 1 (int64[4]) changed")


def put(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[n > 1, torch.zeros_like(n)[n > 1]] = -1.0
    return y


SIZED: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "bincount": lambda x, n: torch.bincount(n, minlength=3),
    "weighted bincount": lambda x, n: torch.bincount(n, x[:, 0]),
    "unique": lambda x, n: torch.unique(n, return_inverse=True, return_counts=True),
    "unique of a dim": lambda x, n: torch.unique(torch.stack([n, n > 0]), dim=1, return_counts=True),
    "unique_consecutive": lambda x, n: torch.unique_consecutive(n.sort().values, return_inverse=True, return_counts=True),
    "nonzero": lambda x, n: torch.nonzero(n > 1),
    "where": lambda x, n: torch.where(n > 1),
    "argwhere": lambda x, n: torch.argwhere(n[:, None] > torch.arange(2, device=n.device)),
    "masked_select": lambda x, n: x.masked_select(n[:, None] > 1),
    "mask": lambda x, n: x[n > 1] * 2,
    "mask and position": lambda x, n: x[n > 1, 0],
    "put": put,
    "repeat_interleave": lambda x, n: x.repeat_interleave(n, 0),
    "checked labels": lambda x, n: x.sum() if ((u := torch.unique(n)) < 3).all() and len(u) < 4 else -x,
}


@pytest.mark.parametrize("name", list(SIZED))
def test_where_only_a_size_depends_on_values_other_values_with_that_size_run_the_same_program(name: str) -> None:
    x, fn = batch(5, 2), SIZED[name]
    step = spmd.compile(fn)
    for n in ([0, 2, 1, 2, 0], [2, 0, 0, 1, 2], [2, 2, 1, 0, 0], [3, 1, 1, 3, 3], [0, 0, 1, 2, 2]):
        assert_same(step(*on_device((x, torch.tensor(n)))), fn(x, torch.tensor(n)))
    assert step.num_traces == 2


def test_a_size_of_invalid_values_raises_as_on_the_cpu() -> None:
    for fn in (lambda n: torch.bincount(n, minlength=3), lambda n: n.repeat_interleave(n)):
        step = spmd.compile(fn)
        step(torch.tensor([0, 2, 1]).to("jax"))
        for run, device in ((fn, "cpu"), (step, "jax")):
            with pytest.raises(RuntimeError, match="non-negative|can not be negative"):
                run(torch.tensor([0, -1, 2]).to(device))


def test_numbers_that_are_computed_with_stay_on_the_device() -> None:
    step = spmd.compile(lambda x, n: x * n.item() + n.sum().item() // 2)
    for n in (3, 5, 8):
        assert_same(step(batch(4).to("jax"), torch.tensor(n).to("jax")), batch(4) * n + n // 2)
    assert step.num_traces == 1


COMPUTED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "eager": lambda n: n + 0,
    "compiled": spmd.compile(lambda n: n * 1),
    "in_place": lambda n: n.mul_((n > 0).long()),
}


@pytest.mark.parametrize("how", list(COMPUTED))
def test_what_a_program_computed_is_not_known(how: str) -> None:
    step = spmd.compile(lambda x, n: x[: n.tolist()])
    x = batch(4).to("jax")
    assert_same(step(x, torch.tensor(3).to("jax")), batch(4)[:3])
    with pytest.raises(spmd.TraceError, match=NOT_KNOWN):
        step(x, COMPUTED[how](torch.tensor(3).to("jax")))
    assert_same(step(x, torch.tensor(3).to("jax")), batch(4)[:3])


BY_A_MASK: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "index": lambda edges, kept: edges[:, kept],
    "put": lambda edges, kept: edges[0].index_put((torch.zeros_like(edges[0])[kept],), edges[0, 0]),
    "partly known": lambda edges, kept: edges[0][kept & (edges[0] > 1)],
}


@pytest.mark.parametrize("name", list(BY_A_MASK))
def test_what_is_known_is_refused_by_name_under_a_mask_that_is_not(name: str) -> None:
    step = spmd.compile(lambda edges, x: BY_A_MASK[name](edges, x > 0))
    with pytest.raises(spmd.TraceError, match="the result shape of aten.index.Tensor depends on values"):
        step(torch.arange(8).reshape(2, 4).to("jax"), batch(4).to("jax"))


@pytest.mark.parametrize("copied", [torch.clone, copy.deepcopy, lambda n: torch.zeros_like(n).copy_(n)])
def test_a_copy_of_what_is_known_is_known(copied: Callable[[torch.Tensor], torch.Tensor]) -> None:
    n = torch.tensor(3).to("jax")
    assert int(n + 0) == 3  # it has gone to the device
    assert_same(spmd.compile(lambda x, n: x[: n.tolist()])(batch(4).to("jax"), copied(n)), batch(4)[:3])


def test_floats_are_data_and_not_known() -> None:
    with pytest.raises(spmd.TraceError, match=NOT_KNOWN):
        spmd.compile(lambda x, y: x[: y.tolist()[0]])(*on_device((batch(2), batch(2))))
    with pytest.raises(spmd.TraceError, match=NOT_KNOWN):
        spmd.compile(lambda x, y: x * y.tolist()[0])(*on_device((batch(65), batch(65))))


def test_an_argument_that_the_program_writes_is_known_where_that_follows() -> None:
    def advance(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        part = x[: n.tolist()]
        n.add_(1) if part.shape[0] < 3 else n.copy_(x.argmax())
        return part

    step, n = spmd.compile(advance), torch.tensor(2).to("jax")
    assert_same(step(batch(4).to("jax"), n), batch(4)[:2])
    assert_same(step(batch(4).to("jax"), n), batch(4)[:3])
    assert n.item() == batch(4).argmax()
    with pytest.raises(spmd.TraceError, match=NOT_KNOWN):
        step(batch(4).to("jax"), n)


class Normed(torch.nn.Module):
    """A layer that its first batch initialises."""

    def __init__(self, flag: torch.Tensor) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1, 4))
        self.register_buffer("flag", flag)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.flag.item():
            self.scale.data.copy_(1 / x.std(0, keepdim=True))
            self.flag.fill_(1)
        return self.scale * x


@pytest.mark.parametrize("is_argument", [False, True])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bfloat16])
def test_a_layer_is_initialised_by_its_first_batch(dtype: torch.dtype, is_argument: bool) -> None:
    losses: dict[str, list[float]] = {}
    for device in ("cpu", "jax"):
        model = Normed(torch.tensor(0, dtype=dtype)).to(device)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def train(x: torch.Tensor, layer: Any = model, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = layer(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        step: Any = spmd.compile(train) if device == "jax" else train
        given = (model,) if is_argument else ()
        losses[device] = [step(batch(8, 4, seed=i).to(device), *given).item() for i in range(4)]
        if device == "jax":
            assert step.num_traces == 2
            assert step.retraces[0].endswith(f"({str(dtype).removeprefix('torch.')}[]) changed from False to True")
    assert losses["jax"] == pytest.approx(losses["cpu"], rel=1e-5)


def test_a_float_in_a_buffer_is_known_while_it_is_a_whole_number() -> None:
    """Sums of others round, and a program's rounding is not the host's."""

    def count(x: torch.Tensor, state: torch.Tensor, by: float) -> torch.Tensor:
        is_even = state.item() % 2 == 0
        state += by
        return x * 2 if is_even else x

    held, expected = torch.zeros(1).to("jax"), torch.zeros(1)
    step = spmd.compile(lambda x: count(x, held, 1.0))
    for i in range(4):
        assert_same(step(batch(3, seed=i).to("jax")), count(batch(3, seed=i), expected, 1.0))
    assert step.num_traces == 2
    step, state, expected = spmd.compile(lambda x, state: count(x, state, 0.5)), torch.zeros(1).to("jax"), torch.zeros(1)
    with waiting(step):
        for i in range(6):
            assert_same(step(batch(3, seed=i).to("jax"), state), count(batch(3, seed=i), expected, 0.5))
    assert step._program.sides


def test_flags_and_counters_in_buffers_go_on_from_call_to_call() -> None:
    """As averages of parameters do: started by the first call, copied until some step, then moved at each second one."""

    def average(x: torch.Tensor, state: dict[str, torch.Tensor]) -> torch.Tensor:
        step = state["step"].item()
        state["step"] += 1
        if not state["started"].item():
            state["mean"].copy_(x)
            state["started"].data.copy_(torch.tensor(True))
        elif step % 2 == 0:
            state["mean"].lerp_(x, 1.0 if step <= 2 else 0.25)
        return state["mean"] * 1

    fresh = {"step": torch.tensor(0), "started": torch.tensor(False), "mean": torch.zeros(3)}
    held, expected = {name: value.to("jax") for name, value in fresh.items()}, fresh
    step = spmd.compile(lambda x: average(x, held))
    for i in range(9):
        assert_same(step(batch(3, seed=i).to("jax")), average(batch(3, seed=i), expected))
    assert step.num_traces == 4
    for counter, x in ((held["step"], batch(3).to("jax")), (expected["step"], batch(3))):
        counter.add_((x < 100).sum())  # computed by the device alone
    with waiting(step):
        assert_same(step(batch(3).to("jax")), average(batch(3), expected))
    assert step._program.sides


def test_flags_and_counters_of_layers_that_are_alike_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = [torch.tensor(0, device="jax") for _ in range(12)]

    @spmd.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        for counter in counters:
            counter.add_(1)
            x = x + 1 if counter.item() % 100 == 0 else x * 2
        return x

    for _ in range(3):
        step(batch(3).to("jax"))
    asked: list[int] = []
    monkeypatch.setattr(_host_programs, "evaluated", lambda program, given: asked.append(1) or evaluated(program, given))
    assert_same(step(batch(3).to("jax")), batch(3) * 2**12)
    assert len(asked) == 2  # what Python is told, and what the counters hold afterwards
    assert step.num_traces == 1


def test_a_buffer_of_a_module_is_known_until_the_device_changes_it() -> None:
    holder = torch.nn.Module()
    holder.register_buffer("sizes", torch.tensor([2, 3]))
    holder.to("jax")
    step = spmd.compile(lambda x: torch.split(x, holder.sizes.tolist()))
    x = batch(5)
    for sizes in ([2, 3], [4, 1], [2, 3]):
        holder.sizes.copy_(torch.tensor(sizes))
        assert_same(step(x.to("jax")), torch.split(x, sizes))
    assert step.num_traces == 2
    assert step.retraces == ["a value that Python computes from a state tensor (int64[2]) changed from [2, 3] to [4, 1]"]
    holder.sizes.add_((batch(2).to("jax") < 100).long())
    with pytest.raises(spmd.TraceError, match=NOT_KNOWN):
        step(x.to("jax"))


def test_a_view_shows_what_is_known_of_its_base() -> None:
    step = spmd.compile(lambda x, sizes: torch.split(x, sizes.tolist()))
    base = torch.tensor([[7, 2], [3, 1], [2, 2]])
    for part in (slice(0, 2), slice(1, 3)):
        sizes = base[part, 1]
        x = batch(int(sizes.sum()))
        assert_same(step(x.to("jax"), base.to("jax")[part, 1]), torch.split(x, sizes.tolist()))


@pytest.mark.multidevice
@pytest.mark.parametrize("rows", [8, 5])
def test_a_split_input_is_known_whole(rows: int) -> None:
    m = line()
    lengths = torch.arange(1, rows + 1)
    step = spmd.compile(lambda x, lengths: x[:, : lengths.max().item()] * lengths[:, None])
    x = batch(rows, 12)
    for extra in (0, 2, 0):
        given = [spmd.mark_sharding(t.to("jax"), m, ("data", None)[: t.dim()]) for t in (x, lengths + extra)]
        assert_same(step(*given), x[:, : rows + extra] * (lengths + extra)[:, None])
    assert step.num_traces == 2


def test_a_check_is_made_on_the_device_and_makes_no_program_for_values() -> None:
    def checked(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        if ids.max() > 9:
            raise ValueError("an id is too large")
        return x * ids

    step = spmd.compile(checked)
    for low in range(4):
        ids = torch.arange(low, low + 4)
        assert_same(step(batch(4).to("jax"), ids.to("jax")), batch(4) * ids)
    assert step.num_traces == 1


def test_values_that_change_obey_the_budget_of_retraces() -> None:
    step = spmd.compile(lambda x, n: x[: n.tolist()].clone(), max_retraces=2, on_retrace="error")
    x = batch(6).to("jax")
    step(x, torch.tensor(1).to("jax"))
    step(x, torch.tensor(2).to("jax"))
    with pytest.raises(spmd.TraceError, match="a number that the program depends on changed from 2 to 3"):
        step(x, torch.tensor(3).to("jax"))


def test_a_stack_of_steps_has_no_value_for_all_of_them() -> None:
    step = spmd.compile(lambda x, n: x[: n.tolist()], steps_per_call=2)
    with pytest.raises(spmd.TraceError, match=NOT_KNOWN):
        step(*on_device((batch(2, 4), torch.tensor([2, 2]))))


def test_every_call_can_be_checked_against_a_new_trace() -> None:
    step = spmd.compile(ASKS["grouped"], check=True)
    for grid in (GRID, GRID, OTHER):
        assert_same(step(*on_device((batch(12), grid))), grouped(batch(12), grid))


def test_a_body_of_control_flow_is_told_what_it_closes_over() -> None:
    def fn(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x * sum(n.tolist()), lambda x: x - n[0].tolist(), (x,))

    step = spmd.compile(fn)
    for sizes in ([1, 2], [3, 4]):
        for sign in (1, -1):
            x, n = batch(4).abs() * sign, torch.tensor(sizes)
            want = x * sum(sizes) if sign > 0 else x - sizes[0]
            assert_same(step(*on_device((x, n))), want)
    assert step.num_traces == 2


def test_what_a_loop_carries_is_not_known() -> None:
    def fn(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        return spmd.scan(lambda carry, _: (carry + 1, x[: carry.tolist()]), n, torch.zeros(3, device=x.device))[1]

    with pytest.raises(spmd.TraceError, match=NOT_KNOWN):
        spmd.compile(fn)(*on_device((batch(4), torch.tensor(2))))
