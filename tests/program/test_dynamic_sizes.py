"""Steps whose arguments have sizes that vary: the unpadded run's numbers, in few programs, from few traces."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import mesh
import spmd
from spmd.device._random_stream import default_stream
from tests.oracle import assert_same, assert_same_model, batch, on_device, twins

BATCH = spmd.Dim("batch", max=32)


def network(p: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(p), nn.Linear(16, 3))


def stepping(model: nn.Module) -> Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)

    def train_step(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        optimizer.zero_grad()
        out = model(x)
        loss = F.cross_entropy(out, y, label_smoothing=0.1) + out.std() + out.var(0).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss, out

    return train_step


def labels(size: int) -> torch.Tensor:
    return torch.arange(size) % 3


ROWS: dict[str, Any] = {"x": {0: BATCH}, "y": {0: "batch"}}


def test_training_with_many_batch_sizes_is_few_programs_from_one_set_of_traces() -> None:
    host, device = twins(network)
    step, expected = spmd.compile(stepping(device), dynamic=ROWS), stepping(host)
    num_traces = 0
    for size in (5, 3, 17, 32, 9, 2, 30, 8):
        x, y = batch(size, 4, seed=size), labels(size)
        assert_same(step(x.to("jax"), y.to("jax")), expected(x, y))
        num_traces = num_traces or step.num_traces
    assert step.num_traces == num_traces == 4
    assert step.num_executables == 3  # 8, 16 and 32 rows
    assert step.flops() > 0
    for one, other in zip(device.state_dict().values(), host.state_dict().values(), strict=True):
        assert_same(one, other)


def test_dropout_draws_what_the_unpadded_step_draws() -> None:
    (_, first), (_, second) = (twins(lambda: network(0.5)) for _ in range(2))
    padded, plain = spmd.compile(stepping(first), dynamic=ROWS), spmd.compile(stepping(second))
    for size in (5, 7):
        x, y, start = batch(size, 4).to("jax"), labels(size).to("jax"), default_stream.draws
        found = padded(x, y)
        default_stream.draws = start
        assert_same(found, tuple(t.cpu() for t in plain(x, y)))


class Attention(nn.Module):
    """Embedding, causal attention, a head that is the embedding again."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(11, 8), nn.Embedding(32, 8)
        self.project = nn.Linear(8, 24)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        B, T = ids.shape
        x = self.embed(ids) + self.place(torch.arange(T, device=ids.device))
        q, k, v = (t.view(B, T, 2, 4).transpose(1, 2) for t in self.project(x).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, 8)
        return x @ self.embed.weight.t()


def language_step(model: nn.Module) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        optimizer.zero_grad()
        out = model(ids)
        loss = F.cross_entropy(out[:, :-1].reshape(-1, 11), ids[:, 1:].reshape(-1), ignore_index=3)
        loss.backward()
        optimizer.step()
        return loss, out

    return train_step


def test_batch_and_sequence_vary_at_once() -> None:
    host, device = twins(Attention)
    dims = {"ids": {0: spmd.Dim("batch", max=8), 1: spmd.Dim("seq", max=16)}}
    step, expected = spmd.compile(language_step(device), dynamic=dims), language_step(host)
    for B, T in ((3, 7), (8, 16), (5, 9), (2, 5)):
        ids = (torch.arange(B * T) * 7 % 11).view(B, T)
        assert_same(step(ids.to("jax")), expected(ids))
    assert step.num_traces == 5
    assert step.num_executables == 2


def test_sharded_batches_and_parameters_give_the_same_numbers() -> None:
    grid = mesh.Mesh(range(8), (2, 4), ("data", "model"))
    host, device = twins(network)
    spmd.mark_sharding(device[0].weight, grid, ("model", None))
    step, expected = spmd.compile(stepping(device), dynamic=ROWS), stepping(host)
    for size in (6, 12, 7):
        x, y = batch(size, 4, seed=size), labels(size)
        x_device, y_device = spmd.mark_sharding(x.to("jax"), grid, ("data", None)), spmd.mark_sharding(y.to("jax"), grid, ("data",))
        assert_same(step(x_device, y_device), expected(x, y))
    assert step.num_executables == 2


