"""Exceptions that a step returns, stores, reads or raises are those of Python: causes, contexts, notes, and the fields that C keeps."""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import spmd


class Slots(Exception):
    __slots__ = ("a", "unset")

    def __init__(self, a: Any) -> None:
        self.a = a


class Both(KeyError, AttributeError):
    """Its memory is laid out by its second base."""


class OfFile(OSError):
    def __init__(self, n: int) -> None:
        super().__init__(n, "text")
        self.n = n


class Group(ExceptionGroup[Any]):
    def derive(self, excs: Any) -> Group:
        return Group(self.message, excs)


def with_(error: Any, **fields: Any) -> Any:
    for name, value in fields.items():
        setattr(error, name, value)
    return error


def with_notes(n: int) -> BaseException:
    error = ValueError(n)
    error.add_note("first")
    error.add_note(f"of {n}")
    return error


def in_itself(n: int) -> BaseException:
    error = ValueError(n)
    error.args = (error, n)
    return error


MADE: dict[str, Callable[[int], BaseException]] = {
    "OSError": lambda n: OSError(2, "x", "file", None, "other"),
    "OSError without fields": lambda n: OSError(n),
    "OSError with None": lambda n: OSError(None, "x"),
    "OSError, filename set to None": lambda n: with_(OSError(2, "x"), filename=None),
    "OSError, errno set": lambda n: with_(OSError(2, "x"), errno=n),
    "BlockingIOError": lambda n: BlockingIOError(11, "x", n),
    "ImportError": lambda n: ImportError("m", name="a", path="b"),
    "AttributeError": lambda n: AttributeError("x", name="q", obj=[n]),
    "NameError": lambda n: NameError("u", name="z"),
    "StopIteration": lambda n: StopIteration(n),
    "SystemExit": lambda n: SystemExit(n),
    "SystemExit, code set": lambda n: with_(SystemExit(1), code=[n]),
    "SyntaxError": lambda n: SyntaxError("m", ("f", n, 2, "t")),
    "UnicodeDecodeError": lambda n: with_(UnicodeDecodeError("ascii", b"ab", 0, 1, "r"), reason="other"),
    "KeyError": lambda n: KeyError("a", n),
    "a group": lambda n: ExceptionGroup("g", [ValueError(n), ExceptionGroup("h", [KeyError(1)])]),
    "a group of the user's": lambda n: Group("g", [ValueError(n)]),
    "slots": lambda n: Slots(n),
    "two bases": lambda n: with_(Both(n), name="nm"),
    "an __init__ of its own": OfFile,
    "notes": with_notes,
    "in itself": in_itself,
}


def described(error: Any, seen: dict[int, int] | None = None) -> Any:
    """All that Python shows of an exception, apart from its traceback."""
    seen = {} if seen is None else seen
    if not isinstance(error, BaseException):
        return type(error).__name__, str(error)
    if id(error) in seen:
        return "again", seen[id(error)]
    seen[id(error)] = len(seen)
    fields = []
    for cls in type(error).__mro__:
        for name, found in vars(cls).items():
            if isinstance(found, types.MemberDescriptorType):
                value = getattr(error, name, "unset")
                fields.append((name, [described(e, seen) for e in value] if name == "exceptions" else repr(value)))
    links = [described(e, seen) for e in (*error.args, error.__cause__, error.__context__)]
    written = getattr(error, "characters_written", None)
    return type(error).__name__, str(error), repr(error), fields, links, error.__suppress_context__, repr(vars(error)), written


def of_four_calls(make: Callable[[int], BaseException], device: str) -> list[Any]:
    """What exceptions hold that a step returns and stores; `make` makes each of a number that changes."""
    state: Any = types.SimpleNamespace(n=0)

    def step(x: torch.Tensor) -> Any:
        state.n += 1
        state.error = make(state.n)
        return state.error, x * state.n

    run, found = step if device == "cpu" else spmd.compile(step), list[Any]()
    for _ in range(4):
        error = run(torch.ones(1).to(device))[0]
        assert error is state.error
        found.append(described(error))
    return found


@pytest.mark.parametrize("name", MADE)
def test_an_exception_that_is_returned_or_stored_has_all_its_fields(name: str) -> None:
    assert of_four_calls(MADE[name], "jax") == of_four_calls(MADE[name], "cpu")


