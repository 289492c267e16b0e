"""A slice of `make statements`: statements that read and write Python objects, among them some whose effects were wrong once."""

from __future__ import annotations

import itertools

import pytest

from benchmarks.statements import KINDS, Case, outcome, texts

EVERY = {"reads": 230, "writes": 210, "attributes": 110, "updates": 270, "expressions": 18, "programs": 8, "training": 5}
ONCE_WRONG = {
    "attributes": ("slots: object.__setattr__(o, 'k', o.k + 1)", "tensor: o.t = o.t + x", "partial: global o\no = make(); o.k += 1"),
    "programs": ("v = o.t[:1]; v += o.n; o.n += 1\nreturn o.t * x",),
    "writes": ("memoryview: c[1] += 2", "userlist: c += c", "dict: del c[1]"),
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
