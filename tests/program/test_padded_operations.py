"""What operations make of padding: those that follow the size are exact in one program, the others exact by other programs or refused."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import spmd
from tests.oracle import batch

T = torch.Tensor
SIZES = (7, 20, 9, 32, 13)
LOOSE = (2e-4, 2e-5)  # gradients of sums of some 100 terms, in another order


def marks(x: T, count: int = 5) -> T:
    """int64[N], each below `count`."""
    return torch.arange(x.shape[0], device=x.device) % count


def numbers(x: T, *values: float) -> T:
    return torch.tensor(values, device=x.device)


def wide(x: T) -> T:
    """int64[N, 4]: a label for each element."""
    return marks(x)[:, None].expand(-1, 4)


def means_of_steps(x: T) -> T:
    """Of extents `(n + 1) // 2 + 1` and `(n + 1) // 4`: with few points one can be taken for the other."""
    y = F.conv1d(x.t()[None], torch.ones(2, 4, 3, device=x.device), stride=2, padding=2)
    return F.conv1d(y, torch.ones(3, 2, 3, device=x.device), stride=2).mean()


def written(x: T) -> T:
    """Every other row is another, in place."""
    y = x * 1
    y[::2] = y[::2] * 3
    y[1::2] += 1
    return y


# operations of x float32[N, 4]
IN_ONE_PROGRAM: dict[str, list[Callable[[T], Any]]] = {
    "sums": [
        lambda x: x.sum(0),
        lambda x: x.mean(),
        lambda x: x.mean(0),
        lambda x: (-x.abs()).sum(0),
        lambda x: (-x.abs()).amax(0),
        lambda x: x.abs().amin(),
        lambda x: x.prod(0),
        lambda x: x.std(0),
        lambda x: x.var(),
        lambda x: x.var(0, correction=0),
        lambda x: torch.std_mean(x, 0)[0],
        lambda x: x.logsumexp(0),
        lambda x: x.norm(),
        lambda x: torch.linalg.vector_norm(x, 1, 0),
        lambda x: torch.linalg.vector_norm(x, math.inf, 0),
        lambda x: (x > 1).any(0),
        lambda x: (x < 9).all(),
        lambda x: (x * 10).int().amax(0) - 5,
        lambda x: x.log().nansum(0),
        lambda x: (1 / (x - x)).isinf().sum(),
        lambda x: x.max(0).values,
        lambda x: x.argmax(0),
        lambda x: torch.zeros_like(x).argmax(0),
        lambda x: x.argmin(),
        lambda x: x * x.sum(),
    ],
    "orders": [
        lambda x: x.softmax(0),
        lambda x: x.cumsum(0),
        lambda x: x.cumprod(0),
        lambda x: x.flip(0).cumsum(0).flip(0),
        lambda x: x.flip(0),
        lambda x: x.roll(2, 0),
        lambda x: x.roll(1),
        lambda x: x.sort(0).values,
        lambda x: x.sort(0, descending=True).values,
        lambda x: x.topk(2, 0).values,
        lambda x: x.topk(2, 0, largest=False).indices,
        lambda x: x.kthvalue(2, 0).values,
        lambda x: x.median(0).values,
        lambda x: x.rot90(),
        lambda x: torch.trapezoid(x, dim=0),
    ],
    "places": [
        lambda x: x[-1],
        lambda x: x[-2:],
        lambda x: x[1:] - x[:-1],
        lambda x: x[numbers(x, 0, -1, 1).long()],
        lambda x: x.index_select(0, torch.arange(x.shape[0], device=x.device).flip(0)),
        lambda x: x.take_along_dim(x.argsort(0), 0),
        lambda x: torch.zeros(5, 4, device=x.device).index_add(0, marks(x), x),
        lambda x: torch.zeros(5, 4, device=x.device).scatter_add(0, wide(x), x),
        lambda x: torch.zeros(5, 4, device=x.device).scatter_reduce(0, wide(x), x, "amax"),
        lambda x: x.index_put((torch.tensor([0], device=x.device),), torch.zeros(4, device=x.device)),
        lambda x: x.masked_scatter(x > 0, x),
        lambda x: F.one_hot(marks(x), 5),
        lambda x: F.embedding(marks(x), torch.arange(20.0, device=x.device).view(5, 4)),
        lambda x: F.embedding_bag(marks(x)[None], torch.arange(20.0, device=x.device).view(5, 4), mode="mean"),
        lambda x: torch.cat([x, x, x[:1]]),
        lambda x: torch.stack([x, x]).sum(1),
        lambda x: x.repeat(2, 1),
        lambda x: torch.tile(x, (3, 1)).cumsum(0),
        lambda x: x.repeat_interleave(2, 0),
        lambda x: F.pad(x, (0, 0, 2, 2), value=3.0),
        lambda x: F.pad(x.t()[None], (2, 1), mode="circular"),
        lambda x: x.flatten().cumsum(0),
        lambda x: x.reshape(-1, 2).sum(0),
        lambda x: (x[:, None] - x[None]).pow(2).sum(-1).amax(1),
    ],
    "products": [
        lambda x: x.t() @ x,
        lambda x: x @ x.t(),
        lambda x: torch.einsum("nc,nd->cd", x, x),
        lambda x: torch.outer(x[:, 0], x[:, 1]),
        lambda x: (x @ x.t()).triu(1),
        lambda x: (x @ x.t()).tril(),
        lambda x: (x @ x.t()).trace(),
        lambda x: (x @ x.t()).diagonal(),
        lambda x: x[:, 0].diag(),
        lambda x: torch.eye(x.shape[0], device=x.device) @ x,
        lambda x: F.cosine_similarity(x, x.flip(0)),
        lambda x: x.t().cov(),
        lambda x: torch.linalg.solve(x.t() @ x + torch.eye(4, device=x.device), torch.ones(4, device=x.device)),
        lambda x: torch.linalg.det(x[:, :, None] * x[:, None] + torch.eye(4, device=x.device)),
        lambda x: torch.fft.rfft(x, dim=1).abs(),
        lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], is_causal=True),
    ],
    "losses and norms": [
        lambda x: F.cross_entropy(x, marks(x, 4)),
        lambda x: F.cross_entropy(x, marks(x, 4), label_smoothing=0.1, ignore_index=2),
        lambda x: F.cross_entropy(x, marks(x, 4), weight=torch.arange(1.0, 5.0, device=x.device)),
        lambda x: F.nll_loss(x.log_softmax(1), marks(x, 4), reduction="sum"),
        lambda x: F.mse_loss(x, x * 2),
        lambda x: F.binary_cross_entropy_with_logits(x, (x > 0).float()),
        lambda x: F.kl_div(x.log_softmax(1), x.softmax(1), reduction="batchmean"),
        lambda x: F.triplet_margin_loss(x, x.flip(0), x * 2),
        lambda x: F.batch_norm(x, None, None, training=True),
        lambda x: F.batch_norm(x.t()[None], None, None, training=True),
        lambda x: F.group_norm(x[:, :, None], 1),
        lambda x: F.instance_norm(x.t()[None]),
        lambda x: F.normalize(x, dim=0),
        lambda x: F.layer_norm(x.t(), (x.shape[0],)),
    ],
    "windows": [
        lambda x: F.conv1d(x[:, None], torch.ones(2, 1, 3, device=x.device), padding=1),
        lambda x: F.conv1d(x.t()[None], torch.ones(2, 4, 3, device=x.device), padding=1),
        lambda x: F.conv_transpose1d(x.t()[None], torch.ones(4, 2, 3, device=x.device), stride=2),
        lambda x: F.avg_pool1d(x[:, None], 2),
        lambda x: F.avg_pool1d(x.t()[None], 2, 1),
        lambda x: F.adaptive_avg_pool1d(x.t()[None], 1),
        lambda x: F.interpolate(x[:, None], 8, mode="linear"),
        lambda x: F.interpolate(x.t()[None], scale_factor=2.0, mode="nearest"),
    ],
    "steps": [
        lambda x: F.conv1d(x.t()[None], torch.ones(2, 4, 3, device=x.device), stride=2, padding=1),
        lambda x: F.conv1d(x.t()[None], torch.ones(2, 4, 2, device=x.device), stride=3),
        lambda x: means_of_steps(x),
        lambda x: F.conv2d(x.view(1, 1, -1, 4), torch.ones(2, 1, 3, 3, device=x.device), stride=2, padding=1).flatten(2).softmax(-1),
        lambda x: F.conv1d(x.t()[None], torch.ones(4, 1, 3, device=x.device), stride=2, padding=1, groups=4),
        lambda x: F.max_pool1d(x.t()[None], 2),
        lambda x: F.max_pool1d(x.t()[None], 3, 2, 1, return_indices=True)[1],
        lambda x: F.max_pool2d(x.view(1, 1, -1, 4), 3, 2, 1, ceil_mode=True),
        lambda x: F.max_pool1d((x - x).log().t()[None], 3, 2, 1),
        lambda x: F.avg_pool1d(x.t()[None], 3, 2, 1, ceil_mode=True),
        lambda x: F.avg_pool1d(x.t()[None], 3, 2, 1, count_include_pad=False),
        lambda x: F.adaptive_avg_pool1d(x.t()[None], 3),
        lambda x: x[::2] - x[1::2].sum(0),
        lambda x: x[1::3].cumsum(0),
        lambda x: x.clone().index_fill_(0, torch.arange(0, x.shape[0], 2, device=x.device), 0),
        lambda x: x.logcumsumexp(0),
        lambda x: x.cummax(0).values,
        lambda x: x.cummin(0).indices,
    ],
    "resized": [
        lambda x: F.interpolate(x.t()[None], scale_factor=0.5),
        lambda x: F.interpolate(x.t()[None], size=9, mode="nearest"),
        lambda x: F.interpolate(x.t()[None], size=9, mode="linear"),
        lambda x: F.interpolate(x.t()[None, None], scale_factor=2.0, mode="bicubic", align_corners=True),
    ],
    "numbers": [
        lambda x: x / x.shape[0] ** 0.5,
        lambda x: x * math.log(x.shape[0]),
        lambda x: x / x.numel(),
        lambda x: x * (x.shape[0] ** 2),
        lambda x: x * torch.arange(x.shape[0], device=x.device)[:, None],
        lambda x: torch.full((x.shape[0], 2), x.shape[0] / 2, device=x.device),
    ],
}


# how many of a group share a program; all of it elsewhere. More of these, and a small constant of one is a traced size of another:
# programs for single sizes, or more traces
TOGETHER = {"places": 6, "products": 4, "steps": 1, "resized": 1}
PROGRAMS = [
    pytest.param(operations[i : i + count], 12 if group in TOGETHER else 8, id=f"{group}-{i}")
    for group, operations in IN_ONE_PROGRAM.items()
    for count in [TOGETHER.get(group, len(operations))]
    for i in range(0, len(operations), count)
]


def with_gradient(operation: Callable[[T], Any]) -> Callable[[T], list[T]]:
    """[the result, the gradient of a sum of it] of an operation."""

    def run(x: T) -> list[T]:
        x = x.detach().requires_grad_()
        y = operation(x)
        if not y.requires_grad:
            return [y]
        weights = torch.arange(1.0, y.numel() + 1, device=y.device).cos().view(y.shape)
        (grad,) = torch.autograd.grad((y * weights).sum(), x)
        return [y.detach(), grad]

    return run


def require_equal(got: list[T], want: list[T], where: str) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=LOOSE[0], atol=LOOSE[1], equal_nan=True, msg=lambda m, where=where: f"{where}: {m}")


def compared(together: list[Callable[[T], Any]], sizes: Sequence[int]) -> spmd.Step[Any, Any]:
    """A step of these operations, after calls whose results were those of each size."""
    operations = [with_gradient(operation) for operation in together]
    step = spmd.compile(lambda x: [run(x) for run in operations], dynamic={"x": {0: spmd.Dim("n", max=32, buckets=(32,))}})
    for size in sizes:
        x = batch(size, 4, seed=size)
        for number, (got, run) in enumerate(zip(step(x.to("jax")), operations, strict=True)):
            require_equal(got, run(x), f"operation {number} at size {size}")
    return step


@pytest.mark.parametrize(("together", "most_traces"), PROGRAMS)
def test_values_and_gradients_of_one_program_are_those_of_each_size(together: list[Callable[[T], Any]], most_traces: int) -> None:
    step = compared(together, SIZES)
    assert step.num_executables == 1
    assert step.num_traces in range(4, most_traces + 1, 2)  # more points, or another range of sizes, may have to be tried


def test_where_a_constant_of_one_operation_is_a_traced_size_of_another_more_programs_give_the_same() -> None:
    assert compared(IN_ONE_PROGRAM["steps"][3:6], SIZES[:3]).num_executables > 1


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: x[:6].sum(0),  # fewer than six rows are all of them
        lambda x: x * (x.shape[0] % 3),
        lambda x: x * 2 if x.shape[0] > 10 else x + 1,
        lambda x: x * 2 if x.shape[0] == 7 else x + 1,
        lambda x: x * max(x.shape[0], 6),
        lambda x: x[: min(x.shape[0], 6)].sum(0),
        lambda x: F.adaptive_avg_pool1d(x.t()[None], 2),
        lambda x: torch.cdist(x, x * 2 + 1).amax(1),
        lambda x: x.unfold(0, 2, 1).sum(-1),
        lambda x: written(x),
        lambda x: x[: x.shape[0] // 2 * 2].view(-1, 2, 4).sum(1),
    ],
)
def test_what_does_something_else_for_another_size_is_exact_by_more_programs(operation: Callable[[T], T]) -> None:
    run = with_gradient(operation)
    step = spmd.compile(run, dynamic={"x": {0: spmd.Dim("n", max=32, buckets=(32,))}})
    for size in (7, 20, 5):
        x = batch(size, 4)
        require_equal(step(x.to("jax")), run(x), f"size {size}")


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: torch.linalg.inv(x @ x.t() + torch.eye(x.shape[0], device=x.device)),
        lambda x: torch.linalg.svdvals(x),
        lambda x: torch.fft.rfft(x, dim=0).abs(),
    ],
)
def test_what_is_not_proved_is_refused(operation: Callable[[T], T]) -> None:
    step = spmd.compile(operation, dynamic={"x": {0: spmd.Dim("n", max=512)}})
    with pytest.raises(spmd.TraceError, match="could not be proved to give the same results with padded dims"):
        step(batch(7, 4).to("jax"))


@pytest.mark.parametrize("size", [7, 20])
def test_random_numbers_are_those_of_the_size(size: int) -> None:
    def draw(x: T) -> list[T]:
        return [F.dropout(x, 0.5), torch.rand_like(x), torch.randn(x.shape[0] * 4, device=x.device), F.dropout(x.t(), 0.5)]

    step, x = spmd.compile(draw, dynamic={"x": {0: spmd.Dim("n", max=32)}}), batch(size, 4).to("jax")
    torch.manual_seed(3)
    found = step(x)
    torch.manual_seed(3)
    for a, b in zip(found, draw(x), strict=True):
        assert torch.equal(a.cpu(), b.cpu())
