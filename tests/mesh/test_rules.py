"""Rules: which names a pattern means, which spec a tensor gets, and what the report finds."""

import io
import re
from typing import Any

import pytest

import mesh
from mesh import Rules, Sized, rules_report

pytestmark = pytest.mark.multidevice(num=8)
BIG = Sized((1024, 512), 4)

MATCHES = [
    ("up.weight", "up.weight", True),
    ("up.weight", "layers.0.up.weight", True),
    ("up.weight", "layers.0.sup.weight", False),
    ("up.weight", "up.weight.scale", False),
    ("layers.*.up.weight", "model.layers.11.up.weight", True),
    ("layers.*.up.weight", "layers.0.mlp.up.weight", False),
    ("layers.**.weight", "layers.0.mlp.up.weight", True),
    ("layers.**", "layers.0.mlp.up.weight", True),
    ("**.up.weight", "up.weight", True),
    ("^up.weight", "up.weight", True),
    ("^up.weight", "layers.0.up.weight", False),
    ("layer?.0.conv[12].weight", "layer3.0.conv2.weight", True),
    ("layer?.0.conv[12].weight", "layer3.0.conv3.weight", False),
    ("{q_proj,attn.k_proj}.weight", "attn.k_proj.weight", True),
    ("{q_proj,attn.k_proj}.weight", "k_proj.weight", False),
    ("**", "anything.at.all", True),
    (re.compile(r"norm\d?\."), "layers.0.norm2.weight", True),
    (re.compile(r"^norm\d?\."), "layers.0.norm2.weight", False),
]


@pytest.mark.parametrize(("pattern", "name", "expected"), MATCHES, ids=str)
def test_a_pattern_means_these_names(pattern: Any, name: str, expected: bool) -> None:
    assert (Rules((pattern, None)).first(name) is not None) == expected


def test_the_first_rule_that_matches_decides(mesh_4x2: mesh.Mesh) -> None:
    rules = Rules(("a.weight", ("model", None)), ("*.weight", ("data", None)), ("**", None))
    report = rules_report({"a.weight": BIG, "b.weight": BIG, "b.bias": Sized((512,), 4)}, mesh_4x2, rules)
    assert [(p.name, p.rule, tuple(p.sharding.partition_spec)) for p in report] == [
        ("a.weight", "a.weight", ("model", None)),
        ("b.weight", "*.weight", ("data", None)),
        ("b.bias", "**", (None,)),
    ]
    assert report.findings == ()