def chained(how: str, n: int) -> BaseException:
    try:
        try:
            raise KeyError("k", n)
        except KeyError as inner:
            if how == "from":
                raise RuntimeError(n) from inner
            if how == "from None":
                raise RuntimeError(n) from None
            raise RuntimeError(n)  # noqa: B904 - the context is what is tested
    except RuntimeError as outer:
        return outer


@pytest.mark.parametrize("how", ["from", "from None", "context"])
def test_an_exception_has_its_cause_and_context(how: str) -> None:
    make = functools.partial(chained, how)
    assert of_four_calls(make, "jax") == of_four_calls(make, "cpu")


def test_the_context_of_an_exception_is_what_the_caller_of_each_call_handles() -> None:
    def raised(x: torch.Tensor) -> Any:
        try:
            raise ValueError("in")
        except ValueError as error:
            return error, x * 2

    found = []
    for device in ("cpu", "jax"):
        run, x = (raised if device == "cpu" else spmd.compile(raised)), torch.ones(1).to(device)
        contexts = [repr(run(x)[0].__context__)]
        for number in range(3):
            try:
                raise OSError(number)
            except OSError:
                contexts.append(repr(run(x)[0].__context__))
        found.append(contexts)
    assert found[1] == found[0]


def test_a_tensor_in_a_returned_exception_is_an_output() -> None:
    def failed(x: torch.Tensor) -> Any:
        y = x * 2
        try:
            raise ValueError(x, y)
        except ValueError as error:
            error.y = y  # type: ignore[attr-defined]
            return error

    step = spmd.compile(failed)
    for number in range(3):
        x = torch.full((2,), float(number)).to("jax")
        error: Any = step(x)
        assert error.args[0] is x
        assert error.args[1] is error.y
        assert error.y.tolist() == [2.0 * number] * 2


READ: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "text of an OSError": (lambda: OSError(2, "x", "f"), str, lambda e: setattr(e, "errno", 5)),
    "f-string of a SyntaxError": (lambda: SyntaxError("m", ("f", 1, 2, "t")), lambda e: f"{e}", lambda e: setattr(e, "lineno", 5)),
    "text of a KeyError": (lambda: KeyError(1), str, lambda e: setattr(e, "args", (2,))),
    "in a list": (lambda: ValueError(1), lambda e: str([e]), lambda e: setattr(e, "args", (2,))),
    "in a group": (lambda: ExceptionGroup("g", [KeyError(1)]), lambda e: repr(e.exceptions), lambda e: e.exceptions[0].__init__(7)),
}


@pytest.mark.parametrize("name", READ)
def test_a_change_of_an_exception_from_before_is_seen(name: str) -> None:
    make, read, change = READ[name]
    error = make()
    step, x = spmd.compile(lambda x: (x * 2, read(error))), torch.ones(1).to("jax")
    assert step(x)[1] == read(error)
    change(error)
    assert step(x)[1] == read(error)
    assert step(x)[1] == read(error)


@pytest.mark.parametrize("has_note", [True, False])
def test_an_exception_that_leaves_a_step_has_only_the_users_notes(has_note: bool) -> None:
    def fail(x: torch.Tensor) -> torch.Tensor:
        error = ValueError("of the user")
        if has_note:
            error.add_note("a note")
        raise error

    with pytest.raises(ValueError, match="of the user") as caught:
        spmd.compile(fail)(torch.ones(1).to("jax"))
    assert getattr(caught.value, "__notes__", None) == (["a note"] if has_note else None)


def test_an_exception_that_leaves_a_step_has_plain_numbers_in_its_fields() -> None:
    state = types.SimpleNamespace(n=0, make=None)

    def count(x: torch.Tensor) -> torch.Tensor:
        if state.make is not None:
            raise state.make(state.n)
        return x * state.n

    step, x = spmd.compile(count), torch.ones(1).to("jax")
    for state.n in range(3):
        step(x)
    for state.make in (SystemExit, Slots, lambda n: AttributeError("x", name="q", obj=[n]), StopAsyncIteration):
        state.n += 1
        with pytest.raises(BaseException) as caught:
            step(x)
        error: Any = caught.value
        held = getattr(error, "code", None) or getattr(error, "a", None) or (getattr(error, "obj", None) or error.args)[0]
        assert (type(held), held) == (int, state.n)


def test_warnings_are_exceptions_too() -> None:
    def warned(x: torch.Tensor) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                warnings.warn("in", stacklevel=1)
            except UserWarning as error:
                return error, x

    step, x = spmd.compile(warned), torch.ones(1).to("jax")
    assert [repr(step(x)[0]) for _ in range(2)] == ["UserWarning('in')"] * 2
