"""Operators of Python on integers, bools and outcomes of comparisons that only the device knows."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import spmd

SOURCES = {
    "int": "x.argmax().item()",
    "bool": "(x.max() > 3).item()",
    "comparison": "(x.max().item() > 3)",
    "float": "x.max().item()",
    "3": "3",
    "True": "True",
    "2.5": "2.5",
}
OPERATORS = ["+", "-", "*", "<<", ">>", "&", "|", "^", "<", "=="]


def _function(text: str) -> Callable[[torch.Tensor], Any]:
    names: dict[str, Any] = {}
    exec(compile(f"def fn(x):\n{text}", __file__, "exec"), {"__name__": __name__}, names)
    return names["fn"]


def _handled(fn: Callable[[torch.Tensor], Any], device: str) -> list[Any]:
    def step(x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        try:
            return x * 2, fn(x)
        except TypeError as error:
            return x, type(error).__name__

    run: Any = spmd.compile(step) if device == "jax" else step
    values = [run(torch.arange(4.0, device=device) * (i + 1) - 2 * i)[1] for i in range(3)]
    return [(type(value), value) for value in values]


@pytest.mark.parametrize("op", OPERATORS)
@pytest.mark.parametrize("left", ["int", "bool", "comparison"])
def test_operators_give_what_python_gives(op: str, left: str) -> None:
    for right in SOURCES:
        for first, second in ((left, right), (right, left)):
            fn = _function(f"    return {SOURCES[first]} {op} {SOURCES[second]}")
            assert _handled(fn, "jax") == _handled(fn, "cpu"), (first, second)


@pytest.mark.parametrize(
    "text",
    [
        "    n = 0\n    n |= x.argmax().item()\n    n ^= 5\n    return n",
        "    n = x.argmax().item()\n    n <<= 4\n    n >>= 2\n    n &= 12\n    return n",
        "    return ~x.argmax().item()",
        "    return -(x.max().item() > 3), +(x.max().item() > 3), abs(x.max().item() > 3)",
        "    return sum([v > 1.0 for v in x.tolist()])",
        "    return (x.max().item() > 3) - (x.max().item() < 3)",
        "    bad = 0\n    bad += x.max().item() > 4.0\n    return bad",
    ],
)
def test_functions_give_what_python_gives(text: str) -> None:
    assert _handled(_function(text), "jax") == _handled(_function(text), "cpu")


def test_a_count_of_comparisons_stays_in_the_program() -> None:
    """A counter of bad losses that is kept on an object, and used with tensors."""

    def run(device: str) -> list[Any]:
        state: dict[str, Any] = {"bad": 0}

        def step(x: torch.Tensor) -> torch.Tensor:
            state["bad"] += x.sum().item() > 8
            return x * state["bad"]

        compiled: Any = spmd.compile(step) if device == "jax" else step
        found: list[Any] = []
        for i in range(6):
            found.append((compiled(torch.arange(4.0, device=device) * (i % 3)).tolist(), type(state["bad"]), state["bad"]))
        return found

    assert run("jax") == run("cpu")


@pytest.mark.parametrize(
    "name", ["bit_length()", "to_bytes(2, 'little')", "real", "imag", "numerator", "denominator", "hex()", "bit_count()"]
)
def test_what_integers_of_the_program_lack_is_refused_also_if_the_error_is_handled(name: str) -> None:
    fn = _function(f"    try:\n        return x.argmax().item().{name}\n    except Exception:\n        return -1")
    with pytest.raises(spmd.TraceError, match="needed as a Python number"):
        _handled(fn, "jax")


def test_shifts_that_python_refuses_or_that_need_more_bits_are_checked() -> None:
    step = spmd.compile(lambda x: (x * 2, 1 << x.argmax().item()))
    assert step(torch.arange(63, device="jax"))[1] == 1 << 62
    with pytest.raises(spmd.CheckFailed, match="64 bits"):
        spmd.compile(lambda x: (x * 2, 1 << x.argmax().item()))(torch.arange(70, device="jax"))
    with pytest.raises(spmd.CheckFailed, match="negative shift count"):
        spmd.compile(lambda x: (x * 2, 1 << (x.argmax().item() - 9)))(torch.arange(4, device="jax"))
