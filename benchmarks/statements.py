"""Compares compiled functions with CPU torch on statements that read and write Python objects: each text with each kind of object.

    make statements
    python -m benchmarks.statements --kinds writes,attributes --every 10
    python -m benchmarks.statements --kinds updates --only "int float"

The texts are in benchmarks/statement_texts. A case is one of them and one object. It is called several times on CPU torch and, compiled,
on device "jax". After each call the result and all state are compared: values, dtypes, types and the keys of objects. A case ends with the
first exception, since what a function writes before one is undone; "impossible" ones raise an exception on the CPU too. The results of
all cases are written to benchmarks/results/statements.json, those of some only to the file of `--json`.
"""

from __future__ import annotations

import argparse
import collections
import enum
import itertools
import json
import math
import textwrap
import time
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

import spmd
from benchmarks.statement_states import Space, for_expressions, for_programs, for_training, space

ROOT = Path(__file__).resolve().parents[1]
TEXTS = ROOT / "benchmarks" / "statement_texts"
RESULTS = ROOT / "benchmarks" / "results" / "statements.json"


class Case(NamedTuple):
    """One text with one object.

    Attributes:
        kind, name: for the record.
        setup: puts the objects into the variables of the text's module.
        source: defines `step(x)`.
        state: the names of the variables that are compared.
        between: changes state before call `i`.
        calls: number of calls.
        x: gives the argument of call `i`.
    """

    kind: str
    name: str
    setup: Callable[[Space], None]
    source: str
    state: tuple[str, ...]
    between: Callable[[Space, int], None] = lambda made, i: None
    calls: int = 4
    x: Callable[[int], torch.Tensor] = lambda i: torch.tensor([1.0, 2.0]) * (i + 1)


def texts(name: str) -> list[str]:
    """The texts of one file."""
    return (TEXTS / f"{name}.txt").read_text(encoding="utf-8").strip("\n").split("\n---\n")


def named(name: str) -> dict[str, str]:
    """The texts of one file whose first lines are names."""
    return {title.removeprefix("# "): rest for title, _, rest in (text.partition("\n") for text in texts(name))}


def _function(body: str, result: str, names: str = "", name: str = "step(x)") -> str:
    return "\n".join((f"def {name}:", textwrap.indent("\n".join(filter(None, (names, body, result))), "    "), ""))


def _evaluated(name: str, text: str) -> Callable[[Space], None]:
    return lambda made: exec(f"{name} = {text}", made)


def reads() -> Iterator[Case]:
    def change(made: Space, i: int) -> None:
        if i == 2:
            made["c"][1] = 7

    for (title, text), body in itertools.product(named("containers").items(), texts("reads")):
        source = _function(body, "", name="body()") + _function("", "return x * body()")
        yield Case("reads", f"{title}: {body}", _evaluated("c", text), source, (), change)


def writes() -> Iterator[Case]:
    for (title, text), body in itertools.product(named("containers").items(), texts("writes")):
        source = _function(body, "return x * 2", "global c").replace("bump(", "bump_item(")
        yield Case("writes", f"{title}: {body}", _evaluated("c", text), source, ("c",))


def attributes() -> Iterator[Case]:
    def setup(text: str) -> Callable[[Space], None]:
        return lambda made: exec(f"{text}\no = make()", made)

    for (title, text), body in itertools.product(named("holders").items(), texts("attributes")):
        yield Case("attributes", f"{title}: {body}", setup(text), _function(body, "return x * 2"), ("o", "g", "h"))


def updates() -> Iterator[Case]:
    for (title, text), body, result in itertools.product(named("numbers").items(), texts("updates"), ("x * 2", "x * o.k")):
        if title == "tup" and result == "x * o.k":  # an array, which no tensor of an accelerator can be multiplied by
            continue
        setup = _evaluated("o", f"types.SimpleNamespace(k={text})")
        yield Case("updates", f"{title}: {body}; {result}", setup, _function(body, f"return {result}"), ("o",))


def expressions() -> Iterator[Case]:
    def change(made: Space, i: int) -> None:
        made["o"].n, made["o"].p = 1 + i % 3, 0.25 + 0.2 * i

    def setup(made: Space) -> None:
        made["o"] = for_expressions(made["device"])

    for body in texts("expressions"):
        yield Case("expressions", body, setup, _function("", f"return {body}"), (), change)


