"""Python state in branches and loop bodies: what they leave changed is refused by name, and nothing is changed."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

import spmd

Write = Callable[[Any, torch.Tensor], Any]

WRITES: dict[str, tuple[Write, str]] = {
    "a counter": (lambda held, x: setattr(held, "count", held.count + 1), "count"),
    "a tensor on an object": (lambda held, x: setattr(held, "last", x * 2), "last"),
    "a list": (lambda held, x: held.log.append(1), "log"),
    "an entry of a dict": (lambda held, x: held.table.update(seen=held.count + 1), "table"),
    "a counter that wraps": (lambda held, x: setattr(held, "count", 7 - held.count), "count"),
    "a flag": (lambda held, x: setattr(held, "last", True), "last"),
    "a set": (lambda held, x: held.names.add("new"), "names"),
}


def _held() -> Any:
    return SimpleNamespace(count=3, last=None, log=[], table={"seen": 0}, names=set())


def _branch(body: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, body, lambda x: x - 1, (x,))


def _loop(body: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, body(x)), (torch.zeros((), dtype=torch.int64, device=x.device), x))[1]


def _scan(body: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    def combine(carry: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return body(carry) + row, carry.clone()

    return scan(combine, torch.zeros_like(x[0]), x)[0]


FORMS: dict[str, Any] = {"cond": _branch, "while_loop": _loop, "scan": _scan}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("write", WRITES)
def test_what_a_body_leaves_in_python_is_refused(form: str, write: str) -> None:
    change, name = WRITES[write]
    held, before = _held(), _held()

    def body(x: torch.Tensor) -> torch.Tensor:
        change(held, x)
        return x + 1

    with torch.no_grad(), pytest.raises(spmd.TraceError, match=f"(?s)a branch or loop body in a compiled function changes .*{name}"):
        spmd.compile(lambda x: FORMS[form](body, x))(torch.ones(2, 2, device="jax"))
    assert held == before


def test_the_error_says_what_one_run_changes() -> None:
    held = _held()

    def body(x: torch.Tensor) -> torch.Tensor:
        held.count += 1
        return x

    with torch.no_grad(), pytest.raises(spmd.TraceError, match="it was 3 before, and is 4 after it"):
        spmd.compile(lambda x: _branch(body, x))(torch.ones(2, device="jax"))


@pytest.mark.parametrize("form", FORMS)
def test_what_a_library_changes_in_a_body_is_refused_where_it_had_the_list_before(form: str) -> None:
    heap = [3]

    def body(x: torch.Tensor) -> torch.Tensor:
        heapq.heappush(heap, 1)
        return x + 1

    def fn(x: torch.Tensor) -> torch.Tensor:
        heapq.heappush(heap, 2)
        return FORMS[form](body, x)

    with torch.no_grad(), pytest.raises(spmd.TraceError, match="a branch or loop body in a compiled function changes heap"):
        spmd.compile(fn)(torch.ones(2, 2, device="jax"))
    assert heap == [3]


@pytest.mark.parametrize("form", FORMS)
def test_what_a_body_makes_for_itself_and_what_it_leaves_as_it_was_is_no_change(form: str) -> None:
    held = _held()

    def body(x: torch.Tensor) -> torch.Tensor:
        own = SimpleNamespace(count=0, parts=[])
        for part in (x, 2 * x):
            own.count += 1
            own.parts.append(part)
        held.count, before = 10, held.count
        held.count = before
        held.table["seen"] = 0
        return sum(own.parts) / own.count  # type: ignore[no-any-return]

    def fn(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return FORMS[form](body, x)

    x = torch.full((2, 2), 2.0)
    expected = {"cond": x * 1.5, "while_loop": x * 1.5**3, "scan": x[0] * 1.5 + x[1]}[form]
    torch.testing.assert_close(spmd.compile(fn)(x.to("jax")).cpu(), expected)
    assert held == _held()


def test_outside_of_bodies_python_is_written_as_ever() -> None:
    held = _held()

    def fn(x: torch.Tensor) -> torch.Tensor:
        held.count += 1
        return torch.cond(x.sum() > 0, lambda x: x + held.count, lambda x: x - held.count, (x,))

    step, x = spmd.compile(fn), torch.ones(2, device="jax")
    assert [step(x).tolist() for _ in range(3)] == [[5.0, 5.0], [6.0, 6.0], [7.0, 7.0]]
    assert held.count == 6
