"""A slice of `make fuzz`: random programs with Python state, among them the seeds whose results were wrong once."""

import ast

import pytest

from benchmarks.fuzz_programs import LAZY, source
from benchmarks.fuzz_trials import run, trial
from benchmarks.seeds import kind_of

pytestmark = pytest.mark.multidevice(num=8)
ONCE_WRONG = (187, 299, 387, 532)
OTHERS = (1005, *(LAZY + seed for seed in (0, 3, 8)))


@pytest.mark.parametrize("seed", ONCE_WRONG + OTHERS)
def test_a_program_does_what_python_does(seed: int) -> None:
    found = trial(seed)
    assert kind_of(found["result"]) == "equal", found


def test_a_seed_has_one_program() -> None:
    assert source(7) == source(7) != source(8)
    for seed in range(200):
        ast.parse(source(seed))


def test_a_program_whose_values_grow_is_compared_until_they_are_large() -> None:
    text = "x = tensor(0, 4)\nSTATE = ['x']\ndef between(i): pass\ndef given(i): return (), {}\ndef step():\n    x.mul_(1e4)\n    return x"
    assert run(text, "eager", "grown") == {"mode": "eager", "result": "equal", "calls": 1, "has_grown": True, "traces": 0}
