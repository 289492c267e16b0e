import copy
import json
import pickle
from typing import Any

import jax
import numpy as np
import pytest

import mesh
from mesh import PartitionSpec as P

SPECS = [P(), P(None), P("data"), P("data", None), P(("data", "model"), None), P(0, -1), P((0, "model")), P((), "a'b"), P(("data",))]


@pytest.mark.parametrize("spec", SPECS)
def test_spec_survives_every_form(spec: P) -> None:
    assert P.from_string(str(spec)) == spec
    assert P.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert copy.deepcopy(spec) == spec
    assert eval(repr(spec), {"PartitionSpec": P}) == spec
    assert P(*spec) == spec
    assert hash(P(*spec)) == hash(spec)


@pytest.mark.parametrize(
    ("spec", "text"), [(P("data", None), "('data', None)"), (P("data"), "('data',)"), (P(), "()"), (P(0, -1), "(0, -1)")]
)
def test_string_is_the_tuple(spec: P, text: str) -> None:
    assert str(spec) == text
    assert repr(spec) == f"PartitionSpec{text}".replace(",)", ")")


def test_spec_is_an_immutable_sequence() -> None:
    spec = P("data", None, ("model",))
    assert (len(spec), list(spec), spec[0], spec[-1]) == (3, ["data", None, ("model",)], "data", ("model",))
    assert spec[1:] == (None, ("model",))
    for name in ("_entries", "new"):
        with pytest.raises((AttributeError, TypeError)):
            setattr(spec, name, ())


@pytest.mark.parametrize(
    "other", [("data",), ("data", "model"), ["data", None], "('data', None)", jax.sharding.PartitionSpec("data", None), None]
)
def test_spec_equals_nothing_but_a_spec_or_its_tuple(other: object) -> None:
    assert P("data", None) != other
    assert other != P("data", None)


@pytest.mark.parametrize("entries", [("data", None), (), (("data", "model"), None), (0, None)])
def test_spec_equals_the_tuple_of_its_entries_and_hashes_like_it(entries: tuple[Any, ...]) -> None:
    assert P(*entries) == entries and entries == P(*entries)
    assert {entries: 1}[P(*entries)] == 1 and {P(*entries): 1}[entries] == 1


def test_numpy_index_becomes_int() -> None:
    assert type(P(np.int64(1))[0]) is int  # type: ignore[arg-type]


@pytest.mark.parametrize("entry", [True, 1.0, "", ["data"], {"data"}, (None,), (("data",),), object()])
def test_entry_of_another_kind_is_refused(entry: Any) -> None:
    with pytest.raises(mesh.SpecError, match=r"has an entry that is not a mesh axis\n.*is of type .*\n  fix: "):
        P("model", entry)


@pytest.mark.parametrize("entries", [("data", "data"), (0, None, 0), (("data", "data"),), (("model", "data"), "data")])
def test_repeated_axis_is_refused(entries: tuple[Any, ...]) -> None:
    with pytest.raises(mesh.SpecError, match=r"uses axis ('data'|0) more than once"):
        P(*entries)


@pytest.mark.parametrize(
    ("spec", "resolved"),
    [
        (P(0, None), P("data", None)),
        (P(-1, 0), P("model", "data")),
        (P(("data",), ()), P("data", None)),
        (P((1, "data"), None), P(("model", "data"), None)),
        (P(), P()),
    ],
)
def test_resolved_spec_has_names_only(spec: P, resolved: P) -> None:
    assert spec.resolved(("data", "model")) == resolved
    assert resolved.resolved(("data", "model")) == resolved


@pytest.mark.parametrize("axis", ["modle", 2, -3])
def test_unknown_axis_is_refused_with_the_axes_of_the_mesh(axis: str | int) -> None:
    with pytest.raises(
        mesh.SpecError, match=rf"names axis {axis!r}, which the mesh does not have\n  axes of the mesh: 'data', 'model'\n  fix:"
    ):
        P(None, axis).resolved(("data", "model"))


@pytest.mark.parametrize("spec", [P("data", 0), P(1, -1), P(("model", 1))])
def test_axis_used_by_name_and_by_index_is_refused(spec: P) -> None:
    with pytest.raises(mesh.SpecError, match="more than once"):
        spec.resolved(("data", "model"))


@pytest.mark.parametrize("spec", [P(), P("data", None), P(("data", "model"), None)])
def test_jax_spec_and_back_is_the_same(spec: P) -> None:
    assert spec.to_jax() == jax.sharding.PartitionSpec(*spec)
    assert P.from_jax(spec.to_jax()) == spec


def test_axis_index_has_no_jax_form() -> None:
    with pytest.raises(mesh.SpecError, match=r"fix: spec.resolved\(mesh.axis_names\).to_jax\(\)"):
        P("data", (1,)).to_jax()


def test_jax_spec_left_to_the_compiler_is_refused() -> None:
    with pytest.raises(mesh.SpecError, match="UNCONSTRAINED"):
        P.from_jax(jax.sharding.PartitionSpec(jax.sharding.PartitionSpec.UNCONSTRAINED))
    with pytest.raises(mesh.SpecError, match="unreduced or reduced"):
        P.from_jax(jax.sharding.PartitionSpec("data", unreduced={"model"}))


@pytest.mark.parametrize("text", ["", "data", "('data')", "['data']", "('data', None", "__import__('os')", "(x,)"])
def test_text_that_is_no_tuple_is_refused(text: str) -> None:
    with pytest.raises(mesh.SpecError, match=r"is not a partition spec\n  fix: write a tuple with one entry per dim"):
        P.from_string(text)


@pytest.mark.parametrize("spec", [P("data", None), jax.sharding.PartitionSpec("data", None), ("data", None), ["data", None]])
def test_every_spelling_is_a_spec(spec: mesh.SpecLike) -> None:
    assert mesh.as_spec(spec) == P("data", None)


def test_nested_list_is_an_entry_of_several_axes() -> None:
    assert mesh.as_spec([["data", 1], None]) == P(("data", 1), None)


@pytest.mark.parametrize("spec", [None, "data", 0, {"data": 0}])
def test_what_is_no_spec_is_refused(spec: Any) -> None:
    with pytest.raises(mesh.SpecError, match=r"is not a partition spec\n.*\n  fix: .*\(None, None\) to replicate"):
        mesh.as_spec(spec)


@pytest.mark.parametrize("data", [{}, {"entries": None}, {"entries": "data"}])
def test_dict_without_entries_is_refused(data: dict[str, object]) -> None:
    with pytest.raises(mesh.SpecError, match="missing: entries"):
        P.from_dict(data)
