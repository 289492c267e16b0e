"""Functions of Python that are given numbers of the device: computed when a call ends, in every call, as Python computes them."""

import collections
import copy
import dataclasses
import datetime
import decimal
import fractions
import functools
import json
import math
import operator
import re
import statistics
import string
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import spmd

NAMES = ["zero", "one", "two"]
GAMMA: Any = math.gamma
CASTS: list[Any] = [str]
TABLE = np.array([0.1, 0.2, 0.3])
INPUTS = ([0.25, -1.3, 2.0], [3.75, 1.1, -0.5], [-0.125, 0.5, 0.7], [1.9, 0.0, 8.5])


class Meter:
    def __init__(self) -> None:
        self.total = 0.0
        self.count = 0
        self.last: Any = None

    def __str__(self) -> str:
        return f"{self.last:.3f} ({self.average:.3f})"

    def update(self, value: float, n: int = 1) -> None:
        self.last = value
        self.total += value * n
        self.count += n

    @property
    def average(self) -> float:
        return self.total / max(self.count, 1)


@dataclasses.dataclass
class Record:
    loss: float
    text: str


def state() -> types.SimpleNamespace:
    return types.SimpleNamespace(log=[], best=0.0, history={"loss": [], "text": []}, meter=Meter(), last=None, steps=0)


def count_and_log(s: Any, x: torch.Tensor) -> None:
    s.steps += 1
    s.log.append((s.steps, round(x.max().item(), 3)))


def count_in_a_text(s: Any, x: torch.Tensor) -> str:
    s.steps += 1
    s.log.append(f"step {s.steps:03d}: {x.max().item():.3f} ({len(s.log)})")
    return "%d: %.2f" % (s.steps, x.max().item())  # noqa: UP031


def add_to_list(s: Any, x: torch.Tensor) -> None:
    s.log += [f"{x.max().item():.1f}"]


def matched(s: Any, x: torch.Tensor) -> str:
    match round(x.max().item(), 1):
        case int():
            return "int"
        case float():
            return "float"
        case _:
            return "none"


def matched_by_value(s: Any, x: torch.Tensor) -> Any:
    match round(x.max().item(), 1):
        case float(value):
            return value
        case _:
            return None


def store_twice(s: Any, x: torch.Tensor) -> Any:
    value = sorted([x.max().item(), 0.5])
    s.log.append(value)
    s.last = value
    return value


def total_of_rounded(s: Any, x: torch.Tensor) -> float:
    total = 0
    for i in range(3):
        total += round(x[i].item(), 1)
    return total