def test_bytes_per_device_are_those_of_the_pieces(mesh_4x2: mesh.Mesh) -> None:
    report = rules_report({"a": BIG, "b": BIG}, mesh_4x2, Rules(("a", ("data", "model")), ("b", None)))
    assert [p.bytes_per_device for p in report] == [1024 * 512 * 4 // 8, 1024 * 512 * 4]
    assert (report.num_bytes, report.bytes_per_device) == (2 * 2**21, 2**21 // 8 + 2**21)
    assert report["b"].num_bytes == 2**21


LARGEST = [
    ((None, None), (8, 16), "data", (None, "data")),
    ((None, None), (16, 16), "data", ("data", None)),
    ((None, None), (15, 4), "data", (None, "data")),
    ((None, None), (15, 3), "data", (None, None)),
    (("model", None), (64, 16), "data", ("model", "data")),
    (("model", None), (64, 15), "data", (("model", "data"), None)),
    (("model", None), (4, 15), "data", ("model", None)),
    (("data", None), (64, 16), "data", ("data", None)),
    ((None, None), (16, 4), ("data", "model"), (("data", "model"), None)),
    (("model", None), (16, 4), ("data", "model"), ("model", "data")),
    ((), (), "data", ()),
]


@pytest.mark.parametrize(("spec", "shape", "axes", "expected"), LARGEST, ids=str)
def test_the_largest_dim_that_the_axes_divide_is_split(spec: Any, shape: Any, axes: Any, expected: Any, mesh_4x2: mesh.Mesh) -> None:
    assert tuple(mesh.split_largest_dim(spec, shape, mesh_4x2, axes)) == expected


def test_splitting_further_keeps_what_the_rules_say(mesh_4x2: mesh.Mesh) -> None:
    rules = Rules(("up.weight", ("model", None)), ("norm.weight", None)).split_further("data", {"up.weight", "norm.weight", "other"})
    tensors = {"up.weight": BIG, "norm.weight": Sized((512,), 4), "other": BIG, "buffer": Sized((512,), 4, is_buffer=True)}
    specs = {p.name: tuple(p.sharding.partition_spec) for p in rules_report(tensors, mesh_4x2, rules)}
    assert specs == {"up.weight": ("model", "data"), "norm.weight": ("data",), "other": ("data", None), "buffer": (None,)}


@pytest.mark.parametrize(
    ("spec", "axes", "expected"),
    [
        (("data", "model"), ("data",), (None, "model")),
        ((("data", "model"), None), ("data",), ("model", None)),
        ((None,), ("data",), (None,)),
    ],
    ids=str,
)
def test_a_gathered_tensor_lies_without_the_axes(spec: Any, axes: Any, expected: Any) -> None:
    assert tuple(mesh.without_axes(mesh.PartitionSpec(*spec), axes)) == expected


FINDINGS: list[tuple[str, dict[str, Sized], Any, str, list[str]]] = [
    ("large and replicated", {"w": BIG}, [], "replicated", ["'w' of shape (1024, 512), 2 MiB", "add a rule"]),
    ("matches nothing", {"w.up": Sized((4,), 4)}, [("w.upp", None)], "unmatched", ["'w.upp' matches no name", "write it like 'w.up'"]),
    ("shadowed", {"w": BIG}, [("*", ("model", None)), ("w", None)], "shadowed", ["'w' has no effect: the earlier rule '*' matches 'w'"]),
    ("uneven", {"w": Sized((3, 512), 4)}, [("w", ("model", None))], "uneven", ["'w'", "pads it to", "(4, 512)"]),
    ("tied", {"w": Sized((64, 64), 4, ("v",))}, [("w", ("model", None)), ("v", (None, "model"))], "tied", ["one tensor", "'v'"]),
]


@pytest.mark.parametrize(("tensors", "rules", "kind", "parts"), [f[1:] for f in FINDINGS], ids=[f[0] for f in FINDINGS])
def test_what_is_probably_not_meant_is_found(tensors: Any, rules: Any, kind: str, parts: list[str], mesh_4x2: mesh.Mesh) -> None:
    report = rules_report(tensors, mesh_4x2, Rules(*rules))
    assert kind in [finding.kind for finding in report.errors]
    text = next(str(finding) for finding in report.errors if finding.kind == kind)
    assert all(part in text for part in parts), text
    with pytest.raises(mesh.RulesError, match="fix: ") as raised:
        report.raise_errors()
    assert all(part in str(raised.value) for part in parts)


NO_FINDINGS: list[tuple[str, dict[str, Sized], Any]] = [
    ("replicated on purpose", {"w": BIG}, [("w", None)]),
    ("small", {"w": Sized((64,), 4)}, []),
    ("a buffer", {"w": Sized((1024, 512), 4, is_buffer=True)}, []),
    ("an optional rule", {"w": Sized((64,), 4)}, [mesh.Rule("nothing", None, is_optional=True)]),
    ("partly shadowed", {"w": BIG, "v": BIG}, [("w", ("model", None)), ("*", None)]),
    ("tied alike", {"w": Sized((64, 64), 4, ("v",))}, [("{v,w}", ("model", None))]),
    ("named by its other name only", {"w": Sized((64, 64), 4, ("v",))}, [("v", ("model", None))]),
]


@pytest.mark.parametrize(("tensors", "rules"), [f[1:] for f in NO_FINDINGS], ids=[f[0] for f in NO_FINDINGS])
def test_what_is_meant_is_not_found(tensors: Any, rules: Any, mesh_4x2: mesh.Mesh) -> None:
    assert rules_report(tensors, mesh_4x2, Rules(*rules)).findings == ()


WRONG = [
    ([("w", ("model",))], "'w', by rule 'w'", "rank 2"),
    ([("w", ("tensor", None))], "'w', by rule 'w'", "'tensor'"),
    ([("w", lambda name, shape, mesh: 3)], "'w', by rule 'w'", "3 is not a partition spec"),
]


@pytest.mark.parametrize(("rules", "name", "part"), WRONG, ids=["rank", "axis", "function"])
def test_a_spec_that_cannot_be_is_refused_by_name_and_rule(rules: Any, name: str, part: str, mesh_4x2: mesh.Mesh) -> None:
    with pytest.raises(mesh.SpecError) as raised:
        rules_report({"w": BIG}, mesh_4x2, Rules(*rules))
    assert name in str(raised.value) and part in str(raised.value)


@pytest.mark.parametrize("pair", ["up.weight", ("a", (None,), 3), (3, None), ("", None), ("a", (1.5,)), ("a", 3)], ids=str)
def test_what_is_no_rule_is_refused(pair: Any) -> None:
    with pytest.raises(mesh.SpecError):
        Rules(pair)


@pytest.mark.parametrize("pattern", ["{up,down.weight", "up,down}.weight", "blocks.[0-3.weight", "{a{b}c}"])
def test_a_pattern_with_half_a_pair_of_braces_is_refused(pattern: str) -> None:
    with pytest.raises(mesh.SpecError, match="has '.' without its partner(.|\n)*fix: close it"):
        Rules((pattern, (None,)))
    Rules(("blocks.[0-3].{up,down}.weight", (None,)), ("[{]x", (None,)))


def test_the_report_is_text_and_a_table(mesh_4x2: mesh.Mesh) -> None:
    from rich.console import Console

    tensors = {f"layers.{i}.w": BIG for i in range(3)} | {"head": Sized((64,), 4)}
    report = rules_report(tensors, mesh_4x2, Rules(("w", ("model", None)), ("nothing", None)))
    assert "layers.*.w (3)" in str(report) and "of 6 MiB" in str(report) and "unmatched: rule 'nothing'" in str(report)
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(report)
    shown = console.export_text()
    assert "layers.*.w (3)" in shown and "512×512" in shown and "(model, None)" in shown and "fix: drop it" in shown
    assert "3 MiB" in shown and "of 6 MiB" in shown