def test_a_branch_on_the_size_is_a_program_of_its_own() -> None:
    def double_large(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] > 10 else x - x.mean(0)

    step = spmd.compile(double_large, dynamic={"x": {0: BATCH}})
    for size in (4, 20, 11, 10, 3, 1):
        x = batch(size, 3)
        assert_same(step(x.to("jax")), double_large(x))


def test_sizes_that_traces_leave_out_are_not_traced_at_all_points_again() -> None:
    step = spmd.compile(
        lambda x: x * 2 if x.shape[0] in (17, 19, 23, 27) else x + 1, dynamic={"x": {0: spmd.Dim("n", max=32, buckets=(32,))}}
    )
    counts = list[int]()
    for size in (17, 19, 23):
        assert_same(step(batch(size, 4).to("jax")), batch(size, 4) * 2)
        counts.append(step.num_traces)
    assert counts == [counts[0], counts[0] + 1, counts[0] + 2]
    assert_same(step(batch(20, 4).to("jax")), batch(20, 4) + 1)


def test_sizes_are_python_numbers_that_follow_the_call() -> None:
    def count(x: torch.Tensor) -> tuple[int, torch.Tensor, torch.Tensor]:
        return x.shape[0] * 2 + 1, x * x.shape[0] ** 0.5, x[1:].t()

    step = spmd.compile(count, dynamic={"x": {0: BATCH}})
    for size in (4, 6, 20):
        x = batch(size, 3)
        number, scaled, view = step(x.to("jax"))
        assert (number, tuple(view.shape), view.stride()) == (2 * size + 1, (3, size - 1), x[1:].t().stride())
        assert_same([scaled, view], list(count(x)[1:]))


def test_buckets_can_be_given() -> None:
    step = spmd.compile(lambda x: x.sum(), dynamic={"x": {0: spmd.Dim("n", max=20, buckets=(6, 20))}})
    for size in (3, 6, 7, 20):
        assert_same(step(torch.ones(size).to("jax")), torch.tensor(float(size)))
    assert step.num_executables == 2


def test_a_model_that_masks_itself_gets_padding_of_its_own() -> None:
    dim = spmd.Dim("n", max=8, masked_by_model=True, fill=-1)
    step = spmd.compile(lambda x: (x * (x >= 0)).sum() / (x >= 0).sum(), dynamic={"x": {0: dim}})
    for size in (3, 5, 8):
        assert_same(step(torch.arange(float(size)).to("jax")), torch.arange(float(size)).mean())
    assert (step.num_executables, step.num_traces) == (1, 1)


def test_arguments_in_containers_are_named_by_their_keys() -> None:
    step = spmd.compile(lambda batch: batch["x"].mean() + batch["y"].sum(), dynamic={"batch": {"x": {0: BATCH}, "y": {0: "batch"}}})
    for size in (3, 12):
        given = {"x": batch(size, 2), "y": batch(size)}
        assert_same(step(on_device(given)), given["x"].mean() + given["y"].sum())


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ((40, 40), "dim 'batch' has size 40, which is not between 1 and 32"),
        ((0, 0), "dim 'batch' has size 0, which is not between 1 and 32"),
        ((4, 5), "dim 'batch' has two sizes in one call\n  dim 0 of x is 4, dim 0 of y is 5"),
    ],
)
def test_a_size_that_cannot_be_is_refused_before_anything_runs(sizes: tuple[int, int], text: str) -> None:
    _, device = twins(network)
    step = spmd.compile(stepping(device), dynamic=ROWS)
    with pytest.raises(spmd.SpmdError, match=text.replace("'", ".")):
        step(batch(sizes[0], 4).to("jax"), labels(sizes[1]).to("jax"))
    assert step.num_traces == 0


@pytest.mark.parametrize(
    ("dynamic", "text"),
    [
        ({"z": {0: BATCH}}, "dynamic names an argument 'z' that the function does not have"),
        ({"x": {0: "rows"}}, "dynamic names a dim 'rows' that is not defined"),
        ({"x": {0: 64}}, "dynamic has 64 where a dim is expected"),
        ({"x": {0: BATCH, 1: spmd.Dim("batch", max=8)}}, "dim 'batch' is defined twice"),
    ],
)
def test_what_dynamic_cannot_mean_is_refused(dynamic: Any, text: str) -> None:
    with pytest.raises(spmd.SpmdError, match=text):
        spmd.compile(lambda x: x, dynamic=dynamic)


