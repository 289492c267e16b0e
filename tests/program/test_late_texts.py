"""Texts of numbers that change are made when a call ends, so they need no trace of their own, unless the function needs them before."""

import collections
import contextlib
import io
import json
import logging
import math
import re
import string
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import spmd
from mesh import Mesh

Fn = Callable[[torch.Tensor, int, Any], Any]


def named(x: torch.Tensor, i: int, state: Any) -> Any:
    state.name = f"step {i}"
    return x, state.name


def extended(x: torch.Tensor, i: int, state: Any) -> Any:
    text = "step "
    text += f"{i}"
    return x, text


LATE: dict[str, Fn] = {
    "print": lambda x, i, state: (print(f"step {i}", i, f"{i:03d}"), x)[1],
    "print of %": lambda x, i, state: (print("step %d" % i, str(i), repr(i)), x)[1],  # noqa: UP031
    "print of format()": lambda x, i, state: (print("step {:>4}".format(i), format(i, "x")), x)[1],  # noqa: UP032
    "logging": lambda x, i, state: (state.log.info(f"step {i}"), state.log.info("of %d", i), x)[2],
    "warnings": lambda x, i, state: (warnings.warn(f"step {i}", stacklevel=2), x)[1],
    "append": lambda x, i, state: (state.texts.append(f"step {i} of {2 * i}"), x)[1],
    "an entry": lambda x, i, state: (state.texts.append({"step": f"{i}", "more": [f"{i / 2:.1f}"]}), x)[1],
    "an attribute": named,
    "returned": lambda x, i, state: (x, f"{i}", {"a": f"{i!r} {i=}"}),
    "methods": lambda x, i, state: (x, f"a{i}".upper(), ",".join([f"{i}", "b"]), f"{i}".zfill(4), f"a {i}".split()),
    "added": extended,
    "template": lambda x, i, state: (x, string.Template("step $i $$").substitute(i=i), string.Template("$i $j").safe_substitute({"i": i})),
    "nested": lambda x, i, state: (x, f"{f'{i}'}-{i}"),
    "json": lambda x, i, state: (x, json.dumps({"step": f"{i}"})),
    "beside a loss": lambda x, i, state: (x, f"{i}: {x.sum().item():.2f}"),
}
NEEDED: dict[str, Fn] = {
    "a key": lambda x, i, state: x * {"k0": 2, "k1": 3}.get(f"k{i}", 4),
    "a new key": lambda x, i, state: (state.counts.update([f"k{i % 2}"]), x)[1],
    "an attribute's name": lambda x, i, state: x * getattr(state, f"w{i % 2}"),
    "a branch": lambda x, i, state: x * 2 if f"{i}" == "2" else x,
    "in": lambda x, i, state: x * 2 if "2" in f"{i}" else x,
    "a number": lambda x, i, state: x * int(f"{i}") + float(f"{i}.5"),
    "len": lambda x, i, state: x * len(f"{10**i}"),
    "iteration": lambda x, i, state: (x, list(f"ab{i}")),
    "width": lambda x, i, state: (x, f"{i:>{i + 3}}|"),
    "re": lambda x, i, state: (x, re.sub(r"\d", "#", f"a{i}")),
    "an error that is suppressed": lambda x, i, state: suppressed(x, i),
    "an error that is handled": lambda x, i, state: x * handled(f"{i}a"[: 1 + i]),
}


def suppressed(x: torch.Tensor, i: int) -> torch.Tensor:
    with contextlib.suppress(KeyError):
        return x * {"k1": 2}["k%d" % i]  # noqa: UP031
    return x * 3


def handled(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        return 7


def outcome(fn: Fn, device: str, num_calls: int) -> tuple[list[Any], int]:
    """What some calls return, print, log and leave behind, and the number of traces."""
    logged, log = io.StringIO(), logging.Logger("texts")
    log.addHandler(logging.StreamHandler(logged))
    state = types.SimpleNamespace(log=log, texts=[], counts=collections.Counter[str](), w0=2.0, w1=3.0)
    run: Any = spmd.compile(lambda x, i: fn(x, i, state)) if device == "jax" else lambda x, i: fn(x, i, state)
    found: list[Any] = []
    for i in range(num_calls):
        with contextlib.redirect_stdout(io.StringIO()) as shown, warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            results = run(torch.tensor([1.0, 2.0]).to(device), i)
        results = results if isinstance(results, tuple) else (results,)
        texts = [str(w.message) for w in warned if w.category is UserWarning]
        found += [results[0].tolist(), results[1:], shown.getvalue(), texts]
    left = [logged.getvalue(), state.texts, dict(state.counts), vars(state).get("name")]
    return [*found, *left], getattr(run, "num_traces", 0)


@pytest.mark.parametrize("name", LATE)
def test_a_text_of_a_number_that_changes_is_made_by_each_call(name: str) -> None:
    (found, num_traces), (expected, _) = outcome(LATE[name], "jax", 5), outcome(LATE[name], "cpu", 5)
    assert found == expected
    assert num_traces == 2


@pytest.mark.parametrize("name", NEEDED)
def test_a_text_that_the_function_needs_is_guarded(name: str) -> None:
    (found, _), (expected, _) = outcome(NEEDED[name], "jax", 4), outcome(NEEDED[name], "cpu", 4)
    assert found == expected


def test_an_error_has_the_text_of_its_call() -> None:
    @spmd.compile
    def step(x: torch.Tensor, i: int) -> torch.Tensor:
        reason = f"step {i} is one too many"
        assert i < 2, f"{i} is not below 2"
        if i > 5:
            raise ValueError(reason)
        return x

    x = torch.ones(2).to("jax")
    step(x, 0)
    step(x, 1)
    for i in (2, 3):
        with pytest.raises(AssertionError, match=f"^{i} is not below 2"):
            step(x, i)


def test_a_learning_rate_that_is_printed_needs_no_trace(capsys: pytest.CaptureFixture[str]) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2, device="jax"))], lr=0.1)

    @spmd.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        print(f"lr {optimizer.param_groups[0]['lr']:.2f}")
        return x * optimizer.param_groups[0]["lr"]

    for i in range(5):
        optimizer.param_groups[0]["lr"] = 0.1 * (i + 1)
        step(torch.ones(2).to("jax"))
    assert capsys.readouterr().out.splitlines() == [f"lr {0.1 * (i + 1):.2f}" for i in range(5)]
    assert step.num_traces <= 2


