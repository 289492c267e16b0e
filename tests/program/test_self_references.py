"""Objects that refer to themselves or to each other (parents and children, rings, lists in themselves), replaced by a step or between its
calls: what is read of them is that of each call, in few traces."""

import collections
import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import spmd
from tests.oracle import assert_same

Make = Callable[[str], Any]  # the device -> the object
Step = Callable[[Any, torch.Tensor], Any]
Between = Callable[[Any, int], None]


class Owner:
    def __init__(self) -> None:
        self.n: int = 0
        self.child: Any = SimpleNamespace(owner=self, m=0)


class Tree:
    def __init__(self, parent: Any = None, depth: int = 2) -> None:
        self.parent, self.n = parent, 0
        self.children = [Tree(self, depth - 1) for _ in range(2 if depth else 0)]


def ring(device: str) -> Any:
    nodes: list[Any] = [SimpleNamespace(n=i * 10) for i in range(3)]
    for i, node in enumerate(nodes):
        node.next, node.back = nodes[(i + 1) % 3], nodes[i - 1]
    return nodes[0]


def chain(device: str) -> Any:
    first: Any = None
    for i in range(20):
        first, second = SimpleNamespace(n=i, next=first, back=None), first
        if second is not None:
            second.back = first
    return first


def list_in_itself(device: str) -> Any:
    held: list[Any] = [None, 0, 0]
    held[0] = held
    return held


def dict_in_itself(device: str) -> Any:
    held: dict[str, Any] = {"n": 0}
    held["self"] = held
    return held


def in_a_deque(device: str) -> Any:
    one: Any = SimpleNamespace(n=0)
    one.queue = collections.deque([one], maxlen=3)
    return one.queue


def in_a_tuple(device: str) -> Any:
    one: Any = SimpleNamespace(n=0)
    two: Any = SimpleNamespace(n=0)
    one.all = two.all = (one, two)
    return one.all


def with_tensors(device: str) -> Any:
    owner: Any = Owner()
    owner.t, owner.child.t = torch.zeros(2, device=device), torch.ones(2, device=device)
    return owner


def peers(device: str) -> Any:
    one: Any = SimpleNamespace(n=0)
    one.peer = SimpleNamespace(n=0, peer=one)
    return SimpleNamespace(one=one, other=one.peer)


def shared(device: str) -> Any:
    part = SimpleNamespace(n=0)
    return SimpleNamespace(one=SimpleNamespace(part=part), other=SimpleNamespace(part=part))


def of_owner(s: Any, x: torch.Tensor) -> Any:
    s.o.n += 1
    s.o.child.owner.child.m += s.o.n
    return x * s.o.child.owner.n + s.o.child.m


def of_tree(s: Any, x: torch.Tensor) -> Any:
    leaf = s.o.children[0].children[1]
    leaf.n += 1
    leaf.parent.n += leaf.n
    leaf.parent.parent.n += leaf.parent.n
    return x * s.o.n + leaf.n


def of_ring(s: Any, x: torch.Tensor) -> Any:
    s.o = s.o.next
    s.o.n += 1
    return x * s.o.n + s.o.next.n + s.o.back.n


def of_list(s: Any, x: torch.Tensor) -> Any:
    s.o[1] += 1
    s.o[0][0][2] = s.o[1] * 2
    return x * s.o[1] + s.o[2]


def of_dict(s: Any, x: torch.Tensor) -> Any:
    s.o["self"]["n"] += 1
    return x * s.o["n"]


def of_deque(s: Any, x: torch.Tensor) -> Any:
    s.o[0].queue[0].n += 1
    return x * s.o[0].n


def of_tuple(s: Any, x: torch.Tensor) -> Any:
    s.o[0].all[1].n += 1
    return x * s.o[1].n + s.o[0].all[1].n


def of_chain(s: Any, x: torch.Tensor) -> Any:
    s.o.n += 1
    return x * s.o.next.back.n


def of_tensors(s: Any, x: torch.Tensor) -> Any:
    owner: Any = Owner()
    owner.n, owner.t, owner.child.t = s.o.n + 1, s.o.child.owner.t + x, s.o.child.t * 2
    s.o = owner
    return owner.t * owner.n


def of_peers(s: Any, x: torch.Tensor) -> Any:
    s.o.one.peer.n += 1
    s.o.other.peer.n += 2
    return x * s.o.one.n + s.o.other.n


def of_shared(s: Any, x: torch.Tensor) -> Any:
    return x * s.o.one.part.n + s.o.other.part.n


REPLACED: dict[str, tuple[Make, Step]] = {
    "a child with its owner": (lambda device: Owner(), of_owner),
    "a tree with parents": (lambda device: Tree(), of_tree),
    "a ring": (ring, of_ring),
    "a list in itself": (list_in_itself, of_list),
    "a dict in itself": (dict_in_itself, of_dict),
    "through a deque": (in_a_deque, of_deque),
    "through a tuple": (in_a_tuple, of_tuple),
    "a chain": (chain, of_chain),
    "tensors": (with_tensors, of_tensors),
    "peers": (peers, of_peers),
}


def ends(make: Make, step: Step, between: Between = lambda s, k: None) -> tuple[Any, Any, int]:
    """The results of six calls on the CPU and on the device, and the number of traces."""
    found: list[Any] = []
    num_traces = 0
    for device in ("cpu", "jax"):
        s = SimpleNamespace(o=make(device))
        fn: Any = lambda x, s=s: step(s, x)  # noqa: E731
        called: Any = spmd.compile(fn) if device == "jax" else fn
        results: list[Any] = []
        for k in range(6):
            between(s, k)
            results.append(called(torch.full((2,), k + 1.0, device=device)))
        found.append(results)
        num_traces = getattr(called, "num_traces", 0)
    return found[0], found[1], num_traces


@pytest.mark.parametrize("name", REPLACED)
def test_a_step_replaces_them_by_their_copies(name: str) -> None:
    make, write = REPLACED[name]

    def step(s: Any, x: torch.Tensor) -> Any:
        if not hasattr(s.o, "t"):
            s.o = copy.deepcopy(s.o)
        return write(s, x)

    expected, found, num_traces = ends(make, step)
    assert_same(found, expected)
    assert num_traces == 2


def another(s: Any, k: int) -> None:
    s.o = copy.deepcopy(s.o)
    s.o.n, s.o.child.m = k, k * 3
    if k == 3:
        s.o.child.owner = Owner()
        s.o.child.owner.child.m = 100


def another_part(s: Any, k: int) -> None:
    s.o = copy.deepcopy(s.o)
    s.o.one.part.n = k
    if k == 3:
        s.o.other.part = SimpleNamespace(n=100)


def is_its_own(s: Any, x: torch.Tensor) -> Any:
    return x * s.o.n if s.o.child.owner is s.o else x * 100


@pytest.mark.parametrize(
    "make, step, between, num_traces",
    [
        (lambda device: Owner(), lambda s, x: x * s.o.n + s.o.child.owner.child.m, another, 4),
        (lambda device: Owner(), is_its_own, another, 4),
        (lambda device: Owner(), of_owner, another, 4),
        (shared, of_shared, another_part, 3),
    ],
    ids=["read", "compared", "written", "shared"],
)
def test_they_are_others_between_calls(make: Make, step: Step, between: Between, num_traces: int) -> None:
    expected, found, num = ends(make, step, between)
    assert_same(found, expected)
    assert num <= num_traces
