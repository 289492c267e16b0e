"""Copies to the host in a compiled function (`loss.detach().cpu()`): CPU tensors that every call makes where they leave the function.

The oracle is the same function called eagerly on the device, whose copies have memory of their own; and CPU torch, for values.
"""

import collections
import copy
import io
import operator
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import mesh
import spmd
from tests.launched import launch
from tests.oracle import batch

Fn = Callable[[Any, torch.Tensor, torch.Tensor], Any]
WEIGHTS = torch.tensor([0.5, 1.0, 2.0])
HOST = torch.nn.Parameter(torch.ones(3))


class Named(torch.Tensor):
    pass


def state(device: str) -> types.SimpleNamespace:
    w = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0]).to(device))
    return types.SimpleNamespace(log=[], hits=0, by_name={}, inner=types.SimpleNamespace(), w=w, device=device)


def stored(s: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    s.out = x.cpu()
    s.row = s.out[0]
    s.inner.by_name = {"a": [x.sum().cpu()], "b": (s.out,)}
    s.by_name["x"] = s.by_name["again"] = x.cpu()


def changed_in_place(s: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    z = x * 2
    c = z.cpu()
    view = c[1]
    c.add_(1)
    c[0] = 5
    c[:, 1].mul_(2)
    view += 3
    z.sub_(1)
    return c, z.cpu(), view


def turned_in_place(s: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    c = x.cpu()
    c.t_()
    return c, c + 1, x.cpu().unsqueeze_(0), x.cpu().unsqueeze(0).squeeze_()


def collected(s: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    parts: list[torch.Tensor] = []
    by_name: Any = collections.defaultdict(list)
    for i in range(3):
        parts.append((x * i).detach().cpu())
        by_name["x"].append(x.sum().cpu() * i)
    return torch.cat(parts), torch.stack(parts, 1), sum(parts), {k: torch.stack(v).mean() for k, v in by_name.items()}


def backward(s: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    loss = (s.w * x).sum(1).cpu().pow(2).sum()
    loss.backward()
    grad, s.w.grad = s.w.grad.clone(), None
    return loss.detach(), grad.cpu()


def leaf_of_the_host(s: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    c = x.cpu().requires_grad_()
    (c * c).sum().backward()
    return c, c.grad, c.detach()


def through_a_hook(s: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    c = (s.w * x).cpu()
    c.register_hook(lambda grad: grad * 2)
    return torch.autograd.grad(c.exp().sum(), [s.w])[0].cpu()


def strides(s: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    c = x.cpu()
    of_device = x.t().cpu(), x[:, 0].cpu(), x[:, ::2].cpu(), x.t().cpu().to(torch.float64), x.expand(2, 4, 3).cpu()
    return *of_device, c[:, 0], c.t() * 2, c.t().exp(), c.t() + 1, torch.cat([c.t()]), c.t().sum(0), c.expand(2, 4, 3), c.t().contiguous()


def asked(s: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    c = x.cpu()
    kinds = type(c) is torch.Tensor, isinstance(c, torch.Tensor), c.__class__ is torch.Tensor, isinstance(c, torch.FloatTensor), c.type()
    places = str(c.device), c.is_cpu, str(c.layout), c.is_pinned(), c.is_contiguous(), c.is_leaf, c.requires_grad
    return kinds, places, c.dtype, c.shape, len(c), c.element_size(), c.to("meta").shape, c is c.cpu()


def of_dtypes(s: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    c = torch.complex(x, x).cpu()
    wide = x.to("cpu", torch.float64), x.cpu().double() * 3, x.to(device="cpu", dtype=torch.int32)
    return *wide, x.bfloat16().cpu(), x.half().cpu(), (x > 0).cpu(), c, c.conj(), c.conj() * 2, c.real, c.imag


def with_cpu_tensors(s: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    c = x.cpu()
    made = torch.where(c > 0, c, torch.zeros(())), torch.maximum(c, torch.ones(4, 3)), c @ torch.ones(3, 2), c * torch.tensor(2.0)
    return (
        *made,
        c * WEIGHTS,
        F.cross_entropy(c, y, weight=WEIGHTS),
        c + y[:, None],
        y.view(-1) == c.argmax(1),
        torch.arange(10)[c.argmax(1)],
    )


def with_the_device(s: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    i = x.argmax(1).cpu()
    target = torch.zeros(4, 3, device=s.device)
    target.copy_(x.cpu())
    target[0] = x.cpu()[1]
    return x[i], x * x.mean().cpu(), x.cpu().to(s.device) + 1, target, (x + x.sum().cpu().double()).dtype


def new_ones(s: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    c = x.cpu()
    zeros = torch.zeros_like(c)
    zeros[1] = c[0]
    out = torch.empty_like(c)
    torch.add(c, 1, out=out)
    return zeros, out, c.new_zeros(2) + c.sum(), c.clone(), copy.deepcopy(c), torch._foreach_add([c, c], 1)  # pyright: ignore[reportPrivateUsage]


def statistics_of(s: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    c = x.cpu()
    return (
        c.min(),
        c.max(1),
        c.median(),
        c.quantile(0.5),
        c.std(),
        c.norm(),
        c.sort(1),
        c.topk(2),
        c.argsort(),
        c.isnan().any(),
        c.cumsum(0),
    )


def numbers(s: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    c = x.sum().cpu()
    s.log.append(c.item())
    s.log.append(float(x.mean().cpu()))
    s.log.append(x[0].cpu().tolist())
    s.hits += (x.argmax(1).cpu() == y).sum().item()
    return int(c * 100), max(c.item(), 1.0), x.cpu() * x.sum().item()


def arithmetic(s: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    c = x.sum().cpu()
    total = (c + 1, 2 * c, c / 3, -c, c**2, 1 / c, abs(c), c == c, c > 0, torch.round(c))
    c += 1
    c *= 2
    return *total, c


def arrays(s: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    c = x.cpu()
    n = c.numpy()
    s.log.append(x.sum().cpu().numpy())
    return (
        n,
        n.mean(),
        np.sqrt(np.abs(n)),
        n.argmax(1),
        n.shape,
        np.concatenate([n, x.cpu().numpy()]),
        np.asarray(c.sum()),
        float(np.mean(n)),
    )


def texts(s: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    c = x.detach().cpu()
    by_percent = "%s" % c  # noqa: UP031
    return str(c), f"{c} {c[0]!r} {x.sum().cpu():.2f}", by_percent, repr({"a": c}), f"{x.max().cpu().item():.3f}"


def modes(s: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    with torch.no_grad():
        one = (s.w * x).cpu() * 2
    with torch.inference_mode():
        two = ((s.w * x).cpu() + 1).clone()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        three = x.cpu() @ x.cpu().t()
    with torch.autocast("jax", dtype=torch.bfloat16):
        four = x.cpu() @ x.cpu().t()
    return one, two, three, four


def with_torch_func(s: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    mapped = torch.func.vmap(lambda row: row.cpu() * 2)(x), torch.func.vmap(lambda row: row.sum())(x.cpu())
    return *mapped, torch.func.grad(lambda v: (v * v).cpu().sum())(x).cpu()


def checkpointed(s: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    loss = torch.utils.checkpoint.checkpoint(lambda v: (s.w * v).cpu().exp(), x, use_reentrant=False).sum()
    return torch.autograd.grad(loss, [s.w])[0].cpu()


def with_an_attribute(s: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    c = x.cpu()
    c.tag = "a tag"  # pyright: ignore[reportAttributeAccessIssue]
    s.log.append(c)
    return c.tag  # pyright: ignore[reportAttributeAccessIssue]


def made_of_numbers(s: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    total, hits = x.sum().item(), (x.argmax(1) == 0).sum().item()
    made = torch.tensor([total, 1.0, hits])
    s.log.append(torch.tensor(hits))
    parts = torch.tensor([[hits], [3]]), torch.tensor(total > 0), torch.as_tensor(total, dtype=torch.float64), torch.tensor(x[0].tolist())
    return made, made * 2 + WEIGHTS, made.mean().item(), parts, torch.full((2, 3), total), torch.full(size=(2,), fill_value=hits)


WORKS: dict[str, Fn] = {
    "returned": lambda s, x, y: x.cpu(),
    "detached": lambda s, x, y: (s.w * x).detach().cpu(),
    "with_a_graph": lambda s, x, y: (s.w * x).cpu(),
    "data": lambda s, x, y: (s.w * x).cpu().data,
    "mean": lambda s, x, y: x.to("cpu").mean(),
    "argmax": lambda s, x, y: x.argmax(1).cpu(),
    "accuracy": lambda s, x, y: (x.argmax(1).cpu() == y).float().mean(),
    "appended": lambda s, x, y: s.log.append(x.sum().detach().cpu()),
    "replaced": lambda s, x, y: setattr(s, "hits", (x.argmax(1).cpu() == y).sum()),
    "without_waiting": lambda s, x, y: (x.to("cpu", non_blocking=True), x.to("cpu", copy=True), x.to(torch.zeros(1))),
    "one_twice": lambda s, x, y: (lambda c: (c, c, [c]))(x.cpu()),
    "views": lambda s, x, y: (lambda c: (c, c.view(-1), c.detach(), c[1:], c.T, c.unbind(0)))(x.cpu()),
    "two_copies": lambda s, x, y: (x.cpu(), x.cpu()),
    "in_containers": lambda s, x, y: ([x.cpu()], {"a": (x.sum().cpu(), {"b": 1})}),
    "a_leaf": lambda s, x, y: x.cpu().requires_grad_(),
    "iterated": lambda s, x, y: [row.sum() for row in x.cpu()],
    "indexed": lambda s, x, y: (x.cpu()[y], x.cpu()[0, 1], x.cpu()[:, [0, 2]], x.cpu()[x.argmax(1).cpu() % 4]),
    "modules": lambda s, x, y: (torch.nn.Softmax(-1)(x.cpu()), torch.nn.CrossEntropyLoss()(x.cpu(), y), F.layer_norm(x.cpu(), (3,))),
    "one_hot": lambda s, x, y: (F.one_hot(x.argmax(1).cpu(), 3), torch.bincount(x.argmax(1).cpu(), minlength=3)),
    "einsum": lambda s, x, y: (torch.einsum("ij,kj->ik", x.cpu(), x.cpu()), torch.linalg.norm(x.cpu()), F.pad(x.cpu(), (1, 1))),
    "labels_of_the_device": lambda s, x, y: (x.argmax(1).cpu() == y.to(s.device).cpu()).sum(),
    **{
        fn.__name__: fn
        for fn in (
            *(stored, changed_in_place, turned_in_place, collected, backward, leaf_of_the_host, through_a_hook, strides, asked, of_dtypes),
            *(with_cpu_tensors, with_the_device, new_ones, statistics_of, numbers, arithmetic, arrays, texts, modes, with_torch_func),
            *(checkpointed, with_an_attribute, made_of_numbers),
        )
    },
}
ONE_MORE_TRACE = ("numbers",)  # a count that changes becomes an input at the second trace


def require_same(got: Any, want: Any, is_eager: bool = True) -> None:
    """Both are the same tensors, arrays, numbers and containers. `is_eager`: also strides and flags of the tensors."""
    if isinstance(want, torch.Tensor):
        assert type(got) is type(want) and got.dtype == want.dtype and got.shape == want.shape
        torch.testing.assert_close(got.detach().cpu(), want.detach().cpu(), equal_nan=True)
        if is_eager:
            assert (got.device, got.stride(), got.is_conj()) == (want.device, want.stride(), want.is_conj())
            assert got.requires_grad == (want.requires_grad and want.is_leaf)  # a result has no graph after a call
            assert vars(got) == vars(want)
    elif isinstance(want, np.ndarray):
        assert type(got) is np.ndarray and got.dtype == want.dtype
        torch.testing.assert_close(torch.from_numpy(got), torch.from_numpy(want), equal_nan=True)
    elif isinstance(want, dict):
        assert type(got) is type(want) and list(got) == list(want)
        for key, value in want.items():
            require_same(got[key], value, is_eager)
    elif isinstance(want, types.SimpleNamespace):
        require_same(vars(got), vars(want), is_eager)
    elif isinstance(want, (list, tuple)):
        assert type(got) is type(want) and len(got) == len(want)
        for one, other in zip(got, want, strict=True):
            require_same(one, other, is_eager)
    else:
        assert type(got) is type(want)
        assert got == (pytest.approx(want, rel=1.3e-6, abs=1e-5) if isinstance(want, (float, np.floating)) else want)


def memory_of(value: Any) -> list[int]:
    """For each tensor of the host in `value` which of them has its memory first."""
    tensors = [t for t in torch.utils._pytree.tree_leaves(value) if isinstance(t, torch.Tensor) and t.is_cpu]  # pyright: ignore[reportPrivateUsage]
    first: dict[int, int] = {}
    return [first.setdefault(t.untyped_storage().data_ptr(), i) for i, t in enumerate(tensors)]


@pytest.mark.parametrize("name", list(WORKS))
def test_every_call_leaves_what_eager_code_leaves(name: str) -> None:
    fn = WORKS[name]
    ours, theirs = state("jax"), state("jax")
    step = spmd.compile(lambda x, y: fn(ours, x, y))
    kept: list[tuple[Any, Any]] = []
    for seed in range(4):
        x, y = batch(4, 3, seed=seed), torch.randint(0, 3, (4,), generator=torch.Generator().manual_seed(seed))
        kept.append((step(x.to("jax"), y), fn(theirs, x.to("jax"), y)))
        for got, want in kept:  # those of earlier calls are unchanged
            require_same(got, want)
            assert memory_of(got) == memory_of(want)
        require_same(vars(ours) | {"w": 0}, vars(theirs) | {"w": 0})
    assert step.num_traces == (2 if name in ONE_MORE_TRACE else 1)


# on the CPU `.cpu()` gives the tensor itself
IS_COPY = ("changed_in_place", "turned_in_place", "leaf_of_the_host", "asked", "strides", "modes")
ON_THE_CPU = [name for name in WORKS if name not in IS_COPY]


@pytest.mark.parametrize("name", ON_THE_CPU)
def test_values_are_those_of_the_cpu(name: str) -> None:
    fn = WORKS[name]
    ours, theirs = state("jax"), state("cpu")
    step = spmd.compile(lambda x, y: fn(ours, x, y))
    for seed in range(3):
        x, y = batch(4, 3, seed=seed), torch.randint(0, 3, (4,), generator=torch.Generator().manual_seed(seed))
        require_same(step(x.to("jax"), y), fn(theirs, x, y), is_eager=False)
        names = ("log", "hits", "by_name", "inner")
        require_same([getattr(ours, n) for n in names], [getattr(theirs, n) for n in names], is_eager=False)


def test_a_copy_is_a_new_tensor_in_every_call_and_can_be_written_to() -> None:
    step = spmd.compile(lambda x: (x.cpu(), x))
    x = batch(3).to("jax")
    first, second = step(x)[0], step(x)[0]
    first.zero_()
    assert torch.equal(second, batch(3)) and torch.equal(x.cpu(), batch(3))
    view, whole = spmd.compile(lambda x: (lambda c: (c[0], c))(x.cpu()))(batch(2, 2).to("jax"))
    view.zero_()
    assert whole[0].tolist() == [0.0, 0.0]


def test_a_numpy_array_has_the_memory_of_its_tensor() -> None:
    c, n = spmd.compile(lambda x: (lambda c: (c, c.numpy()))(x.cpu()))(batch(3).to("jax"))
    n[0] = 7.0
    assert c[0] == 7.0


def test_a_running_total_is_right_in_every_call() -> None:
    s = types.SimpleNamespace(total=torch.zeros(()), best=torch.full((), -1e9))

    def track(x: torch.Tensor) -> None:
        s.total = s.total + x.sum().cpu()
        s.best = torch.maximum(s.best, x.max().cpu())

    step, seen = spmd.compile(track), [batch(3, seed=i) for i in range(4)]
    for i, x in enumerate(seen):
        step(x.to("jax"))
        torch.testing.assert_close(s.total, torch.stack(seen[: i + 1]).sum())
        torch.testing.assert_close(s.best, torch.stack(seen[: i + 1]).max())


def test_copies_of_earlier_calls_stay_where_they_are() -> None:
    last: collections.deque[torch.Tensor] = collections.deque(maxlen=2)
    rows: list[torch.Tensor] = []

    def collect(x: torch.Tensor) -> Any:
        last.append(x.sum().cpu())
        rows.extend(x.cpu())
        return list(last), rows[0], WEIGHTS

    step, seen = spmd.compile(collect), [batch(2, 3, seed=i) for i in range(4)]
    for i, x in enumerate(seen):
        got, first, weights = step(x.to("jax"))
        require_same(list(last), [each.sum() for each in seen[max(0, i - 1) : i + 1]], is_eager=False)
        require_same(rows, list(torch.cat(seen[: i + 1])), is_eager=False)
        assert all(map(operator.is_, got, last)) and first is rows[0] and weights is WEIGHTS


def test_print_and_loggers_write_the_tensor_of_each_call(capsys: pytest.CaptureFixture[str]) -> None:
    step = spmd.compile(lambda x: print("max", x.max().cpu(), [x.cpu()]))
    for seed in range(3):
        x = batch(2, seed=seed)
        step(x.to("jax"))
        assert capsys.readouterr().out == f"max {x.max()!s} {[x]}\n"


def test_a_sharded_tensor_is_copied_whole() -> None:
    grid = mesh.Mesh(range(8), (8,), ("data",))
    step = spmd.compile(lambda x: ((x * 2).cpu(), x.sum(0).cpu(), x.argmax(1).cpu().float().mean(), [x.cpu()[3]]))
    for seed in range(3):
        x = batch(16, 3, seed=seed)
        got = step(spmd.mark_sharding(x.to("jax"), grid, ("data", None)))
        require_same(got, (x * 2, x.sum(0), x.argmax(1).float().mean(), [x[3]]), is_eager=False)
    assert step.num_traces == 1


def test_an_uneven_dim_is_copied_without_its_padding() -> None:
    grid = mesh.Mesh(range(8), (8,), ("data",))
    x = batch(10, 3)
    got = spmd.compile(lambda x: (x.cpu(), (x * 2).cpu()[9]))(spmd.mark_sharding(x.to("jax"), grid, ("data", None)))
    require_same(got, (x, x[9] * 2), is_eager=False)


IN_A_JOB = """
import torch
import mesh, spmd

mesh.init()
grid = mesh.Mesh(range(4), (4,), ("data",))
step = spmd.compile(lambda x: (x.sum(0).cpu(), (x * 2).cpu(), [x.cpu()[:, 0]], x.sum().cpu().item()))
for i in range(2):
    x = torch.arange(24.0).reshape(8, 3) + i
    total, double, first, number = step(spmd.mark_sharding(x.to("jax"), grid, ("data", None)))
    assert torch.equal(total, x.sum(0)) and torch.equal(double, x * 2) and torch.equal(first[0], x[:, 0]) and number == x.sum().item()
print("right", step.num_traces)
"""


def test_each_process_of_a_job_has_the_whole_copy(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(IN_A_JOB, encoding="utf-8")
    done = launch("-n", 2, "--devices-per-process", 2, program=program)
    assert done.code == 0, done.err
    assert done.out.count("right 1") == 2


def test_several_steps_in_one_call_give_a_stack_of_copies() -> None:
    step = spmd.compile(lambda x: (x.sum().cpu(), x.cpu().t() * 2), steps_per_call=2)
    for seed in range(3):
        x = batch(2, 4, 3, seed=seed)
        require_same(step(x.to("jax")), (x.sum((1, 2)), x.transpose(1, 2) * 2), is_eager=False)


def test_sizes_that_vary() -> None:
    step = spmd.compile(lambda x: (x.cpu(), x.cpu()[:, 0], x.cpu().t(), x.sum(0).cpu(), [x.cpu().numpy()]), dynamic=True)
    for n in range(5, 12):
        x = batch(n, 3, seed=n)
        got = step(x.to("jax"))
        require_same(got, (x, x[:, 0], x.t(), x.sum(0), [x.numpy()]), is_eager=False)
        assert [t.stride() for t in got[:4]] == [(3, 1), (3,), (1, 3), (1,)]
    assert step.num_traces < 7


def test_a_check_of_each_call_finds_the_same_program() -> None:
    step = spmd.compile(lambda x: (x.sum().cpu(), x.cpu().t()), check=True)
    for seed in range(3):
        x = batch(4, 3, seed=seed)
        require_same(step(x.to("jax")), (x.sum(), x.t()), is_eager=False)


def test_integers_that_the_host_knows_are_values_where_python_needs_them() -> None:
    def cut(x: torch.Tensor, lengths: torch.Tensor) -> Any:
        packed = torch.nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return packed.data, x[: lengths.cpu().tolist()[0]], lengths.cpu().numpy().max(), lengths.cpu()

    step = spmd.compile(cut)
    for lengths in (torch.tensor([3, 2]), torch.tensor([1, 2]), torch.tensor([3, 2])):
        x = batch(2, 3)
        got = step(x.to("jax"), lengths.to("jax"))
        require_same((got[0].cpu(), got[1].cpu(), *got[2:]), cut(x, lengths), is_eager=False)
    assert step.num_traces == 2


REFUSED: dict[str, tuple[Fn, str]] = {
    "random_like": (lambda s, x, y: torch.rand_like(x.cpu()), "rand_like draws random numbers of the host.*fix: draw on the device"),
    "dropout": (lambda s, x, y: F.dropout(x.cpu()), "draws random numbers of the host.*fix: draw on the device"),
    "added_to_a_part": (lambda s, x, y: WEIGHTS[:2].add_(x.sum().cpu()), "writes to a view of a CPU tensor"),
    "copied_into_a_part": (lambda s, x, y: WEIGHTS[:2].copy_(x[0, :2]), "writes to a view of a CPU tensor"),
    "out": (lambda s, x, y: torch.add(x.cpu(), 1, out=torch.empty(4, 3)), "was written into a CPU tensor"),
    "saved": (lambda s, x, y: torch.save(x.cpu(), io.BytesIO()), "was pickled or saved.*fix: return it from the step"),
    "pinned": (lambda s, x, y: x.cpu().pin_memory(), r"was needed in memory, by pin_memory\(\)"),
    "address": (lambda s, x, y: x.cpu().data_ptr(), r"was needed in memory, by data_ptr\(\)"),
    "storage": (lambda s, x, y: x.cpu().untyped_storage(), r"was needed in memory, by untyped_storage\(\)"),
    "shared": (lambda s, x, y: x.cpu().share_memory_(), r"was needed in memory, by share_memory_\(\)"),
    "resized": (lambda s, x, y: x.cpu().resize_(2), "resize_ changes the memory of a copy to the host"),
    "data_set": (lambda s, x, y: setattr(x.cpu(), "data", torch.zeros(2)), "an assignment to .data changes a copy"),
    "parameter": (lambda s, x, y: torch.nn.Parameter(x.cpu()), "a parameter was made of a copy to the host"),
    "mask": (lambda s, x, y: (lambda c: c[c > 0])(x.cpu()), "the result shape of aten.index.Tensor depends on values"),
    "nonzero": (lambda s, x, y: (x > 0).cpu().nonzero(), "the result shape of aten.nonzero.default depends on values"),
    "made_a_gradient": (lambda s, x, y: setattr(HOST, "grad", x[0].cpu()), "was made the gradient of .* which is on the CPU"),
    "gradient_of_a_cpu_tensor": (lambda s, x, y: x.cpu() * torch.ones(3, requires_grad=True), "a CPU tensor that requires a gradient"),
    "array_written": (lambda s, x, y: x.cpu().numpy().__setitem__(0, 1), "was needed as a Python"),
    "array_item_written": (lambda s, x, y: (lambda n: exec("n[0] = 1", {"n": n}))(x.cpu().numpy()), "was needed as a Python container"),
    "written_after_numpy": (lambda s, x, y: (lambda c: (c.numpy(), c.add_(1)))(x.cpu()), "an operation in place changes a copy"),
    "text_of_a_graph": (
        lambda s, x, y: str((s.w * x).cpu()),
        r"a copy to the host of a traced tensor with a graph.*fix: x.detach\(\).cpu\(\)",
    ),
    "long_list": (lambda s, x, y: x.repeat(10, 3).cpu().tolist(), "needs a value that only the compiled program will have"),
    "operand_of_cond": (lambda s, x, y: torch.cond(x.sum() > 0, lambda c: c * 2, lambda c: c, (x.cpu(),)), "an operand of torch.cond"),
    "result_of_cond": (lambda s, x, y: torch.cond(x.sum() > 0, lambda v: v.cpu(), lambda v: v, (x,)), "a copy to the host needs a value"),
    "user_class": (lambda s, x, y: x.as_subclass(Named).cpu(), r"would have the class Named.*fix: x.as_subclass\(torch.Tensor\).cpu\(\)"),
    "sparse": (lambda s, x, y: x.cpu().to_sparse(), "to_sparse"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_is_not_exact_is_refused_by_name_and_changes_nothing(name: str) -> None:
    fn, text = REFUSED[name]
    s, before = state("jax"), WEIGHTS.clone()
    s.log.append(0)

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        s.w.data.add_(1)
        s.log.append(x.sum().cpu())
        return fn(s, x, y)

    with pytest.raises(spmd.SpmdError, match=f"(?s){text}"):
        spmd.compile(step)(batch(4, 3).to("jax"), torch.zeros(4, dtype=torch.int64))
    assert HOST.grad is None and s.log == [0] and s.w.tolist() == [1.0, 2.0, 3.0] and torch.equal(WEIGHTS, before)


ERRORS: dict[str, tuple[Fn, type[Exception], str]] = {
    "two_devices": (lambda s, x, y: x + x.cpu(), RuntimeError, "same device"),
    "index_of_the_device": (lambda s, x, y: x.cpu()[x.argmax(1)], RuntimeError, "same device"),
    "numpy_of_a_graph": (lambda s, x, y: (s.w * x).cpu().numpy(), RuntimeError, "Can't call numpy"),
    "numpy_of_bfloat16": (lambda s, x, y: x.bfloat16().cpu().numpy(), TypeError, "BFloat16"),
    "deepcopy_of_a_graph": (lambda s, x, y: copy.deepcopy((s.w * x).cpu()), RuntimeError, "deepcopy protocol"),
    "shapes": (lambda s, x, y: x.cpu() + torch.ones(2), RuntimeError, "size"),
}


@pytest.mark.parametrize("name", list(ERRORS))
def test_an_error_of_torch_is_torchs(name: str) -> None:
    fn, kind, text = ERRORS[name]
    s = state("jax")
    with pytest.raises(kind, match=text):
        spmd.compile(lambda x, y: fn(s, x, y))(batch(4, 3).to("jax"), torch.zeros(4, dtype=torch.int64))


OUTSIDE: dict[str, Callable[[torch.Tensor], Any]] = {
    "index": lambda x: x.cpu()[x.argmax(1).cpu() + 9],
    "embedding": lambda x: F.embedding(x.argmax(1).cpu() + 9, x.cpu()),
    "target": lambda x: F.cross_entropy(x.cpu(), x.argmax(1).cpu() + 9),
}


@pytest.mark.parametrize("name", list(OUTSIDE))
def test_an_index_out_of_bounds_raises_as_on_the_cpu(name: str) -> None:
    with pytest.raises(IndexError):
        spmd.compile(OUTSIDE[name])(batch(4, 3).to("jax"))


def test_a_training_loop_as_everybody_writes_it() -> None:
    def train(device: str) -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses: list[torch.Tensor] = []
        found: list[torch.Tensor] = []

        def step(x: torch.Tensor, y: torch.Tensor) -> float:
            optimizer.zero_grad()
            out = model(x.to(device))
            loss = F.cross_entropy(out, y.to(device))
            loss.backward()
            optimizer.step()
            losses.append(loss.detach().cpu())
            found.append(out.argmax(1).cpu())
            return (out.argmax(1).cpu() == y).float().mean().item()

        call = spmd.compile(step) if device == "jax" else step
        accuracies = []
        for seed in range(6):
            y = torch.randint(0, 3, (4,), generator=torch.Generator().manual_seed(seed))
            accuracies.append(call(batch(4, 3, seed=seed), y))
        assert device == "cpu" or call.num_traces == 1  # type: ignore[union-attr]
        return accuracies, (torch.stack(losses), torch.cat(found))

    require_same(train("jax"), train("cpu"), is_eager=False)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: (x * 2).numpy(force=True),
        lambda x: torch.Tensor.numpy(x * 2, force=True),
        lambda x: float((x * 2).numpy(force=True).mean()),
        lambda x: [part.numpy(**{"force": True}) for part in (x, x * 2)],
        lambda x: x.clone().requires_grad_().mul(3).numpy(force=True),
        lambda x: operator.methodcaller("numpy", force=True)(x + 1),
        lambda x: x.cpu().__array__(np.float64),
        lambda x: x.cpu().__array__(),
    ],
    ids=["method", "descriptor", "mean", "list", "graph", "methodcaller", "array of a dtype", "array"],
)
def test_numpy_by_force_and_arrays_have_the_values_of_each_call(fn: Callable[[torch.Tensor], Any]) -> None:
    """`numpy(force=True)` copies in C++, where a traced copy has no memory."""
    step = spmd.compile(fn)
    for i in range(3):
        x = torch.arange(3.0) + i
        got, want = step(x.to("jax")), fn(x)
        for one, other in zip(got if isinstance(got, list) else [got], want if isinstance(want, list) else [want], strict=True):
            np.testing.assert_array_equal(one, other)
            assert type(one) is type(other) and getattr(one, "dtype", None) == getattr(other, "dtype", None)