@pytest.mark.parametrize(
    ("dims", "text"),
    [
        ({"0": BATCH}, r"names dim '0' of x, and dims are integers\n  fix: dynamic=\{'x': \{0: spmd.Dim"),
        ({1: BATCH, -1: spmd.Dim("other", max=8)}, r"names one dim of x twice: 1 and -1\n  its shape is \(4, 2\)\n  fix: leave out -1"),
    ],
)
def test_a_dim_that_is_text_or_named_twice_is_refused(dims: Any, text: str) -> None:
    step = spmd.compile(lambda x: x, dynamic={"x": dims})
    with pytest.raises(spmd.SpmdError, match=text):
        step(batch(4, 2).to("jax"))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"name": 3}, r"Dim\(3, max=8\) needs a name"),
        ({"buckets": 8}, "buckets of dim 'n' must increase up to max\n  buckets=8"),
        ({"buckets": ("8",)}, "buckets of dim 'n' must increase up to max"),
        ({"fill": 1}, "fill=1, which only masked_by_model=True uses(.|\n)*masked_by_model=True, fill=1"),
        ({"fill": "0", "masked_by_model": True}, "fill of dim 'n' must be a number, got '0'"),
        ({"masked_by_model": "yes"}, "masked_by_model of dim 'n' must be True or False, got 'yes'"),
    ],
)
def test_a_dim_of_wrong_types_is_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(spmd.SpmdError, match=text):
        spmd.Dim(**{"name": "n", "max": 8, **given})


def test_a_dim_that_a_tensor_does_not_have_is_refused() -> None:
    step = spmd.compile(lambda x: x, dynamic={"x": {3: BATCH}})
    with pytest.raises(spmd.SpmdError, match="dynamic names dim 3 of x, which has 2 dims"):
        step(batch(4, 2).to("jax"))


@pytest.mark.parametrize("buckets", [(8, 4), (4, 8), ()])
def test_buckets_rise_to_the_largest_size(buckets: tuple[int, ...]) -> None:
    with pytest.raises(spmd.SpmdError, match="the buckets of dim 'n' must increase up to max"):
        spmd.Dim("n", max=16, buckets=buckets)


def test_an_operation_that_cannot_be_exact_is_refused_with_its_line() -> None:
    step = spmd.compile(lambda x: torch.linalg.inv(x @ x.t() + torch.eye(x.shape[0], device="jax")), dynamic={"x": {0: BATCH}})
    with pytest.raises(
        spmd.TraceError, match=r"could not be proved to give the same results[\s\S]*operation [\s\S]*test_dynamic_sizes.py:\d+"
    ):
        step(batch(4, 2).to("jax"))


@pytest.mark.parametrize("option", [{"steps_per_call": 2}, {"check": True}])
def test_options_that_do_not_go_with_dynamic_are_refused(option: dict[str, Any]) -> None:
    with pytest.raises(spmd.SpmdError, match=f"dynamic and {next(iter(option))} cannot be combined"):
        spmd.compile(lambda x: x, dynamic={"x": {0: BATCH}}, **option)