def gradients() -> Iterator[Case]:
    """The gradient of each expression."""

    def setup(made: Space) -> None:
        made["o"] = for_expressions(made["device"])
        made["o"].t.requires_grad_()

    def change(made: Space, i: int) -> None:
        made["o"].n, made["o"].p = 1 + i % 3, 0.25 + 0.2 * i

    for body in texts("expressions"):
        source = _function(f"y = {body}", "return torch.autograd.grad((y * y).sum(), o.t)[0]")
        yield Case("gradients", body, setup, source, (), change)


def programs() -> Iterator[Case]:
    def setup(made: Space) -> None:
        made["o"] = for_programs(made["device"])

    for body in texts("programs"):
        yield Case("programs", body, setup, _function(body, ""), ("o", "G"), calls=5)


def in_place() -> Iterator[Case]:
    """In-place operators of a tensor and a number that changes. The texts have `+=` for all of them, besides that of the count."""

    def setup(made: Space) -> None:
        made["o"] = for_programs(made["device"])

    for operator, body in itertools.product(("+=", "-=", "*=", "/=", "//=", "%=", "**=", "|=", "<<="), texts("in_place")):
        text = body.replace("+=", operator).replace(f"o.n {operator} 1", "o.n += 1")
        yield Case("in_place", text, setup, _function(text, "return x * 2"), ("o",))


def training() -> Iterator[Case]:
    def setup(made: Space) -> None:
        made["S"], made["grads"] = for_training(made["device"])

    def batch(i: int) -> torch.Tensor:
        return torch.linspace(-1, 1, 8).reshape(2, 4) * (1 + i / 10)

    for body in texts("training"):
        yield Case("training", body, setup, _function(body, "return loss.detach()"), ("S",), calls=7, x=batch)


KINDS: dict[str, Callable[[], Iterator[Case]]] = {
    kind.__name__: kind for kind in (reads, writes, attributes, updates, expressions, gradients, in_place, programs, training)
}


def content(value: Any, depth: int = 0) -> Any:
    """What a value holds, as lists of tensors, numbers and texts."""
    if depth > 4:
        return "deep"
    if isinstance(value, torch.Tensor):
        return [value.detach().cpu().clone(), content(vars(value), depth + 1)]
    if isinstance(value, np.ndarray):
        return [str(value.dtype), value.tolist() if value.dtype != object else [content(v, depth + 1) for v in value.tolist()]]
    if isinstance(value, nn.Module):
        tensors = [content(t) for t in (*value.parameters(), *value.buffers())]
        return [tensors, value.training, [p.requires_grad for p in value.parameters()], _of_object(value, depth)]
    if isinstance(value, torch.optim.Optimizer):
        return [[group["lr"] for group in value.param_groups], [content(list(s.values()), depth + 1) for s in value.state.values()]]
    if isinstance(value, (list, tuple, collections.deque, collections.UserList, bytearray, memoryview)):
        return [type(value).__name__, [content(v, depth + 1) for v in value], _of_object(value, depth)]
    if isinstance(value, (set, frozenset)):
        return sorted(map(repr, value))
    if isinstance(value, (dict, collections.UserDict, collections.ChainMap)):
        return [[content(k, depth + 1), content(v, depth + 1)] for k, v in value.items()]
    if isinstance(value, (bool, int, float, complex, str, bytes, type(None))):
        return [type(value).__name__, value if isinstance(value, float) else repr(value)]
    return [type(value).__name__, value.name if isinstance(value, enum.Enum) else _of_object(value, depth)]


def _of_object(value: Any, depth: int) -> Any:
    if isinstance(value, (types.FunctionType, type)) and depth:
        return []
    slots = [s for s in getattr(type(value), "__slots__", ()) if not s.startswith("__")]
    held = {name: getattr(value, name, "unset") for name in slots} | dict(getattr(value, "__dict__", {}))
    return [[name, content(v, depth + 1)] for name, v in held.items() if not name.startswith("_") or name == "_k"]


