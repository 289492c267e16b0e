"""How many programs a compiled function keeps, which it drops, and what is freed with them."""

import gc
import warnings
import weakref
from typing import Any

import pytest
import torch

import spmd
from spmd.device._storage import Buffer
from tests.oracle import assert_same, batch, twins


def ones(length: int) -> torch.Tensor:
    return torch.ones(length, device="jax")


def quiet(**options: Any) -> Any:
    return spmd.compile(lambda x: x * 2, max_retraces=10_000, **options)


def test_fifty_lengths_keep_the_limit_and_every_result_is_right() -> None:
    step, made = quiet(max_programs=4), []
    for length in (*range(1, 51), 1, 50):
        assert_same(step(ones(length)), torch.ones(length) * 2)
        made.append(weakref.ref(step._latest))
        assert step.num_executables <= 4
    gc.collect(1)
    assert step.num_traces == 51  # 1 was dropped and came back, 50 had stayed
    assert sum(program() is not None for program in made[:50]) <= 4


def test_what_jax_keeps_of_traces_does_not_grow_with_the_programs_that_were_dropped() -> None:
    step = quiet(max_programs=1)

    def num_objects(lengths: range) -> int:
        for length in lengths:
            step(ones(length))
        gc.collect()
        return sum(type(o).__name__ == "JaxprEqn" for o in gc.get_objects())

    first = num_objects(range(1, 18))  # 16 are dropped
    assert num_objects(range(18, 34)) <= first + 8


def test_the_program_that_has_not_run_for_longest_goes() -> None:
    step = quiet(max_programs=2)
    for length in (1, 2, 1, 3, 1):  # 3 takes the place of 2
        step(ones(length))
    assert step.num_traces == 3
    step(ones(2))
    assert step.num_traces == 4


def test_a_dropped_programs_state_is_freed_and_kept_state_still_runs() -> None:
    held = {"weight": ones(3)}
    step = spmd.compile(lambda x: x * held["weight"], max_programs=1, max_retraces=100)
    step(ones(3))
    first = weakref.ref(held["weight"].untyped_storage().spmd_buffer)  # type: ignore[attr-defined]
    assert isinstance(first(), Buffer)
    held["weight"] = ones(3) * 5
    assert step(ones(3)).tolist() == [5.0] * 3
    step(ones(1))
    gc.collect(1)
    assert first() is None


def test_arguments_that_are_state_are_still_told_from_others_after_a_drop() -> None:
    host, device = twins()
    step = spmd.compile(lambda w, x: device(x) + w.sum(), max_programs=2, max_retraces=100)
    weight, other = device.up.weight, torch.zeros(16, 8, device="jax")
    for rows in (1, 2, 3, 1, 2):
        x = batch(rows, 8)
        assert_same(step(weight, x.to("jax")), host(x) + host.up.weight.sum())
        assert_same(step(other, x.to("jax")), host(x))


def test_clear_forgets_programs_and_the_next_call_compiles_again() -> None:
    step = quiet()
    step(ones(2))
    program = weakref.ref(step._latest)
    step.clear()
    gc.collect(1)
    assert program() is None
    assert step.num_executables == 0
    with pytest.raises(spmd.SpmdError, match="has no program yet"):
        step.hlo()
    assert step(ones(2)).tolist() == [2.0, 2.0]
    assert step.num_traces == 2


def test_a_budget_turns_one_trace_too_many_into_an_error_that_names_the_input() -> None:
    step = spmd.compile(lambda x, k: x * len(k), max_retraces=2, on_retrace="error")
    step(ones(1), "a")
    step(ones(2), "a")
    with pytest.raises(spmd.TraceError, match=r"traced again 2 times(.|\n)*argument 0: shape changed from \(2,\) to \(3,\)"):
        step(ones(3), "a")
    assert step.num_traces == 2
    assert step(ones(1), "a").tolist() == [1.0]  # what is compiled still runs
    with pytest.raises(spmd.TraceError, match="argument 1 changed from 'a' to 'bc'"):
        step(ones(1), "bc")


def test_a_budget_warns_by_default() -> None:
    step = spmd.compile(lambda x: x * 2, max_retraces=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(ones(1))
        step(ones(2))
    with pytest.warns(UserWarning, match="argument 0: shape changed"):
        step(ones(3))


@pytest.mark.parametrize("options", [{"max_programs": 0}, {"on_retrace": "ignore"}])
def test_options_that_make_no_sense_are_refused(options: Any) -> None:
    with pytest.raises(spmd.SpmdError, match=f"compile's option {next(iter(options))} must be"):
        spmd.compile(lambda x: x, **options)
