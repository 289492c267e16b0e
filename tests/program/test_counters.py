"""Counters in buffers and tensors among the arguments that Python reads as numbers: two traces, one more for each branch."""

import copy
import functools
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mesh
import spmd
from tests.oracle import assert_same, assert_same_model, batch, descend, twins


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("n", torch.zeros((), dtype=torch.int64))
        self.register_buffer("pair", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("scale", torch.zeros(1))
        self.register_buffer("queue", torch.zeros(8))
        self.weight = nn.Parameter(torch.ones(3))
        self.last: Any = None


def queue(m: Any, x: torch.Tensor) -> Any:
    """As MoCo keeps its negatives."""
    at = int(m.n)
    m.queue[at : at + 2] = x[:2]
    at = (at + 2) % 8
    m.n.fill_(at)
    return m.queue.clone()


def queue_with_an_item_pointer(m: Any, x: torch.Tensor) -> Any:
    at = int(m.pair[0])
    m.queue[at % 8] += x[0]
    m.pair[0] = at + 3
    return m.queue.clone()


def warm_average(m: Any, x: torch.Tensor) -> Any:
    """As averages of parameters are warmed up."""
    decay = min(0.9, (1 + m.n.item()) / (10 + m.n.item()))
    m.n.add_(1)
    m.queue[:3].mul_(decay).add_(x * (1 - decay))
    return m.queue.clone()


def cosine(m: Any, x: torch.Tensor) -> Any:
    m.n += 1
    return x * (0.5 * (1 + math.cos(math.pi * int(m.n) / 10)))


def running_mean(m: Any, x: torch.Tensor) -> Any:
    m.n += 1
    with torch.no_grad():
        m.weight.lerp_(x, 1 / int(m.n))
    return m.weight.detach().clone()


def named(m: Any, x: torch.Tensor) -> Any:
    m.n += 1
    m.last = f"{int(m.n):05d}.pt"
    return x, f"step {m.n.item()}"


def returned(m: Any, x: torch.Tensor) -> Any:
    m.n += 1
    m.last = int(m.n) * 2
    return int(m.n), m.n.item(), float(m.n), m.n.tolist()


def positions(m: Any, x: torch.Tensor) -> Any:
    at = int(m.n)
    m.n += 2
    return torch.arange(at, at + 3, device=x.device), torch.roll(x, at), torch.full((2,), at, device=x.device)


def whole_float(m: Any, x: torch.Tensor) -> Any:
    m.scale += 0.5
    return x * float(m.scale), round(float(m.scale)), divmod(float(m.scale), 2)


def listed(m: Any, x: torch.Tensor) -> Any:
    m.pair += 1
    first, second = m.pair.tolist()
    return x * second, first + second


def written_and_read_again(m: Any, x: torch.Tensor) -> Any:
    m.pair[0] = int(m.n) * 2
    m.n += 1
    return x * int(m.pair[0])


def beyond_int32(m: Any, x: torch.Tensor) -> Any:
    m.n.mul_(1000).add_(7)
    return int(m.n), x * (int(m.n) % 5)


COUNTERS: tuple[Callable[[Any, torch.Tensor], Any], ...] = (
    *(queue, queue_with_an_item_pointer, warm_average, cosine, running_mean, named, returned, positions, whole_float, listed),
    *(written_and_read_again, beyond_int32),
)


def assert_alike(got: Any, want: Any) -> None:
    if isinstance(want, torch.Tensor):
        assert_same(got, want)
    elif isinstance(want, (tuple, list)):
        for one, other in zip(got, want, strict=True):
            assert_alike(one, other)
    else:
        assert got == want and type(got) is type(want)


def assert_same_state(device: Counting, host: Counting) -> None:
    for name, value in host.state_dict().items():
        assert_same(device.state_dict()[name], value)
    assert_alike(device.last, host.last)


@pytest.mark.parametrize("fn", COUNTERS, ids=lambda fn: fn.__name__)
def test_a_counter_that_python_reads_is_a_number_that_varies(fn: Callable[[Any, torch.Tensor], Any]) -> None:
    host = Counting()
    device = copy.deepcopy(host).to("jax")
    step = spmd.compile(lambda x: fn(device, x))
    for i in range(6):
        if i == 4:  # eager code resets it
            for m in (host, device):
                m.n.zero_()
        x = batch(3, seed=i)
        assert_alike(step(x.to("jax")), fn(host, x))
        assert_same_state(device, host)
    assert step.num_traces == 2


def branch(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.n += 1
    return x * int(m.n) if int(m.n) % 3 == 0 else x + int(m.n)


def size(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.n.fill_((m.n + 1) % 3)
    return x[: int(m.n) + 1].sum()


@pytest.mark.parametrize("fn", [branch, size], ids=lambda fn: fn.__name__)
def test_a_branch_or_a_size_that_a_counter_decides_selects_among_programs(fn: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
    host = Counting()
    device = copy.deepcopy(host).to("jax")
    step = spmd.compile(lambda x: fn(device, x))
    for i in range(9):
        assert_same(step(batch(3, seed=i).to("jax")), fn(host, batch(3, seed=i)))
    assert step.num_traces == 3


@pytest.mark.parametrize("is_on_device", [False, True], ids=["CPU", "device"])
@pytest.mark.parametrize(
    "fn",
    [
        lambda x, n: x * int(n[0]),
        lambda x, n: (x.roll(n[1].item()), float(n[0])),
        lambda x, n: x * (1 - 0.5 ** int(n[0])),
        lambda x, n: x * sum(n.tolist()),
        lambda x, n: [int(part) for part in n],
    ],
    ids=["factor", "roll", "power", "list", "iterated"],
)
def test_integers_of_a_tensor_argument_are_numbers_that_vary(fn: Callable[..., Any], is_on_device: bool) -> None:
    step, x = spmd.compile(fn), batch(3)
    for i in range(5):
        n = torch.tensor([i, i + 1])
        assert_alike(step(x.to("jax"), n.to("jax") if is_on_device else n), fn(x, n))
    assert step.num_traces == 2


def test_a_counter_among_the_arguments_goes_on_from_call_to_call() -> None:
    def fn(x: torch.Tensor, state: dict[str, torch.Tensor]) -> torch.Tensor:
        at = int(state["at"])
        state["queue"][at : at + 2] = x[:2]
        state["at"].fill_((at + 2) % 6)
        return state["queue"] * 1

    step = spmd.compile(fn)
    host = {"at": torch.tensor(0), "queue": torch.zeros(6)}
    device = {name: value.to("jax") for name, value in host.items()}
    for i in range(6):
        assert_same(step(batch(3, seed=i).to("jax"), device), fn(batch(3, seed=i), host))
        assert_same(device["at"], host["at"])
    assert step.num_traces == 2


EAGER: dict[str, Callable[[Any], Any]] = {
    "zero": lambda m: m.pair.zero_(),
    "item": lambda m: m.pair.__setitem__(0, 5),
    "slice": lambda m: m.pair.__setitem__(slice(None), 4),
    "arithmetic": lambda m: m.pair.add_(3).remainder_(5),
    "operators": lambda m: m.pair.__isub__(1).__ifloordiv__(2),
    "copy": lambda m: m.pair.copy_(torch.tensor([1, 2])),
    "broadcast": lambda m: m.pair.copy_(torch.tensor(2)),
    "view": lambda m: m.pair.view(1, 2)[:, 1].fill_(3),
    "data": lambda m: m.pair.data.fill_(2),
    "from the device": lambda m: m.pair.add_(torch.tensor(2, device=m.pair.device)),
    "mask": lambda m: m.pair.masked_fill_(torch.tensor([True, False], device=m.pair.device), 3),
    "state_dict": lambda m: m.load_state_dict({**m.state_dict(), "pair": torch.tensor([3, 1])}),
    "float": lambda m: m.scale.fill_(2.5),
}


@pytest.mark.parametrize("name", EAGER)
def test_eager_code_may_write_a_counter_between_the_calls(name: str) -> None:
    def fn(m: Any, x: torch.Tensor) -> Any:
        at = int(m.pair[0])
        m.queue[at % 6 : at % 6 + 2] = x[:2]
        m.pair += 1
        return m.queue.clone(), x * int(m.pair[1]), float(m.scale)

    host = Counting()
    device = copy.deepcopy(host).to("jax")
    step = spmd.compile(lambda x: fn(device, x))
    for i in range(5):
        x = batch(3, seed=i)
        assert_alike(step(x.to("jax")), fn(host, x))
        EAGER[name](host)
        EAGER[name](device)
        assert_same_state(device, host)
    assert step.num_traces <= 3


def test_a_counter_that_eager_code_computes_on_the_device_is_refused() -> None:
    device = Counting().to("jax")
    step = spmd.compile(lambda x: queue(device, x))
    for _ in range(3):
        step(batch(3).to("jax"))
    device.n.add_((batch(3).to("jax") < 100).sum())
    with pytest.raises(spmd.TraceError, match="needed as a Python number") as caught:
        step(batch(3).to("jax"))
    assert "a state tensor (int64[]), whose values the program depends on, was computed on the device" in caught.value.__notes__[0]
    device.n.fill_(2)
    step(batch(3).to("jax"))
    assert int(device.n) == 4


def test_a_library_that_needs_an_int_gets_the_counters_value() -> None:
    """Only numbers of counters are constants then: others go on to vary."""

    def fn(m: Any, x: torch.Tensor, by: float) -> torch.Tensor:
        m.n += 1
        text = json.dumps([int(m.n)])
        return x * by + len(text)

    host = Counting()
    device = copy.deepcopy(host).to("jax")
    step = spmd.compile(lambda x, by: fn(device, x, by))
    for i in range(4):
        assert_same(step(batch(3).to("jax"), i * 0.5), fn(host, batch(3), i * 0.5))


class Contrast(nn.Module):
    """As MoCo: a queue of keys, and a momentum with a warm-up that counts in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(6, 4), nn.Linear(6, 4)
        self.register_buffer("negatives", F.normalize(torch.randn(4, 16), dim=0))
        self.register_buffer("ptr", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("n", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n += 1
        momentum = 1 - (1 - 0.9) * int(self.n) / 20
        with torch.no_grad():
            for q, k in zip(self.query.parameters(), self.key.parameters(), strict=True):
                k.mul_(momentum).add_(q, alpha=1 - momentum)
            keys = F.normalize(self.key(x + 0.1), dim=1)
        queries = F.normalize(self.query(x), dim=1)
        logits = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ self.negatives.clone()], 1)
        at = int(self.ptr)
        self.negatives[:, at : at + len(x)] = keys.T
        self.ptr[0] = (at + len(x)) % 16
        return logits


@pytest.mark.multidevice(num=8)
@pytest.mark.parametrize("options", [{}, {"check": True}, {"keep_grads": True}], ids=["plain", "check", "keep_grads"])
def test_a_queue_of_negatives_over_a_mesh_is_the_cpus(options: dict[str, Any]) -> None:
    over = mesh.Mesh(range(8), (4, 2), ("data", "model"))
    host, device = twins(Contrast)
    spmd.mark_sharding(device.query.weight, over, ("model", None))
    spmd.mark_sharding(device.negatives, over, (None, "model"))
    optimizers = [torch.optim.SGD(model.query.parameters(), lr=0.1) for model in (host, device)]
    step = spmd.compile(functools.partial(descend, device, optimizers[1]), **options)
    for i in range(6):
        x = batch(8, 6, seed=i)
        assert_same(step(spmd.mark_sharding(x.to("jax"), over, ("data", None))), descend(host, optimizers[0], x))
        assert_same_model(device, host)
    assert step.num_traces == 2