ASKED: dict[str, Callable[[torch.Tensor], bool]] = {
    "shape": lambda x: x.shape[0] > 11,
    "len": lambda x: len(x) > 11,
    "numel": lambda x: x.numel() > 44,
    "nelement": lambda x: x.nelement() > 44,
    "torch.numel": lambda x: torch.numel(x) > 44,
    "shape.numel": lambda x: x.shape.numel() > 44,
    "prod": lambda x: math.prod(x.shape) > 44,
    "nbytes": lambda x: x.nbytes > 176,
    "stride": lambda x: x.t().contiguous().stride(0) > 11,
    "strides": lambda x: x.t().contiguous().stride()[0] > 11,
    "int": lambda x: int(x.shape[0]) > 11,
    "float": lambda x: float(x.shape[0]) > 11.5,
    "sqrt": lambda x: math.sqrt(x.shape[0]) > 3.4,
    "half": lambda x: int(x.shape[0] / 2) > 5,
    "floor": lambda x: math.floor(x.shape[0] * 0.5) > 5,
    "round": lambda x: round(x.shape[0] / 2) > 5,
    "divmod": lambda x: divmod(x.shape[0], 4)[0] > 2,
    "bit_length": lambda x: x.shape[0].bit_length() > 3,
    "shift": lambda x: (x.shape[0] >> 2) > 2,
    "power of two": lambda x: x.shape[0] & (x.shape[0] - 1) == 0,
    "shapes": lambda x: x.shape == (12, 4),
    "member": lambda x: x.shape[0] in (12, 13),
    "key": lambda x: {12: True}.get(x.shape[0], False),
    "max": lambda x: max(x.shape) == 12,
    "index": lambda x: bool(([0] * 12 + [1] * 30)[x.shape[0]]),
    "range": lambda x: sum(1 for _ in range(x.shape[0])) > 11,
    "min": lambda x: min(len(x), 12) == 12,
}


SOME = (11, 12, 16, 7)  # on both sides of every question above, two of them in one bucket


@pytest.mark.parametrize("sizes", [SOME, pytest.param((6, 7, 11, 12, 13, 16, 31, 2), marks=pytest.mark.slow)], ids=["some", "all"])
@pytest.mark.parametrize("name", ASKED)
def test_a_branch_is_the_unpadded_functions_however_the_size_is_asked_for(name: str, sizes: tuple[int, ...]) -> None:
    asked = ASKED[name]

    def fn(x: torch.Tensor) -> torch.Tensor:
        return x.sum() * 2 if asked(x) else x.mean() - 1

    assert len({asked(torch.zeros(size, 4)) for size in sizes}) == 2
    step = spmd.compile(fn, dynamic={"x": {0: BATCH}})
    for size in sizes:
        assert_same(step(batch(size, 4).to("jax")), fn(batch(size, 4)))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_recurrent_layer_ends_where_the_real_steps_end(kind: Any) -> None:
    """Both directions, over batches and lengths that vary."""
    host, device = twins(lambda: kind(4, 3, batch_first=True, bidirectional=True))
    dynamic = {"x": {0: spmd.Dim("batch", max=8), 1: spmd.Dim("seq", max=16)}}

    def outputs(layer: nn.Module) -> Callable[[torch.Tensor], Any]:
        def fn(x: torch.Tensor) -> Any:
            layer.zero_grad()
            out, last = layer(x)
            (out.square().sum() + sum(t.sum() for t in (last if isinstance(last, tuple) else (last,)))).backward()
            return out

        return fn

    step, expected = spmd.compile(outputs(device), dynamic=dynamic, keep_grads=True), outputs(host)
    for size in ((3, 5), (7, 9), (8, 16), (2, 3)):
        assert_same(step(batch(*size, 4).to("jax")).detach(), expected(batch(*size, 4)).detach())
        for one, other in zip(device.parameters(), host.parameters(), strict=True):
            assert_same(one.grad, other.grad)
    assert step.num_executables <= 3


def test_a_diagonal_of_a_square_of_the_size() -> None:
    step = spmd.compile(lambda x: (x @ x.mT).diagonal(dim1=1, dim2=2).sum(1), dynamic={"x": {0: BATCH, 1: spmd.Dim("seq", max=16)}})
    for size in ((3, 5), (17, 9), (8, 16)):
        assert_same(step(batch(*size, 4).to("jax")), batch(*size, 4).square().sum((1, 2)))


def test_an_index_out_of_bounds_is_found_before_the_call() -> None:
    table = torch.arange(12.0).reshape(4, 3)
    device = table.to("jax")
    step = spmd.compile(lambda ids: device[ids].sum(0) + device[ids[1:]].sum(0), dynamic={"ids": {0: BATCH}})
    for ids in (torch.arange(9) % 4, torch.arange(5) % 4):
        assert_same(step(ids.to("jax")), table[ids].sum(0) + table[ids[1:]].sum(0))
    for size in (5, 7, 20):
        with pytest.raises(IndexError, match="index 4 is out of bounds for dimension 0 with size 4"):
            step(torch.tensor([0] * (size - 1) + [4]).to("jax"))


