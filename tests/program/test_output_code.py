"""Output that runs code of the user's, or fills a file in memory: handlers and filters of loggers, `showwarning`, files in Python code."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import logging
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import spmd

LOGGER = logging.getLogger("tests.output_code")
CALLS = 6


class Listing(logging.Handler):
    """Keeps and counts what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.num = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.num += 1
        self.texts.append(f"{self.num} {self.format(record)} {record.lineno - record.lineno}")


class Printing(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        print("handled", self.format(record))


class OfStep(logging.Handler):
    """Shows what the step's state is now."""

    def __init__(self, state: Any, texts: list[str]) -> None:
        super().__init__()
        self.state, self.texts = state, texts

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(f"{self.state.steps}: {record.getMessage()}")


class Numbered(logging.Formatter):
    num = 0

    def format(self, record: logging.LogRecord) -> str:
        self.num += 1
        return f"#{self.num} {super().format(record)}"


class Tee:
    """A file that writes to others, and keeps its texts."""

    def __init__(self, *files: Any) -> None:
        self.files, self.texts = files, list[str]()

    def write(self, text: str) -> int:
        self.texts.append(text)
        for file in self.files:
            file.write(text)
        return len(text)

    def flush(self) -> None:
        pass


def is_even(record: logging.LogRecord) -> bool:
    SEEN.append(record.getMessage())
    return len(SEEN) % 2 == 0


SEEN: list[str] = []
Shown = Callable[[], Any]


def logging_to(make: Callable[[Any], logging.Handler], then: Callable[[Any], Any] = lambda handler: None) -> Callable[[Any], Any]:
    """Sets a handler, and returns the functions that give what it has kept and that restore all."""

    def put(state: Any) -> tuple[Shown, Callable[[], Any]]:
        handler = make(state)
        LOGGER.handlers[:], LOGGER.propagate = [handler], False
        LOGGER.setLevel(logging.INFO)
        state.show, state.handler = LOGGER.info, handler
        then(handler)
        return lambda: list(getattr(handler, "texts", [])), lambda: [LOGGER.handlers.clear(), LOGGER.filters.clear()]

    return put


def with_filter(state: Any) -> Any:
    SEEN.clear()
    found = logging_to(lambda state: Listing())(state)
    LOGGER.addFilter(is_even)
    return lambda: (found[0](), list(SEEN)), found[1]


def printed_to(make: Callable[[], Any], texts: Callable[[Any], Any], is_standard: bool) -> Callable[[Any], Any]:
    def put(state: Any) -> Any:
        state.file = make()
        before = sys.stdout
        if is_standard:
            sys.stdout, state.show = state.file, print
        else:
            state.show = state.printed
        return lambda: texts(state.file), lambda: setattr(sys, "stdout", before)

    return put


def warned_of(action: Any, is_captured: bool) -> Callable[[Any], Any]:
    def put(state: Any) -> Any:
        texts: list[str] = []
        globals().pop("__warningregistry__", None)
        stack = contextlib.ExitStack()
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter(action)
        warnings.filterwarnings("ignore", ".*branches on values of the device")
        state.show = state.warned
        if is_captured:
            handler = Listing()
            handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
            logging.captureWarnings(True)
            logging.getLogger("py.warnings").handlers[:] = [handler]
            stack.callback(logging.getLogger("py.warnings").handlers.clear)
            stack.callback(logging.captureWarnings, False)
        else:
            warnings.showwarning = lambda message, category, filename, lineno, *more: texts.append(f"{message} {lineno > 0}")
        return lambda: list(texts), stack.close

    return put


SINKS: dict[str, Callable[[Any], Any]] = {
    "handler": logging_to(lambda state: Listing()),
    "handler that prints": logging_to(lambda state: Printing()),
    "formatter": logging_to(lambda state: Listing(), lambda handler: handler.setFormatter(Numbered("%(message)s"))),
    "filter": with_filter,
    "handler of the step": logging_to(lambda state: OfStep(state, [])),
    "stream in memory": logging_to(lambda state: logging.StreamHandler(state.memory)),
    "stream of its own": logging_to(lambda state: logging.StreamHandler(Tee(state.memory))),
    "standard output": printed_to(lambda: Tee(), lambda tee: tee.texts, True),
    "standard output in memory": printed_to(io.StringIO, lambda file: file.getvalue(), True),
    "file": printed_to(lambda: Tee(io.StringIO()), lambda tee: (tee.texts, tee.files[0].getvalue()), False),
    **{f"showwarning, {action}": warned_of(action, False) for action in ("always", "default", "once")},
    **{f"captured warnings, {action}": warned_of(action, True) for action in ("always", "default", "once")},
}


def constant(s: Any, x: Any) -> None:
    s.show("start")
    s.show("end")


def of_the_host(s: Any, x: Any) -> None:
    s.show("start")
    s.show(f"step {s.steps}")
    s.show("end")


def of_the_device(s: Any, x: Any) -> None:
    s.show("start")
    s.show(f"step {s.steps}: {x.sum().item():.1f}")
    s.show("end")


def in_a_branch(s: Any, x: Any) -> None:
    s.show("start")
    if x.sum() > 2:
        s.show(f"large {s.steps}")
    else:
        s.show("small")
    s.show("end")


STEPS: dict[str, Callable[[Any, Any], None]] = {
    "constant": constant,
    "host": of_the_host,
    "device": of_the_device,
    "branch": in_a_branch,
}


class State:
    """What a step uses. `show` is set by a sink."""

    def __init__(self) -> None:
        self.steps = 0
        self.memory = io.StringIO()
        self.show: Any = None
        self.file: Any = None
        self.handler: Any = None
        self.late: Any = None

    def printed(self, text: str) -> None:
        print(text, file=self.file)

    def warned(self, text: str) -> None:
        warnings.warn(text, RuntimeWarning, stacklevel=1)


def calls(sink: Callable[[Any], Any], fn: Callable[[Any, Any], Any], device: str) -> tuple[list[Any], Any]:
    """What each call returns and what has been kept after it, and the compiled step."""
    state = State()
    shown, restore = sink(state)

    def step(x: torch.Tensor) -> Any:
        state.steps += 1
        return fn(state, x)

    run: Any = step if device == "cpu" else spmd.compile(step)
    try:
        found = [(run(torch.full((2,), float(k % 4)).to(device)), shown(), state.memory.getvalue(), state.steps) for k in range(CALLS)]
    finally:
        restore()
    return found, run


@pytest.mark.filterwarnings("ignore:.*branches on values of the device")
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("sink", SINKS)
def test_every_call_runs_it_once_for_each_output(sink: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    expected = calls(SINKS[sink], STEPS[name], "cpu")[0], capsys.readouterr().out
    found, step = calls(SINKS[sink], STEPS[name], "jax")
    assert (found, capsys.readouterr().out) == expected
    assert step.num_traces <= (4 if name == "branch" else 2)


def read_after(s: Any, x: Any) -> Any:
    s.show(f"step {s.steps}" if s.is_of_host else "constant")
    return len(s.handler.texts)


def read_before(s: Any, x: Any) -> Any:
    found = s.handler.num
    s.show("constant")
    return found


def changed_after(s: Any, x: Any) -> None:
    s.steps += 1
    s.show("one")
    s.steps += 1
    s.show("two")


def kept_in_memory(s: Any, x: Any) -> str:
    s.show("one")
    return s.memory.getvalue()


def of_both(s: Any, x: Any) -> None:
    s.handler.texts.append("by the step")
    s.show("by the handler")
    s.handler.texts.append("by the step again")


@pytest.mark.parametrize("fn", [read_after, read_before, changed_after, kept_in_memory, of_both])
@pytest.mark.parametrize("is_of_host", [False, True])
@pytest.mark.parametrize("sink", ["handler", "handler of the step", "stream in memory"])
def test_a_step_that_uses_what_it_keeps_sees_what_python_gives(sink: str, is_of_host: bool, fn: Any) -> None:
    if sink == "stream in memory" and fn in (read_after, read_before, of_both):
        return  # it keeps no list
    if sink == "handler of the step" and fn is read_before:
        return  # it counts nothing

    def step(s: Any, x: Any) -> Any:
        s.is_of_host = is_of_host
        if is_of_host:
            s.show(f"begin {s.steps}")
        return fn(s, x)

    assert calls(SINKS[sink], step, "jax")[0] == calls(SINKS[sink], step, "cpu")[0]


@pytest.mark.parametrize("fn", [read_after, read_before, of_both, changed_after])
def test_a_number_of_the_device_beside_such_a_use_is_refused_by_name(fn: Any) -> None:
    def step(s: Any, x: Any) -> Any:
        s.is_of_host = False
        s.show(f"{x.sum().item()}")
        return fn(s, x)

    sink = SINKS["handler of the step" if fn is changed_after else "handler"]
    with pytest.raises(spmd.TraceError, match=r"info\(\) runs (Listing|OfStep), beside output of a number of the device"):
        calls(sink, step, "jax")


def test_outputs_before_the_first_of_such_are_written_once_by_the_first_call(capsys: pytest.CaptureFixture[str]) -> None:
    def step(s: Any, x: Any) -> Any:
        print("begin")
        s.show("one")
        print("end")
        return len(s.handler.texts) if s.steps > 3 else None  # at once from then on

    expected, shown = calls(SINKS["handler"], step, "cpu")[0], capsys.readouterr().out
    found, compiled = calls(SINKS["handler"], step, "jax")
    assert found == expected
    first = capsys.readouterr().out
    assert first.startswith("begin\nend\n") and first.count("begin") <= shown.count("begin")
    assert compiled.num_traces > 1


def test_a_file_in_memory_that_is_cleared_between_calls_gets_each_text_once() -> None:
    found = []
    for device in ("cpu", "jax"):

        def step(x: torch.Tensor) -> None:
            print("start")
            print("loss", x.sum().item())

        run: Any = step if device == "cpu" else spmd.compile(step)
        texts: list[str] = []
        with contextlib.redirect_stdout(io.StringIO()) as file:
            for k in range(CALLS):
                run(torch.full((2,), float(k)).to(device))
                texts.append(file.getvalue())
                file.seek(0)
                file.truncate()
        found.append((texts, device == "cpu" or run.num_traces == 1))
    assert found[1] == found[0]


@pytest.mark.parametrize("is_of_device", [False, True])
@pytest.mark.parametrize("action", ["default", "once", "always"])
def test_a_warning_is_shown_as_often_as_in_python(action: Any, is_of_device: bool) -> None:
    found = []
    for device in ("cpu", "jax"):
        state = types.SimpleNamespace(n=0)

        def step(x: torch.Tensor, state: Any = state) -> None:
            state.n += 1
            warnings.warn("constant", stacklevel=1)
            warnings.warn(f"{x.sum().item()}" if is_of_device else f"{state.n}", stacklevel=1)
            warnings.warn("end", stacklevel=1)

        run: Any = step if device == "cpu" else spmd.compile(step)
        globals().pop("__warningregistry__", None)
        warnings.onceregistry.clear()  # type: ignore[attr-defined]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter(action)
            for k in range(CALLS):
                run(torch.full((2,), float(k)).to(device))
        found.append([str(w.message) for w in caught])
    assert found[1] == found[0]


def rows_in_memory(s: Any, x: Any) -> Any:
    file = io.StringIO()
    csv.writer(file).writerow([s.steps, s.steps * 0.5])
    csv.DictWriter(file, ["a"]).writerow({"a": s.steps})
    return file.getvalue()


def rows_in_its_own(s: Any, x: Any) -> None:
    csv.writer(s.file).writerow([s.steps, x.sum().item()])


def json_in_its_own(s: Any, x: Any) -> None:
    json.dump({"step": s.steps, "loss": x.sum().item()}, s.file)


@pytest.mark.parametrize("fn", [rows_in_memory, rows_in_its_own, json_in_its_own])
def test_rows_and_json_are_those_of_python(fn: Any) -> None:
    sink = SINKS["file"]
    assert calls(sink, fn, "jax")[0] == calls(sink, fn, "cpu")[0]


def method(s: Any, x: Any) -> None:
    LOGGER.info("step %d", s.steps)


def log(s: Any, x: Any) -> None:
    LOGGER.log(logging.INFO, "step %d", s.steps)


def adapter(s: Any, x: Any) -> None:
    ADAPTER.info("step %d", s.steps)


ADAPTER = logging.LoggerAdapter(LOGGER, {})


@pytest.mark.parametrize("fn", [method, log, adapter])
def test_a_record_of_a_level_that_is_off_is_no_output_until_it_is_on(fn: Any) -> None:
    def calls_of(device: str) -> tuple[list[Any], Any]:
        state = State()
        shown, restore = SINKS["handler"](state)
        LOGGER.setLevel(logging.WARNING)

        def of_state(x: torch.Tensor) -> Any:
            state.steps += 1
            fn(state, x)
            return x * len(state.handler.texts) + state.steps

        run: Any = of_state if device == "cpu" else spmd.compile(of_state)
        found = []
        try:
            for k in range(CALLS + 2):
                if k == CALLS - 2:
                    LOGGER.setLevel(logging.INFO)
                found.append((run(torch.full((2,), float(k)).to(device)).tolist(), shown()))
        finally:
            restore()
        return found, run

    found, run = calls_of("jax")
    assert found == calls_of("cpu")[0]
    assert run.num_traces <= CALLS


def install_handler(s: State) -> None:
    LOGGER.addHandler(s.late)


def install_filter(s: State) -> None:
    LOGGER.handlers[0].addFilter(s.late.filter_of)


def install_output(s: State) -> None:
    sys.stdout = s.late


def install_warnings(s: State) -> None:
    warnings.showwarning = s.late.show


class Late(logging.Handler):
    """Counts what it gets, installed as a handler, a filter, the standard output, or a function that shows warnings."""

    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.num += 1

    def filter_of(self, record: logging.LogRecord) -> bool:
        self.num += 1
        return True

    def write(self, text: str) -> int:
        self.num += 1
        return len(text)

    def show(self, *given: Any) -> None:
        self.num += 1


def with_print(s: Any, x: Any) -> None:
    print("step", s.steps)


def with_warning(s: Any, x: Any) -> None:
    warnings.warn(f"step {s.steps}", RuntimeWarning, stacklevel=1)


INSTALLED = [(install_handler, method), (install_filter, method), (install_output, with_print), (install_warnings, with_warning)]


@pytest.mark.parametrize(("install", "fn"), INSTALLED)
@pytest.mark.parametrize("is_read", [False, True])
def test_code_that_is_installed_between_calls_is_seen(install: Any, fn: Any, is_read: bool, capsys: pytest.CaptureFixture[str]) -> None:
    def calls_of(device: str) -> list[Any]:
        state = State()
        _, restore = logging_to(lambda state: logging.StreamHandler(state.memory))(state)
        state.late = Late()
        before = sys.stdout

        def of_state(x: torch.Tensor) -> Any:
            state.steps += 1
            fn(state, x)
            return x * (state.late.num if is_read else 1) + state.steps

        run: Any = of_state if device == "cpu" else spmd.compile(of_state)
        found = []
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            try:
                for k in range(CALLS):
                    if k == 3:
                        install(state)
                    found.append((run(torch.full((2,), float(k)).to(device)).tolist(), state.late.num))
            finally:
                sys.stdout = before
                restore()
        return [*found, state.memory.getvalue()]

    assert calls_of("jax") == calls_of("cpu")