def are_same(a: Any, b: Any, has_items: bool) -> bool:
    """Whether two contents are the same: tensors at torch's own tolerances, and Python floats exactly.

    Args:
        has_items: the floats may have been computed from items of tensors of float32; they are compared at its tolerance.
    """
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        try:
            torch.testing.assert_close(b, a, equal_nan=True)
        except AssertionError:
            return False
        return True
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (math.isnan(a) and math.isnan(b)) or (has_items and are_same(torch.tensor(a), torch.tensor(b), has_items))
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(are_same(x, y, has_items) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and a == b


def after_calls(case: Case, device: str, wrap: Callable[[Any], Any]) -> list[Any]:
    """Results and state after each call, up to the first exception."""
    made, found = space(device), list[Any]()
    case.setup(made)
    before = {name: made.get(name) for name in case.state}
    exec(case.source, made)
    step = wrap(made["step"])
    for i in range(case.calls):
        try:
            case.between(made, i)
            found.append(content(step(case.x(i).to(device))))
        except spmd.SpmdError:
            raise
        except Exception as error:
            return [*found, type(error).__name__]
        for name in case.state:
            found += [content(made.get(name)), made.get(name) is before[name]]
    return found


def outcome(case: Case) -> str:
    """ "equal", "impossible" (on the CPU too), "refused: ...", "wrong: ..." or "error: ..."."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = after_calls(case, "cpu", lambda fn: fn)
        if len(expected) == 1:
            return "impossible"
        try:
            found = after_calls(case, "jax", lambda fn: spmd.compile(fn, max_retraces=50, keep_grads=case.kind == "training"))
        except spmd.SpmdError as error:
            return f"refused: {str(error).splitlines()[0]}"
        except Exception as error:
            return f"error: {type(error).__name__}: {str(error)[:200]}"
    has_items = ".item()" in case.source or "float(x" in case.source
    if are_same(expected, found, has_items):
        return "equal"
    pairs = enumerate(zip(expected, found, strict=False))
    i = next((i for i, (a, b) in pairs if not are_same(a, b, has_items)), min(len(expected), len(found)))
    return f"wrong: {str(expected[i : i + 1])[:300]} is {str(found[i : i + 1])[:300]}"


def run(kinds: list[str], every: int, only: list[str]) -> dict[str, dict[str, str]]:
    """The outcomes by kind and case. `every`: one case in so many. `only`: objects that are used; all if empty."""
    found: dict[str, dict[str, str]] = {}
    for kind in kinds:
        cases = (case for case in KINDS[kind]() if not only or case.name.partition(":")[0] in only)
        for case in itertools.islice(cases, 0, None, every):
            found.setdefault(kind, {})[case.name] = result = outcome(case)
            if result.startswith(("wrong", "error")):
                print(f"{case.kind}, {case.name!r}: {result}", flush=True)
    return found


def summary(found: dict[str, dict[str, str]], seconds: float) -> dict[str, Any]:
    """The record: counts by kind, refusals by message, and the cases that were wrong."""
    flat = [(f"{kind}, {name}", result) for kind, results in found.items() for name, result in results.items()]
    refusals = collections.Counter(result for _, result in flat if result.startswith("refused"))
    return {
        "seconds": round(seconds),
        "counts": {kind: collections.Counter(r.partition(":")[0] for r in results.values()) for kind, results in found.items()},
        "refusals": dict(refusals.most_common()),
        "not_equal": {name: result for name, result in flat if result.startswith(("wrong", "error"))},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=",".join(KINDS), metavar="K,K")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="run one case in N")
    parser.add_argument("--only", default="", metavar="'O O'", help="names of the objects")
    parser.add_argument("--json", type=Path, metavar="OUT")
    chosen = parser.parse_args()
    is_complete = all(getattr(chosen, name) == parser.get_default(name) for name in ("kinds", "every", "only"))
    began = time.monotonic()
    found = run(chosen.kinds.split(","), chosen.every, chosen.only.split())
    record = summary(found, time.monotonic() - began)
    out = chosen.json or (RESULTS if is_complete else None)
    if out is not None:
        out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for kind, counts in record["counts"].items():
        print(f"{kind}: " + ", ".join(f"{count} {result}" for result, count in counts.most_common()))
    for name, result in record["not_equal"].items():
        print(f"{name}\n    {result}")
    if record["not_equal"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
