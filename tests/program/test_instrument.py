"""Code that tells a recorder what it does gives what the code itself gives, in every form of Python's syntax."""

import importlib
import types
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import bytecode
import pytest
import torch

import spmd
from spmd.program.reads import _hooks, _instructions
from spmd.program.reads._hooks import HOOKS
from spmd.program.reads._instrument import Instrumenter
from spmd.program.reads._pending_texts import f_string
from tests.program.instrumented_forms import FORMS, Derived


def f_string_of(value: Any, spec: Any, conversion: int, is_part: bool) -> Any:
    return f_string(value, spec, conversion)


REPLACING: dict[str, Callable[..., Any]] = {
    "call": lambda fn, *rest: fn,
    "call_ex": lambda fn, *rest: fn,
    "match_class": lambda value, *rest: value,
    **dict.fromkeys(("as_key", "as_hash", "invert"), lambda value: value),
    "formatted": f_string_of,
    "joined": lambda *parts: "".join(parts),
    "contains": lambda item, holder: item,
    "compare": lambda left, right: left,
    "operate": lambda left, right: left,
    "operate_in_place": lambda left, right: left,
    "choice": lambda condition, enters_if: bool(condition) is enters_if,
    "chosen": lambda choice, before, after: after,
}
ITEMS = ("load_item", "load_updated", "store_item", "delete_item")
LIBRARIES = (
    "argparse",
    "ast",
    "collections",
    "dataclasses",
    "enum",
    "functools",
    "inspect",
    "typing",
    "contextlib",
    "textwrap",
    "tokenize",
)


def instrumenter(told: Counter[str]) -> Instrumenter:
    """One whose hooks count how often they are called."""

    def counted(name: str, answer: Callable[..., Any]) -> Callable[..., Any]:
        def hook(*operands: Any) -> Any:
            told[name] += 1
            return answer(*operands)

        return hook

    def item(holder: Any, key: Any) -> Any:
        return key, holder

    given = {**REPLACING, "super_of": HOOKS["super_of"], **dict.fromkeys(ITEMS, item)}
    answers = {name: given.get(name, lambda *operands: None) for name in HOOKS}
    return Instrumenter({name: counted(name, answer) for name, answer in answers.items()}, lambda *given: None)


@pytest.mark.parametrize("name", list(FORMS))
def test_instrumented_code_does_what_the_code_does(name: str) -> None:
    fn, told = FORMS[name], Counter[str]()
    code = instrumenter(told).instrumented(fn.__code__)
    made = types.FunctionType(code, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
    assert repr(made([1, 2, 3])) == repr(fn([1, 2, 3]))
    assert sum(told.values()) > 3
    assert (code.co_name, code.co_firstlineno, code.co_argcount) == (fn.__code__.co_name, fn.__code__.co_firstlineno, 1)


def test_attributes_of_super_are_told() -> None:
    told, seen = Counter[str](), list[tuple[str, str]]()
    rewriting = instrumenter(told)
    rewriting._hooks["load_attr"] = lambda instance, name: seen.append((type(instance).__name__, name))
    code = rewriting.instrumented(Derived.total.__code__)
    total = types.FunctionType(code, Derived.total.__globals__, "total", None, Derived.total.__closure__)
    total.__kwdefaults__ = {"scale": 1}
    assert total(Derived(1), 5, scale=2) == Derived(1).total(5, scale=2)
    assert seen == [("super", "total"), ("super", "kind")]


def generates(x: int) -> Any:
    yield x


async def awaits(x: int) -> Any:
    return x


async def generates_asynchronously(x: int) -> Any:
    yield x


@pytest.mark.parametrize("fn", [generates, awaits, generates_asynchronously, instrumenter])
def test_a_stub_takes_the_place_of_the_code_of_its_kind(fn: Any) -> None:
    stub = instrumenter(Counter()).stub(fn.__code__)
    kinds = 0x20 | 0x80 | 0x200
    assert stub.co_flags & kinds == fn.__code__.co_flags & kinds


@pytest.mark.parametrize("version", [(3, 15), (4, 0)])
def test_a_newer_python_is_refused(version: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_instructions, "VERSION", version)
    with pytest.raises(RuntimeError, match="compiled steps run on Python 3.11 to 3.14") as caught:
        instrumenter(Counter())
    assert f"this is Python {version[0]}.{version[1]}" in str(caught.value)


@pytest.mark.parametrize("name", LIBRARIES)
def test_all_code_of_a_library_can_be_instrumented(name: str) -> None:
    rewrite = instrumenter(Counter()).instrumented
    for value in vars(importlib.import_module(name)).values():
        for fn in vars(value).values() if isinstance(value, type) else [value]:
            if isinstance(fn, types.FunctionType):
                rewrite(fn.__code__)


def test_what_a_kernel_does_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first run of a kernel enters hundreds of jax's context managers, whose code is instrumented. A second trace has as many hooks."""
    told = mock.Mock(wraps=_hooks.without_hooks)
    monkeypatch.setattr(_hooks, "without_hooks", told)
    x, counts = torch.arange(1.0, 8.0).to("jax"), [0]
    for _ in range(2):
        spmd.compile(lambda x: torch.special.i1e(x).logcumsumexp(0))(x)
        counts.append(told.call_count)
    assert counts[1] == counts[2] - counts[1] > 0


PARTS: dict[str, tuple[Callable[..., str], int]] = {
    "all": (lambda a, b: f"{a} and {b:.2f}", 2),
    "alone": (lambda a, b: f"{a:.2f}", 0),
    "inside": (lambda a, b: f"<{f'{a:.1f}'} {b}>", 2),
    "taken by a method": (lambda a, b: f"<{f'{a:.1f}'.upper()} {b}>", 2),
    "taken by a call": (lambda a, b: f"<{len(f'{a:.1f}')} {b}>", 2),
    "taken by an operator": (lambda a, b: f"<{'x' + f'{a:.1f}'} {b}>", 2),
    "format": (lambda a, b: f"{a:{b}.{b}f}", 2),
    "after a condition": (lambda a, b: f"{a} {a if b else b} {b}", 2),
}


@pytest.mark.parametrize("name", PARTS)
def test_the_texts_that_become_a_part_of_a_longer_one_are_found(name: str) -> None:
    fn, num = PARTS[name]
    code = list(_instructions.plain(list(bytecode.Bytecode.from_code(fn.__code__))))
    assert len(_instructions.parts_of_texts(code)) == num


@pytest.mark.parametrize(
    ("name", "arg", "expected"),
    [
        ("FORMAT_VALUE", 0, (1, "", 0)),
        ("FORMAT_VALUE", 6, (2, "", 2)),
        ("FORMAT_SIMPLE", None, (1, "", 0)),
        ("FORMAT_WITH_SPEC", None, (2, "", 0)),
        ("CONVERT_VALUE", 3, (1, None, 3)),
    ],
)
def test_an_instruction_of_an_f_string_is_read_as_its_documentation_says(name: str, arg: int | None, expected: Any) -> None:
    assert _instructions.format_of(types.SimpleNamespace(name=name, arg=arg)) == expected