Case = Callable[[Any, Any], Any]  # (state, tensor) -> result
VALUES: dict[str, Case] = {
    "round to digits": lambda s, x: round(x.max().item(), 2),
    "round to an int": lambda s, x: round(x.max().item()),
    "round of a product": lambda s, x: round(x.max().item() * 100 / 3, 1),
    "max with an int": lambda s, x: max(0, x.min().item()),
    "min with two types": lambda s, x: min(x.max().item(), 1, 2.5),
    "max of a rounded number and another": lambda s, x: max(round(x[0].item(), 1), x[1].item()),
    "sorted": lambda s, x: sorted([x[0].item(), x[1].item(), 0.3]),
    "sorted, reversed, of two types": lambda s, x: sorted([x[0].item(), 1, x[1].item()], reverse=True),
    "sorted generator": lambda s, x: sorted(v.item() for v in x),
    "sorted tuples": lambda s, x: sorted([(x[0].item(), "a"), (x[1].item(), "b")])[-1][1],
    "unpacked": lambda s, x: (lambda low, high: (high, low))(*sorted([x[0].item(), x[1].item()])),
    "sqrt": lambda s, x: math.sqrt(abs(x.min().item())),
    "root of a rounded number": lambda s, x: math.sqrt(abs(round(x.min().item(), 2))),
    "percentage": lambda s, x: 100.0 * (x > 0).sum().item() / 3,
    "quotients of one number": lambda s, x: (lambda n: (n / 7, n / 7 / 3, -(n / 49), math.exp(n / 7)))(x.max().item()),
    "sum of numbers": lambda s, x: sum(x.tolist()) / 3,
    "many operations": lambda s, x: functools.reduce(lambda a, b: a + b, [x[0].item() * i for i in range(40)]) * 0.5,
    "power": lambda s, x: abs(x.min().item()) ** 0.5,
    "isnan": lambda s, x: math.isnan(x.max().item()),
    "isinf": lambda s, x: math.isinf(x.max().item() * math.inf),
    "isfinite": lambda s, x: math.isfinite(x.max().item()),
    "isclose": lambda s, x: math.isclose(x.max().item(), 2.0),
    "hypot": lambda s, x: math.hypot(x[0].item(), x[1].item()),
    "fsum": lambda s, x: math.fsum([x[0].item(), x[1].item(), 0.1]),
    "modf": lambda s, x: math.modf(x.max().item()),
    "log with a base": lambda s, x: math.log(x.max().item() + 1, 2),
    "floor": lambda s, x: math.floor(round(x.max().item(), 1)),
    "divmod": lambda s, x: divmod(round(x.max().item(), 1), 2),
    "gamma": lambda s, x: math.gamma(x.max().item()),
    "arithmetic on a rounded number": lambda s, x: -(round(x.max().item(), 1) * 2 + 1 - 3 / 7) // 2 % 5,
    "number before a rounded one": lambda s, x: 10 - round(x.max().item(), 1),
    "device number before a rounded one": lambda s, x: x[0].item() + round(x.max().item(), 1),
    "sum of rounded numbers": lambda s, x: sum(round(v.item(), 1) for v in x),
    "sum of a list": lambda s, x: sum([round(x[0].item(), 1), x[1].item(), 2]) / 3,
    "loop that adds": total_of_rounded,
    "comparison": lambda s, x: round(x.max().item(), 1) > 2,
    "comparison with itself": lambda s, x: round(x[0].item(), 1) == round(x[0].item(), 1),
    "int of a sum": lambda s, x: int((x > 0).sum().item()),
    "int of a rounded number": lambda s, x: int(round(x.max().item(), 1)),
    "float of an int": lambda s, x: float(x.argmax().item()) / 3,
    "float of a comparison": lambda s, x: float(x.max().item() > 3),
    "bool": lambda s, x: bool(x.argmax().item()),
    "bool of a rounded number": lambda s, x: bool(round(x.max().item())),
    "not": lambda s, x: operator.not_(round(x.max().item())),
    "complex": lambda s, x: complex(x[0].item(), 1.0),
    "power modulo": lambda s, x: pow(x.argmax().item() + 2, 3, 5),
    "binary": lambda s, x: bin(x.argmax().item()) + hex(x.argmax().item()),
    "character": lambda s, x: chr(97 + x.argmax().item()),
    "mean": lambda s, x: statistics.mean([x[0].item(), x[1].item()]),
    "fmean": lambda s, x: statistics.fmean([x[0].item(), x[1].item()]),
    "median": lambda s, x: statistics.median([x[0].item(), x[1].item(), 0.5]),
    "deviation": lambda s, x: statistics.stdev([x[0].item(), x[1].item(), 0.5]),
    "decimal": lambda s, x: decimal.Decimal(x.max().item()),
    "fraction": lambda s, x: fractions.Fraction(x.max().item()),
    "time delta": lambda s, x: datetime.timedelta(seconds=round(x.max().item())),
    "str": lambda s, x: str(x.max().item()),
    "repr of a list": lambda s, x: repr([x[0].item(), {"a": round(x[1].item(), 1)}]),
    "format": lambda s, x: format(x.max().item(), ".3e"),
    "method format": lambda s, x: "{:.3f} of {n}, {}".format(x.max().item(), "a", n=x.argmax().item()),
    "template": lambda s, x: string.Template("$x of ${n}, $$$name").substitute({"x": x.max().item(), "n": x.argmax().item()}, name="a"),
    "template of a text": lambda s, x: string.Template(f"{x.max().item():.1f} $a $b").safe_substitute(a=str(x[0].item())),
    "percent": lambda s, x: "%.4f" % x.max().item(),  # noqa: UP031
    "percent with a tuple": lambda s, x: "%s: %6.2f %d" % ("loss", x.max().item(), x.argmax().item()),  # noqa: UP031
    "percent with a dict": lambda s, x: "%(loss).2f" % {"loss": x.max().item()},  # noqa: UP031
    "joined": lambda s, x: ", ".join([str(x[0].item()), "b"]),
    "joined generator": lambda s, x: ", ".join(str(round(v.item(), 2)) for v in x),
    "f-string": lambda s, x: f"{x.max().item():.4f}",
    "f-string without a format": lambda s, x: f"{x.max().item()}",
    "f-string with a name": lambda s, x: f"{round(x.max().item(), 2)=}",
    "f-string of several": lambda s, x: f"loss {x.max().item():.3f} at {x.argmax().item():03d}, {NAMES[0]!r:>8}: {x[0].item() > 0}",
    "f-string with a width": lambda s, x: f"[{x.max().item():{4 + x.argmax().item()}.{2}f}]",
    "f-string with a conversion": lambda s, x: f"{str(x.max().item())!r:>30}{x.max().item()!s}{round(x[0].item())!a}",
    "f-string with a condition": lambda s, x: f"{'a' if len(NAMES) > 1 else 'b'} {x.max().item():.2f} {x[0].item() if NAMES else 1}",
    "f-string in an f-string": lambda s, x: f"<{f'{x.max().item():.1f}'} {f'{len(NAMES)}'}>",
    "f-string of a tensor": lambda s, x: f"loss {x.max():.3f} {x.argmax()}",
    "f-string of a list": lambda s, x: f"{[round(x[0].item(), 1), 'a']} {(x[1].item(),)}",
    "f-string of calls": lambda s, x: f"{max(x.max().item(), 0):.1f} {', '.join(f'{v.item():.1f}' for v in x)}",
    "f-string of a percentage": lambda s, x: f"{(x > 0).sum().item() / 3:.1%}",
    "f-string and text": lambda s, x: "a " + f"{x[0].item():.1f}" + " b" + f"{s.steps}",
    "text and text": lambda s, x: "loss " + str(round(x.max().item(), 2)) + "!",
    "methods of a text": lambda s, x: str(x.max().item()).rjust(12).replace(".", ",").upper(),
    "method of a float": lambda s, x: round(x.max().item(), 0).is_integer(),
    "length of a text": lambda s, x: len(str(x.max().item())),
    "part of a text": lambda s, x: str(x.max().item())[:3],
    "item of a list": lambda s, x: NAMES[x.argmax().item()],
    "item of a tuple, negative": lambda s, x: ("a", "b", "c")[-1 - x.argmax().item()],
    "item of a dict": lambda s, x: {0: "cat", 1: "dog", 2: "cow"}[x.argmax().item()],
    "item of a dict by get": lambda s, x: {0: "cat", 1: "dog"}.get(x.argmax().item(), "none"),
    "item of a text": lambda s, x: "abc"[x.argmax().item()],
    "item of a range": lambda s, x: range(3, 9)[x.argmax().item()],
    "item of an array": lambda s, x: TABLE[x.argmax().item()],
    "item at a computed place": lambda s, x: NAMES[min(2, round(abs(x[0].item())))],
    "tolist": lambda s, x: x.tolist(),
    "tolist of ints, in rows": lambda s, x: (x.reshape(3, 1) > 0).long().tolist(),
    "tolist of one": lambda s, x: x.argmax().tolist(),
    "tolist of none": lambda s, x: x[:0].tolist(),
    "tolist in a computation": lambda s, x: [round(v, 2) for v in (x * x.tolist()[0]).tolist()],
    "labels of a tolist": lambda s, x: [NAMES[i] for i in x.argsort().tolist()],
    "text of a tolist": lambda s, x: f"{x.tolist()} {x.argsort().tolist()!s}",
    "iteration": lambda s, x: {name: round(v.item(), 2) for name, v in zip(NAMES, x, strict=True)},
    "json": lambda s, x: json.dumps({"loss": round(x.max().item(), 3), "n": [1, x.argmax().item()]}, indent=1),
    "numpy's float": lambda s, x: np.float64(x.max().item()),
    "numpy's int": lambda s, x: np.int32(x.argmax().item()),
    "numpy's mean": lambda s, x: np.mean([x[0].item(), x[1].item()]),
    "function of numpy": lambda s, x: np.sqrt(abs(x.max().item())),
    "beside numpy's number": lambda s, x: np.float32(2) * x.max().item(),
    "method of numpy's number": lambda s, x: np.float64(x.max().item()).item(),
    "appended": lambda s, x: s.log.append(round(x.max().item(), 4)),
    "appended to a history": lambda s, x: s.history["loss"].append(round(x.max().item(), 4)),
    "kept best": lambda s, x: setattr(s, "best", max(s.best, round(x.max().item(), 3))),
    "kept sum": lambda s, x: setattr(s, "best", s.best + round(x.max().item(), 3)),
    "meter": lambda s, x: s.meter.update(round(x.max().item(), 3), 3),
    "meter of a device number": lambda s, x: s.meter.update(x.max().item(), 3),
    "average of a meter": lambda s, x: (s.meter.update(round(x[0].item(), 3)), round(s.meter.average, 2))[1],
    "text of a meter": lambda s, x: (s.meter.update(x.max().item()), str(s.meter), f"{s.meter} {s.meter!s:>20}")[1],
    "text of a meter in an f-string": lambda s, x: (s.meter.update(round(x.max().item(), 2), 2), f"{s.meter} in")[1],
    "record": lambda s, x: Record(round(x.max().item(), 2), f"{x.min().item():.1f}"),
    "replaced record": lambda s, x: dataclasses.asdict(dataclasses.replace(Record(1.0, "a"), loss=round(x.max().item(), 2))),
    "copied": lambda s, x: (copy.deepcopy([round(x.max().item(), 2)]), copy.copy({"a": str(x[0].item())})),
    "updated dict": lambda s, x: s.history.update(loss=[round(x.max().item(), 2)], text=f"{x[0].item():.1f}"),
    "extended list": lambda s, x: s.log.extend([round(v, 1) for v in x.tolist()]),
    "list added to": add_to_list,
    "popped": lambda s, x: (s.log.append(round(x.max().item(), 1)), s.log.pop())[1],
    "last of a log": lambda s, x: (s.log.append(round(x.max().item(), 1)), (len(s.log), s.log[-1]))[1],
    "mapped": lambda s, x: (list(map(str, x.tolist())), [*map(round, x.tolist())]),
    "zipped and enumerated": lambda s, x: ([f"{i}:{v:.2f}" for i, v in enumerate(x.tolist())], dict(zip("abc", x.tolist(), strict=True))),
    "reduced": lambda s, x: functools.reduce(lambda a, b: a + b, [round(v, 1) for v in x.tolist()]),
    "array": lambda s, x: (np.array(x.tolist()).tolist(), np.array([x[0].item()]).mean(), np.float32(x[0].item()).dtype.name),
    "operations on ints": lambda s, x: (lambda n: (n << 1, n | 4, n & 1, n ^ 3, ~n, n // 2, n % 2, n**2, 2**n))(abs(round(x.max().item()))),
    "comparisons": lambda s, x: (lambda n: (n < 1, n >= 0.5, n != 2, n == n, n > 1))(round(x.max().item(), 1)),
    "chain": lambda s, x: str(round(float(f"{x.max().item():.3f}"), 2)).split(".")[0],
    "repeated text": lambda s, x: "#" * abs(round(x.max().item())),
    "perplexity": lambda s, x: round(math.exp(min(round(x.max().item(), 2), 20)), 2),
    "bools": lambda s, x: (bool((x > 0).any().item()), (x > 0).tolist(), str((x > 0).any().item())),
    "none": lambda s, x: (round(x.max().item(), 1) is None, CASTS[0](x.max().item()) is not None),
    "closure": lambda s, x: (lambda value: lambda: value)(round(x.max().item(), 2))(),
    "nested results": lambda s, x: {"a": [{"b": (round(x.max().item(), 1), f"{x[0].item():.1f}")}]},
    "dict of results": lambda s, x: {"loss": round(x.max().item(), 2), "label": NAMES[x.argmax().item()]},
    "deque": lambda s, x: collections.deque([round(x[0].item(), 1), 2], maxlen=1),
    "count and log": count_and_log,
    "count in a text": count_in_a_text,
    "class pattern": matched,
    "stored twice": store_twice,
    "class": lambda s, x: (
        type(round(x.max().item(), 1)),
        isinstance(CASTS[0](x.max().item()), str),
        isinstance(round(x[0].item()), float),
    ),
}


def is_same(ours: Any, theirs: Any) -> bool:
    """Whether two results of Python have the same types and values."""
    if type(ours) is not type(theirs):
        return False
    if isinstance(theirs, (list, tuple, collections.deque)):
        return len(ours) == len(theirs) and all(map(is_same, ours, theirs))
    if isinstance(theirs, dict):
        return list(ours) == list(theirs) and all(is_same(ours[key], theirs[key]) for key in theirs)
    if isinstance(theirs, (types.SimpleNamespace, Meter, Record)):
        return is_same(vars(ours), vars(theirs))
    return ours == theirs or (ours != ours and theirs != theirs)


def compared(fn: Case, inputs: Any = INPUTS) -> Any:
    """Run `fn` on the CPU and as a compiled function, and compare results and states. Returns the compiled function."""
    ours, theirs = state(), state()
    step = spmd.compile(lambda x: fn(ours, x))
    for values in inputs:
        found, expected = step(torch.tensor(values).to("jax")), fn(theirs, torch.tensor(values))
        assert is_same(found, expected), (found, expected)
        assert is_same(ours, theirs), (ours, theirs)
    return step


@pytest.mark.parametrize("name", VALUES)
def test_a_function_of_python_gives_what_python_gives_in_every_call(name: str) -> None:
    assert compared(VALUES[name]).num_traces <= 2


def test_a_value_that_is_stored_twice_is_one_object() -> None:
    log: list[Any] = []

    @spmd.compile
    def step(x: torch.Tensor) -> Any:
        made = {"loss": round(x.max().item() * 1000, 2)}
        text = str(made["loss"])
        log.append(text)
        return made, made["loss"], text

    for values in INPUTS[:2]:
        made, loss, text = step(torch.tensor(values).to("jax"))
        assert made["loss"] is loss and log[-1] is text
    assert step.num_traces == 1


RAISES: dict[str, tuple[Case, type[Exception]]] = {
    "root": (lambda s, x: math.sqrt(round(x[0].item(), 2)), ValueError),
    "division": (lambda s, x: 1 / round(x[0].item() * 0), ZeroDivisionError),
    "index": (lambda s, x: NAMES[x.argmax().item() + 2], IndexError),
    "key": (lambda s, x: {0: "a", 7: "b"}[x.argmax().item() + 1], KeyError),
    "conversion": (lambda s, x: round(x[0].item() * math.nan), ValueError),
}


@pytest.mark.parametrize("name", RAISES)
def test_an_error_of_pythons_function_is_raised_when_the_call_ends(name: str) -> None:
    fn, kind = RAISES[name]
    step = spmd.compile(lambda x: fn(None, x))
    values = [-1.0, -1.5, -0.25]
    with pytest.raises(kind) as expected:
        fn(None, torch.tensor(values))
    with pytest.raises(kind) as found:
        step(torch.tensor(values).to("jax"))
    assert type(found.value) is type(expected.value) and found.value.args == expected.value.args
    assert "test_pending.py" in found.value.__notes__[0] and "when the call of the compiled function ended" in found.value.__notes__[0]


RAISE_TYPE_ERRORS: list[Callable[[Any], Any]] = [
    lambda x: GAMMA(str(x[0].item())),
    lambda x: "%d %d" % x[0].item(),  # noqa: UP031
]


def test_a_type_error_is_raised_at_its_line() -> None:
    with pytest.raises(TypeError, match="not 'str'|real number"):
        spmd.compile(RAISE_TYPE_ERRORS[0])(torch.ones(2).to("jax"))
    with pytest.raises(ValueError, match="Unknown format code 'd'"):
        spmd.compile(lambda x: f"{x[0].item():d}")(torch.ones(2).to("jax"))
    with pytest.raises(TypeError, match="format"):
        spmd.compile(RAISE_TYPE_ERRORS[1])(torch.ones(2).to("jax"))


def handled(x: Any) -> float:
    try:
        return math.gamma(x[0].item())
    except ValueError:
        return 0.0


def handled_by_a_caller(x: Any) -> str:
    def name() -> str:
        return NAMES[x.argmax().item()]

    try:
        return name()
    except (OSError, LookupError):
        return "none"


def handled_in_any_case(x: Any) -> float:
    try:
        return math.gamma(x[0].item())
    except:  # noqa: E722
        return 0.0


def not_handled(x: Any) -> Any:
    try:
        with torch.no_grad():
            return round(x[0].item()), math.gamma(abs(x[0].item()) + 1), NAMES[x.argmax().item()]
    except (OSError, RuntimeError):
        return 0.0
    finally:
        x.sum()


@pytest.mark.parametrize("fn", [handled, handled_by_a_caller, handled_in_any_case])
def test_a_function_that_handles_the_error_is_refused(fn: Callable[[Any], Any]) -> None:
    with pytest.raises(spmd.TraceError, match=r"(?s)handles the error that it may raise.*the 'except' at test_pending.py:\d+.*fix: return"):
        spmd.compile(fn)(torch.ones(3).to("jax"))


def test_handlers_of_other_errors_do_not_count() -> None:
    compared(lambda s, x: not_handled(x))


class Described:
    def __init__(self, value: Any) -> None:
        self.value = value

    def __str__(self) -> str:
        return str(self.value)

    def __format__(self, spec: str) -> str:
        return str(self.value) + spec


class Percents(string.Template):
    delimiter = "%"


class Hashed:
    def __init__(self, number: int) -> None:
        self.number = number

    def __hash__(self) -> int:
        return self.number


NEEDED: dict[str, tuple[Case, str]] = {
    "branch": (lambda s, x: 1 if round(x[0].item(), 1) > 1 else 2, r"bool \(a branch\)"),
    "and": (lambda s, x: round(x[0].item()) and 1, r"bool \(a branch\)"),
    "choice of a block": (lambda s, x: [v for v in [round(x[0].item())] if v], r"bool \(a branch\)"),
    "size": (lambda s, x: torch.ones(round(x[0].item()), device=x.device), "value|int"),
    "range": (lambda s, x: list(range(round(x[0].item()))), "value|int"),
    "key": (lambda s, x: {round(x[0].item()): 1}, "key"),
    "set": (lambda s, x: {str(x[0].item())}, "key"),
    "index of a list that is written": (lambda s, x: s.log.__setitem__(round(x[0].item()), 1), "value|int|number"),
    "operand of a tensor": (lambda s, x: x * round(x[0].item(), 1), "beside a tensor"),
    "operand before a tensor": (lambda s, x: round(x[0].item(), 1) * x, "beside a tensor"),
    "argument of a tensor's method": (lambda s, x: x.clamp(max=round(x[0].item(), 1)), "value|number"),
    "iteration": (lambda s, x: list(str(x[0].item())), "value|sequence|iterate"),
    "attribute of a list": (lambda s, x: str(x[0].item()).split(".").append("a"), "attribute append"),
    "another library": (lambda s, x: np.random.default_rng(round(x[0].item())), "value"),
    "objects": (lambda s, x: [s, x][x.argmax().item() * 0], "number|may change"),
    "items of two classes": (lambda s, x: ["a", 1][x.argmax().item() * 0], "may change"),
    "none": (lambda s, x: {0: "a"}.get(x.argmax().item()), "may change"),
    "an object beside it": (lambda s, x: json.dumps({"a": s, "b": x[0].item()}), "may change"),
    "membership": (lambda s, x: round(x[0].item()) in [1, 2], r"bool \(a branch\)"),
    "pattern": (matched_by_value, "of a pattern"),
    "comparison of lists": (lambda s, x: [round(x[0].item(), 1)] == [2.0], r"operator.eq\(\).*bool"),
    "hash": (lambda s, x: hash(round(x[0].item())), "an argument of hash"),
    "search": (lambda s, x: [1, 2].index(round(x[0].item())), "an argument of index"),
    "tensor of it": (lambda s, x: torch.tensor(round(x[0].item(), 1)), "an argument of tensor"),
    "callback of a library": (lambda s, x: re.sub("a", lambda _: str(x[0].item()), "a b"), "number or text"),
    "text of an object in a format": (lambda s, x: "{}".format(Described(x[0].item())), "number or text"),  # noqa: UP032
    "format of an object": (lambda s, x: f"{Described(x[0].item()):>9}", "number or text"),
    "template of a subclass": (lambda s, x: Percents("%x").substitute(x=x[0].item()), "number or text"),
    "object beside it in a template": (lambda s, x: string.Template("$x $s").substitute(x=x[0].item(), s=s), "may change"),
    "length of a deque": (lambda s, x: collections.deque("abc", maxlen=round(x[0].item())), "number"),
    "item of a memoryview": (lambda s, x: memoryview(bytearray(1)).__setitem__(0, round(x[0].item())), "number|value"),
    "hash of an object": (lambda s, x: {Hashed(round(x[0].item())): 1}, "number"),
    "hash of an object in C": (lambda s, x: hash(Hashed(int(x.argmax().item()))), "number"),
    "pickle": (lambda s, x: __import__("pickle").dumps(round(x[0].item())), "value"),
}


@pytest.mark.parametrize("name", NEEDED)
def test_a_value_that_python_needs_in_the_trace_is_refused_by_name(name: str) -> None:
    fn, what = NEEDED[name]
    kept = state()
    with pytest.raises(spmd.TraceError, match=what) as raised:
        spmd.compile(lambda x: fn(kept, x))(torch.ones(3).to("jax"))
    assert "test_pending.py" in str(raised.value) and "fix: " in str(raised.value)


def test_several_steps_per_call_are_refused() -> None:
    step = spmd.compile(lambda x: round(x.sum().item(), 1), steps_per_call=2)
    with pytest.raises(spmd.TraceError, match="steps_per_call"):
        step(torch.ones(2, 3).to("jax"))
