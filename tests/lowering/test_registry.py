"""The table of lowerings: which names it takes, which it refuses, and what it leaves out on an older torch."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from spmd.lowering import _registry, lookup, lower, lowerings
from spmd.lowering._registry import SINCE, UNTIL, exists, is_composite, resolve


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A copy of the table, thrown away after the test."""
    monkeypatch.setattr(_registry, "_table", lowerings())
    monkeypatch.setattr(_registry, "_listeners", [])
    yield


def rule(self: Any) -> Any:
    return self


def test_name_without_an_overload_means_default_and_a_namespace_may_be_given() -> None:
    assert resolve("relu") is resolve("relu.default") is resolve("aten::relu") is torch.ops.aten.relu.default


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("reluu", "there is no ATen overload 'reluu' in torch {version}\n  the nearest name is 'relu'"),
        ("add.Tenser", "there is no ATen overload 'add.Tenser' in torch {version}\n  the nearest name is 'add.Tensor'"),
        ("nowhere::relu", "there is no overload 'nowhere::relu': namespace 'nowhere' has 0 operators\n  fix: define the operator first"),
    ],
)
def test_misspelt_name_is_refused(name: str, error: str) -> None:
    with pytest.raises(ValueError, match=re.escape(error.format(version=torch.__version__))):
        lower(name)(rule)
    assert not exists(name)


def test_overload_of_a_later_torch_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SINCE, "add.OfTheFuture", "99.0")
    before = lowerings()
    assert lower("add.OfTheFuture")(rule) is rule
    assert lowerings() == before


def test_overload_that_this_torch_should_have_is_refused_when_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SINCE, "add.OfThePast", "1.0")
    with pytest.raises(ValueError, match="there is no ATen overload"):
        lower("add.OfThePast")(rule)


def test_overload_that_is_there_is_registered_whatever_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SINCE, "_resize_output", "99.0")
    lower("_resize_output")(rule)
    assert lookup(resolve("_resize_output")) is not None


def test_overload_of_an_earlier_torch_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(UNTIL, "add.OfThePast", "1.0")
    before = lowerings()
    assert lower("add.OfThePast")(rule) is rule
    assert lowerings() == before


@pytest.mark.parametrize("name", sorted({**SINCE, **UNTIL}))
def test_declared_overload_is_there_in_its_versions_and_lowered(name: str) -> None:
    assert exists(name) != _registry.is_of_other_torch(name)
    assert not exists(name) or lookup(resolve(name)) is not None


def test_second_lowering_is_refused_and_the_first_named() -> None:
    with pytest.raises(ValueError, match=r"aten\.relu\.default already has a lowering at .*; a second one is at .*test_registry"):
        lower("relu")(rule)


def test_composite_needs_whole() -> None:
    assert is_composite(resolve("kron")) and not is_composite(resolve("add.Tensor"))
    with pytest.raises(ValueError, match="its gradient would be lost silently"):
        lower("kron")(rule)
    lower("kron", whole=True)(rule)
    found = lookup(resolve("kron"))
    assert found is not None and found.whole and found.rule is rule and found.source.startswith(__file__)


def test_copy_of_the_table_is_no_way_to_change_it() -> None:
    lowerings().clear()
    assert lookup(torch.ops.aten.relu.default) is not None