def test_dims_that_have_a_second_size_are_found() -> None:
    """The first size is a program as it is; the batch is one name of inputs and labels; features are none."""
    host, device = twins(network)
    step, expected = spmd.compile(stepping(device), dynamic=True), stepping(host)
    traces = []
    for size in (5, 3, 17, 9, 2, 13, 15, 16, 40, 33, 60):
        x, y = batch(size, 4, seed=size), labels(size)
        assert_same(step(x.to("jax"), y.to("jax")), expected(x, y))
        traces.append(step.num_traces)
    assert traces[:3] == [1, 5, 9]  # as it is; up to 8 rows; up to 64 rows
    assert traces[3:8] == [9] * 5
    assert step.num_executables <= 6
    assert_same_model(device, host)


def test_dims_part_where_their_sizes_do() -> None:
    step = spmd.compile(lambda d: (d["x"] @ d["y"]).mean() + d["x"].std(), dynamic=True)
    for n, m in ((8, 8), (9, 8), (11, 9), (12, 12), (5, 11)):
        given = {"x": batch(n, 4), "y": batch(4, m)}
        assert_same(step(on_device(given)), (given["x"] @ given["y"]).mean() + given["x"].std())


@pytest.mark.parametrize(
    "mark", [lambda t: spmd.mark_dynamic(t, 0, max=32), lambda t: torch._dynamo.mark_dynamic(t, 0)], ids=["spmd", "torch"]
)
def test_a_marked_dim_varies_from_the_first_call_on(mark: Callable[[torch.Tensor], None]) -> None:
    step = spmd.compile(lambda x: x.softmax(0), dynamic=True)
    num_traces = 0
    for size in (9, 12, 16):
        x = batch(size, 3).to("jax")
        mark(x)
        assert_same(step(x), batch(size, 3).softmax(0))
        num_traces = num_traces or step.num_traces
    assert (step.num_traces, step.num_executables) == (num_traces, 1)


def test_what_is_not_proved_has_a_program_for_each_size() -> None:
    step = spmd.compile(lambda x: torch.linalg.det(x @ x.mT + torch.eye(x.shape[0], device=x.device)), dynamic=True)
    for size in (3, 5, 4):
        x = batch(size, 4)
        assert_same(step(x.to("jax")), torch.linalg.det(x @ x.mT + torch.eye(size)), (1e-4, 1e-4))
    assert step.num_executables == 3 and "size" in step.retraces[0]


def test_a_mark_that_means_nothing_is_refused() -> None:
    with pytest.raises(spmd.SpmdError, match="dim 2 of a tensor of shape"):
        spmd.mark_dynamic(torch.zeros(3, 4), 2)
    with pytest.raises(spmd.SpmdError, match="max=2 for dim 0 of size 3"):
        spmd.mark_dynamic(torch.zeros(3, 4), 0, max=2)


def test_the_bound_of_an_index_may_be_a_size() -> None:
    """Checked before the call where the whole argument is the index, by the program where a part of it is."""

    def fn(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return x.gather(0, index) + x[index[:1]]

    step = spmd.compile(fn, dynamic=True)
    for size in (3, 5, 9, 6, 17):
        x = torch.arange(float(size))
        for largest in (size - 1, size):
            index = torch.full((size,), largest)
            if largest < size:
                assert_same(step(x.to("jax"), index.to("jax")), fn(x, index))
            else:
                with pytest.raises((RuntimeError, IndexError), match=f"index {size} is out of bounds for dimension 0 with size {size}"):
                    step(x.to("jax"), index.to("jax")).cpu()
    parts = spmd.compile(lambda x, index: x[index[:1]], dynamic=True)
    for size in (3, 5, 9, 6):
        x = torch.arange(float(size)).to("jax")
        assert parts(x, torch.full((size,), size - 1).to("jax")).item() == size - 1
        with pytest.raises(IndexError, match=f"index {size} is out of bounds"):
            parts(x, torch.full((size,), size).to("jax")).cpu()
