"""Warnings and log records go where Python sends them if the step changes that, also beside output that waits for the end of a call."""

from __future__ import annotations

import contextlib
import io
import logging
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import spmd
from tests.listing import Listing

LOGGER = logging.getLogger("tests.own_outputs")


def recorded(text: str) -> Any:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.warn(text, stacklevel=1)
        warnings.warn(text, stacklevel=2)
    return [str(w.message) for w in caught]


def raised(text: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            warnings.warn(text, stacklevel=1)
        except UserWarning as error:
            return str(error)
    return "nothing"


def filtered(action: Any) -> Callable[[str], Any]:
    def fn(text: str) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter(action)
            for _ in range(2):
                warnings.warn(text, stacklevel=1)

    return fn


def set_between(text: str) -> Any:
    warnings.warn(text + " before", stacklevel=1)
    warnings.simplefilter("ignore")
    warnings.warn(text + " hidden", stacklevel=1)
    warnings.simplefilter("always")
    warnings.warn(text + " after", stacklevel=1)


def shown_by_its_own(text: str) -> Any:
    texts: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *more, **options: texts.append(str(message))
        warnings.warn(text, stacklevel=1)
    return texts


def handled(text: str) -> Any:
    handler = Listing()
    LOGGER.addHandler(handler)
    try:
        LOGGER.info(text)
    finally:
        LOGGER.removeHandler(handler)
    return handler.texts


def streamed(text: str) -> Any:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    LOGGER.addHandler(handler)
    try:
        LOGGER.info(text)
    finally:
        LOGGER.removeHandler(handler)
    return stream.getvalue()


def with_level(text: str) -> Any:
    LOGGER.setLevel(logging.ERROR)
    LOGGER.info(text + " hidden")
    LOGGER.setLevel(logging.INFO)
    LOGGER.info(text + " shown")


def disabled(text: str) -> Any:
    logging.disable(logging.CRITICAL)
    LOGGER.info(text + " hidden")
    logging.disable(logging.NOTSET)
    LOGGER.info(text + " shown")


def with_filter(text: str) -> Any:
    def no(record: logging.LogRecord) -> bool:
        return False

    LOGGER.addFilter(no)
    LOGGER.info(text + " hidden")
    LOGGER.removeFilter(no)
    LOGGER.info(text + " shown")


def redirected(text: str) -> Any:
    stream = io.StringIO()
    with contextlib.redirect_stdout(stream):
        print(text)
    print("after")
    return stream.getvalue()


INNER: dict[str, Callable[[str], Any]] = {
    "record": recorded,
    "error": raised,
    **{action: filtered(action) for action in ("ignore", "once", "default", "always")},
    "set between": set_between,
    "showwarning": shown_by_its_own,
    "handler": handled,
    "stream": streamed,
    "level": with_level,
    "disable": disabled,
    "filter": with_filter,
    "redirect_stdout": redirected,
}
BEFORE: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda n: None,
    "warn": lambda n: warnings.warn(f"w{n}", DeprecationWarning, stacklevel=1),
    "print": lambda n: print(f"p{n}"),
    "log": lambda n: LOGGER.info(f"l{n}"),
}


def shown(run: Callable[[torch.Tensor], Any], x: torch.Tensor) -> Any:
    """The result of a call, and all that it has shown."""
    handler, out, err = Listing(), io.StringIO(), io.StringIO()
    LOGGER.handlers[:], LOGGER.propagate = [handler], False
    LOGGER.setLevel(logging.INFO)
    with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        warnings.simplefilter("always")
        result = run(x)
    return result, [str(w.message) for w in caught], out.getvalue(), err.getvalue(), handler.texts


@pytest.mark.parametrize("is_constant", [True, False])
@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("inner", INNER)
def test_a_call_shows_what_python_shows(inner: str, before: str, is_constant: bool) -> None:
    if before == "nothing" and is_constant:
        return  # nothing waits: output without numbers is written while the function is traced
    found = []
    for device in ("cpu", "jax"):
        state = types.SimpleNamespace(n=0)

        def step(x: torch.Tensor, state: Any = state) -> Any:
            state.n += 1
            BEFORE[before](state.n)
            return INNER[inner]("in" if is_constant else f"in {state.n}")

        run = step if device == "cpu" else spmd.compile(step)
        found.append([shown(run, torch.ones(1).to(device)) for _ in range(4)])
    assert found[1] == found[0]


@pytest.mark.parametrize("inner", [recorded, raised, filtered("always"), handled])
def test_a_number_of_the_device_in_such_output_is_refused_by_name(inner: Callable[[str], Any]) -> None:
    step = spmd.compile(lambda x: inner(f"in {x.sin().sum().item()}"))
    with pytest.raises(spmd.TraceError, match="where the function has changed what is shown of it"):
        step(torch.ones(2).to("jax"))
