"""Functions ask for their recorded form while a trace runs, whoever calls them, and have their own code afterwards."""

import inspect
import logging
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import spmd
from spmd.program.reads import Recording, _hooks, _swap, recorded, recorded_together

SCALES = {"one": 2.0, "other": 3.0}


def reader(key: str) -> Callable[[Any], Any]:
    return lambda x: x * SCALES[key]


def adder(key: str) -> Callable[[Any], Any]:
    return lambda x: x + SCALES[key]


def plain(x: Any) -> Any:
    return x + 1


def another(x: Any) -> Any:
    return x + 2


def while_recorded(fn: Callable[[Any], Any], x: Any) -> Any:
    before = _hooks.start(Recording({}, {}, set()))
    try:
        return fn(x)
    finally:
        _hooks.stop(before)


@pytest.mark.parametrize("num_functions", [1, 3])
def test_functions_of_one_code_have_stubs_until_one_is_entered_again(num_functions: int) -> None:
    scope: dict[str, Any] = {"SCALES": SCALES}
    exec("def reader(key): return lambda x: x * SCALES[key]", scope)  # code that no recording has entered
    made = [scope["reader"]("one") for _ in range(num_functions)]
    code = made[0].__code__
    swapped = _swap.swap(made)
    try:
        stubs = {fn.__code__ for fn in made}
        assert len(stubs) == 1 and code not in stubs
        assert all(_swap.code_of(fn) is code for fn in made)
        assert swapped.with_code(code) == made[-1:] + made[:-1]
        assert [made[-1](1.0) for _ in range(2)] == [2.0] * 2  # its own code, because nothing is recorded
        assert while_recorded(made[0], 1.0) == 2.0
        assert {fn.__code__ for fn in made} == stubs
        assert while_recorded(made[-1], 1.0) == 2.0
        instrumented = {fn.__code__ for fn in made}
        assert len(instrumented) == 1 and not instrumented & stubs
        assert [fn(1.0) for fn in made] == [2.0] * num_functions
    finally:
        _swap.restore(swapped)
    assert all(fn.__code__ is code for fn in made)
    swapped = _swap.swap(made)
    assert {fn.__code__ for fn in made} == instrumented
    _swap.restore(swapped)
    assert all(fn.__code__ is code for fn in made)


def test_a_swap_within_a_swap_leaves_the_functions_of_both_as_they_were() -> None:
    own = plain.__code__, another.__code__
    outer = _swap.swap([plain])
    inner = _swap.swap([plain, another])
    assert (plain(1), another(1)) == (2, 3)
    _swap.restore(inner)
    assert another.__code__ is own[1] and plain.__code__ is not own[0]
    assert plain(1) == 2
    _swap.restore(outer)
    assert (plain.__code__, another.__code__) == own


def test_a_code_that_a_function_was_given_meanwhile_stays() -> None:
    first, second = reader("one"), reader("one")
    swapped = _swap.swap([first, second])
    given = second.__code__ = adder("one").__code__
    _swap.restore(swapped)
    assert first(1.0) == 2.0 and second.__code__ is given


def test_a_code_that_another_function_has_in_a_recording_is_that_functions_own_afterwards() -> None:
    first, second = reader("one"), adder("one")
    swapped = _swap.swap([first, second])
    second.__code__ = first.__code__
    _swap.restore(swapped)
    assert second.__code__ is first.__code__ is reader("one").__code__


def test_functions_stay_swapped_between_recordings_that_follow_each_other() -> None:
    own = plain.__code__
    with recorded_together():
        given = plain.__code__
        assert given is not own
        for _ in range(2):
            with recorded() as recording:
                assert recording.run(lambda: plain(1)) == 2
            assert plain.__code__ is not own and _swap.code_of(plain) is own
    assert plain.__code__ is own


def test_functions_that_share_their_code_are_guarded_one_by_one() -> None:
    one, other = reader("one"), reader("other")
    step = spmd.compile(lambda x: sum(map(one, [x])) + sum(map(other, [x])))
    x = torch.ones(1).to("jax")
    try:
        assert step(x).tolist() == [5.0]
        SCALES["other"] = 7.0
        assert step(x).tolist() == [9.0]
        SCALES["one"] = 1.0
        assert step(x).tolist() == [8.0]
    finally:
        SCALES.update(one=2.0, other=3.0)


def callers() -> list[Any]:
    return [sys._getframe(1).f_code.co_name, sys._getframe().f_back.f_lineno, inspect.stack()[1].function]  # type: ignore[union-attr]


def warned() -> None:
    warnings.warn("old", stacklevel=2)


def logged(logger: logging.Logger) -> None:
    logger.warning("new", stacklevel=2)


def fails() -> None:
    raise KeyError


def test_frames_tell_who_called_when_a_function_is_first_called_too() -> None:
    records: list[Any] = []
    logger, handler = logging.Logger("of a test"), logging.Handler()
    handler.emit = lambda record: records.append((record.funcName, record.lineno))  # type: ignore[method-assign]
    logger.addHandler(handler)

    def fn(x: torch.Tensor) -> torch.Tensor:
        records.extend(callers())
        logged(logger)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            warned()
        records.append((found[0].filename, found[0].lineno))
        try:
            fails()
        except KeyError as error:
            records.append([frame.name for frame in traceback.extract_tb(error.__traceback__)])
        return x

    seen: list[Any] = []
    for call, device in ((spmd.compile(fn), "jax"), (fn, "cpu")):
        call(torch.ones(1, device=device))
        seen.append(list(records))
        records.clear()
    assert seen[0] == seen[1]