OF_TENSORS: dict[str, Callable[[torch.Tensor], Any]] = {
    "format method": lambda x: "{:.3f} {} {a:>8.1e}".format(x.sum(), x.mean(), a=x.max()),  # noqa: UP032
    "format of an int": lambda x: "{:d} {:05d}".format(x.long().sum(), x.long().max()),  # noqa: UP032
    "format of a width": lambda x: "{:{}.2f}|{{}}".format(x.sum(), 8),
    "format function": lambda x: format(x.sum(), ".2f") + format(x.mean()),
    "an item of a tensor": lambda x: "{0[0]:.1f} {0.shape}".format(x),  # noqa: UP032
    "%": lambda x: "loss %.2f" % x.sum(),  # noqa: UP031
    "% of several": lambda x: "%d of %.1e %% %s" % (x.sum(), x.mean(), "steps"),  # noqa: UP031
    "% by name": lambda x: "%(a).2f %(b)s" % {"a": x.sum(), "b": 3},  # noqa: UP031
    "% of an int": lambda x: "%d %x" % (x.long().sum(), x.long().max()),  # noqa: UP031
    "joined": lambda x: "/".join(["%.1f" % v for v in x]),  # noqa: UP031
    "printed": lambda x: print("loss {:.2f}".format(x.sum()), "%.3f" % x.mean()),  # noqa: UP031, UP032
    "math": lambda x: (math.sqrt(x.sum()), math.isfinite(x.mean()), math.floor(x.mean())),
}


@pytest.mark.parametrize("name", OF_TENSORS)
@pytest.mark.parametrize("is_marked", [False, pytest.param(True, marks=pytest.mark.multidevice(num=8))])
def test_a_number_in_a_tensor_is_formatted_when_the_call_ends(name: str, is_marked: bool, capsys: pytest.CaptureFixture[str]) -> None:
    fn = OF_TENSORS[name]
    step = spmd.compile(fn)
    values = [torch.arange(8.0) * k + 0.25 for k in (1, 3, 2)]
    expected, shown = list(map(fn, values)), capsys.readouterr().out
    mesh = Mesh(range(8), (4, 2), ("data", "model")) if is_marked else None
    found = [step(spmd.mark_sharding(x.to("jax"), mesh, ("data",)) if mesh else x.to("jax")) for x in values]
    assert (found, capsys.readouterr().out) == (expected, shown)
    assert step.num_traces == 1


WRONG: dict[str, Callable[[torch.Tensor], Any]] = {
    "too few": lambda x: "%.2f %.2f" % x.sum(),  # noqa: UP031
    "too many": lambda x: "%.2f" % (x.sum(), x.mean()),  # noqa: F507, UP031
    "wrong type": lambda x: "{:d}".format(x.sum()),  # noqa: UP032
    "no field": lambda x: "{:.2f} {:.2f}".format(x.sum()),  # noqa: F524
    "open brace": lambda x: "{:.2f} {".format(x.sum()),  # noqa: F521
    "all elements": lambda x: "%.2f" % x,  # noqa: UP031
    "a format of elements": lambda x: "{:.2f}".format(x),  # noqa: UP032
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_format_of_a_number_in_a_tensor_raises_what_python_raises(name: str) -> None:
    x = torch.arange(8.0)
    with pytest.raises(Exception, match=".") as expected:
        WRONG[name](x)
    with pytest.raises(type(expected.value)):
        spmd.compile(WRONG[name])(x.to("jax"))


@pytest.mark.parametrize("fn", [lambda x: "%s" % x.sum(), lambda x: "{!r}".format(x.sum()), lambda x: f"{x.sum()!s}"])  # noqa: UP031, UP032
def test_the_text_of_a_tensor_itself_is_refused(fn: Callable[[torch.Tensor], str]) -> None:
    with pytest.raises(spmd.TraceError, match="was printed or made a string"):
        spmd.compile(fn)(torch.arange(8.0).to("jax"))
