"""A slice of `make statements`: statements that read and write Python objects, among them some whose effects were wrong once."""

from __future__ import annotations

import itertools

import pytest

from benchmarks.statements import KINDS, Case, outcome, texts

EVERY = {
    "reads": 65,
    "writes": 35,
    "attributes": 15,
    "updates": 65,
    "expressions": 6,
    "gradients": 8,
    "in_place": 1,
    "programs": 3,
    "training": 2,
}
ONCE_WRONG = {
    "attributes": (
        *("slots: object.__setattr__(o, 'k', o.k + 1)", "tensor: o.t = o.t + x", "partial: global o\no = make(); o.k += 1"),
        *("setattr: del o.k", "slots: exec('o.k += 1')", "listsub: object.__delattr__(o, 'k')"),
    ),
    "in_place": ("t = o.t; t += o.n; o.n += 1", "t = o.t[:1]; t *= o.n * 0.5; o.n += 1"),
    "writes": ("memoryview: c[1] += 2", "memoryview: operator.setitem(c, 1, 5)", "userlist: c += c", "dict: del c[1]", "slist: c *= 2"),
}


def chosen(kind: str) -> list[Case]:
    cases = list(KINDS[kind]())
    return [*itertools.islice(cases, 0, None, EVERY[kind]), *(case for case in cases if case.name in ONCE_WRONG.get(kind, ()))]


@pytest.mark.parametrize("kind", KINDS)
def test_a_statement_does_what_python_does(kind: str) -> None:
    found = {case.name: outcome(case) for case in chosen(kind)}
    assert not {name: result for name, result in found.items() if result.startswith(("wrong", "error"))}
    assert "equal" in found.values()
    for name in ONCE_WRONG.get(kind, ()):
        assert found[name] == "equal"


def test_a_wrong_result_is_found() -> None:
    case = next(case for case in KINDS["expressions"]())
    assert outcome(case) == "equal"
    calls = iter((0, 1))
    other = case._replace(setup=lambda made: (case.setup(made), setattr(made["o"], "t", made["o"].t + next(calls))))
    assert outcome(other).startswith("wrong: ")


def test_the_texts_are_many() -> None:
    assert len(texts("writes")) > 100 and len(texts("programs")) > 75
