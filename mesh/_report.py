"""The report on sharding rules applied to a model: the sharding of each tensor, and findings about suspicious placements.

    report = rules_report({"up.weight": Tensor((4096, 1024), 4)}, mesh, rules)
    report.bytes_per_device, report.errors
    print(report)                                        # a table

Works on names, shapes and element sizes only, without a model or tensors.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from mesh._mesh import Mesh
from mesh._mesh_errors import RulesError, SpecError, message
from mesh._rules import Rule, Rules, replicated
from mesh._sharding import ShardingSpec

if TYPE_CHECKING:
    from rich.console import RenderableType

LARGE_BYTES = 1 << 20


class Sized(NamedTuple):
    """The properties of a tensor that decide its placement.

    Attributes:
        shape: global shape.
        itemsize: bytes per element.
        aliases: other names of the tensor, if it is tied.
        is_buffer: whether it is a buffer. A buffer that no rule matches is replicated without a finding.
    """

    shape: tuple[int, ...]
    itemsize: int
    aliases: tuple[str, ...] = ()
    is_buffer: bool = False


@dataclass(frozen=True)
class Placement:
    """The sharding that the rules give to one tensor.

    Attributes:
        name: name of the parameter or buffer.
        shape: global shape.
        sharding: mesh and spec.
        rule: title of the rule that matched, or None.
        num_bytes: bytes of the whole tensor.
        bytes_per_device: bytes of one device's shard, including padding.
    """

    name: str
    shape: tuple[int, ...]
    sharding: ShardingSpec
    rule: str | None
    num_bytes: int
    bytes_per_device: int


@dataclass(frozen=True)
class Finding:
    """A suspicious placement, or a rule without effect.

    Attributes:
        kind: "replicated", "unmatched", "shadowed", "uneven", "tied", "pair", "heads" or "packed".
        what: the problem, with the names of the tensors and rules.
        fix: the shortest change that helps.
        is_error: whether `strict` raises for it. Other findings are notes.
    """

    kind: str
    what: str
    fix: str
    is_error: bool = True

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}\n    fix: {self.fix}"


@dataclass(frozen=True)
class RulesReport:
    """All placements and findings. Iterates over the placements."""

    mesh: Mesh
    placements: tuple[Placement, ...]
    findings: tuple[Finding, ...] = ()

    def __iter__(self) -> Iterator[Placement]:
        return iter(self.placements)

    def __len__(self) -> int:
        return len(self.placements)

    def __getitem__(self, name: str) -> Placement:
        """The placement of the tensor with this name. Raises KeyError if there is none."""
        for placement in self.placements:
            if placement.name == name:
                return placement
        raise KeyError(name)

    @property
    def num_bytes(self) -> int:
        """Total bytes of all tensors; tied tensors count once."""
        return sum(placement.num_bytes for placement in self.placements)

    @property
    def bytes_per_device(self) -> int:
        """Total bytes of the shards on one device."""
        return sum(placement.bytes_per_device for placement in self.placements)

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings for which `strict` raises."""
        return tuple(finding for finding in self.findings if finding.is_error)

    def with_findings(self, findings: Sequence[Finding]) -> RulesReport:
        """A copy of the report with more findings."""
        return replace(self, findings=(*self.findings, *findings))

    def raise_errors(self) -> None:
        """Raise an error if some findings are errors.

        Raises:
            RulesError: there are such findings; the message lists all of them.
        """
        if not self.errors:
            return
        details = [line for finding in self.errors for line in str(finding).splitlines()]
        count = len(self.errors)
        raise RulesError(
            message(
                f"the rules make {count} suspicious placement{'s' * (count > 1)}",
                *details,
                fix="change the rules as suggested above, or pass strict=False and read the report",
            )
        )

    def __str__(self) -> str:
        """The table as text, as wide as the terminal. Repeated layers share one row."""
        from mesh._report_table import text  # imports rich only when a report is printed

        return text(self)

    def __rich__(self) -> RenderableType:
        from mesh._report_table import table

        return table(self)


def rules_report(tensors: Mapping[str, Sized], mesh: Mesh, rules: Rules, large_bytes: int = LARGE_BYTES) -> RulesReport:
    """Apply rules to names and shapes.

    Args:
        tensors: properties of the tensors by name, in the order of the report.
        mesh: the mesh to shard over.
        rules: the first rule that matches a name decides.
        large_bytes: size in bytes from which a parameter that no rule matches is a finding.

    Raises:
        SpecError: a spec does not fit its tensor's rank or names an axis that the mesh does not have. The message contains the
            tensor's name and the rule.
    """
    placements: list[Placement] = []
    findings: list[Finding] = []
    winners: set[int] = set()
    for name, tensor in tensors.items():
        rule = next((found for found in map(rules.first, (name, *tensor.aliases)) if found is not None), None)
        if rule is not None:
            winners.add(id(rule))
        placement, found = _placed(name, tensor, rule, mesh)
        placements.append(placement)
        findings.extend(found)
        findings.extend(_tied(name, tensor, rules, placement))
        large = placement.num_bytes >= large_bytes and not tensor.is_buffer
        if rule is None and large and mesh.size() > 1:
            what = f"{name!r} of {_shape(tensor.shape)}, {size_text(placement.num_bytes)}, is replicated: no rule matches it"
            findings.append(Finding("replicated", what, f"add a rule, or ({name!r}, None) to replicate it on purpose"))
    findings.extend(_unused(rules, tensors, winners))
    return RulesReport(mesh, tuple(placements), tuple(findings))


def _placed(name: str, tensor: Sized, rule: Rule | None, mesh: Mesh) -> tuple[Placement, list[Finding]]:
    """The placement of one tensor, and a finding if the padding of uneven dims adds more than an eighth to its size."""
    num_bytes = math.prod(tensor.shape) * tensor.itemsize
    whole = ShardingSpec(mesh, replicated(len(tensor.shape)))
    if rule is None:
        return Placement(name, tensor.shape, whole, None, num_bytes, num_bytes), []
    try:
        sharding = ShardingSpec(mesh, rule.spec_for(name, tensor.shape, mesh))
    except SpecError as error:
        raise type(error)(f"{name!r}, by rule {rule.title!r}: {error}") from error  # keeps the subclass of SpecError
    if len(sharding.partition_spec) != len(tensor.shape):
        sharding.validate(tensor.shape, f"{name!r}, by rule {rule.title!r},")
    shard_bytes = math.prod(sharding.shard_shape(tensor.shape)) * tensor.itemsize
    placement = Placement(name, tensor.shape, sharding, rule.title, num_bytes, shard_bytes)
    stored = sharding.padded_shape(tensor.shape)
    if math.prod(stored) <= 1.125 * math.prod(tensor.shape):
        return placement, []
    text = f"{name!r} of {_shape(tensor.shape)}, by rule {rule.title!r}: {sharding.partition_spec} pads it to {_shape(stored)}"
    return placement, [Finding("uneven", text, f"shard a dim that the axes divide, or replicate it: ({name!r}, None)")]


def _tied(name: str, tensor: Sized, rules: Rules, placement: Placement) -> list[Finding]:
    """A finding for each alias of a tied tensor whose rule gives a different spec."""
    found: list[Finding] = []
    for alias in tensor.aliases:
        rule = rules.first(alias)
        if rule is None or rule.title == placement.rule:
            continue
        spec = ShardingSpec(placement.sharding.mesh, rule.spec_for(alias, tensor.shape, placement.sharding.mesh)).partition_spec
        if spec != placement.sharding.partition_spec:
            what = f"{name!r} and {alias!r} are one tensor with spec {placement.sharding.partition_spec}; rule {rule.title!r} gives {spec}"
            found.append(Finding("tied", what, f"give both names the same spec, or drop the rule for {alias!r}"))
    return found


def _unused(rules: Rules, tensors: Mapping[str, Sized], winners: set[int]) -> list[Finding]:
    """A finding for each rule that decided no placement: it matches no name, or earlier rules match all its names."""
    names = [name for first, tensor in tensors.items() for name in (first, *tensor.aliases)]
    found: list[Finding] = []
    for position, rule in enumerate(rules):
        if id(rule) in winners or rule.is_optional:
            continue
        matched = [name for name in names if rule.matches(name)]
        others = [earlier for earlier in rules.rules[:position] if any(earlier.matches(name) for name in matched)]
        if not matched:
            near = _nearest(rule, names)
            found.append(Finding("unmatched", f"rule {rule.title!r} matches no name", f"drop it{near}"))
        elif others and all(rules.first(name) is not rule for name in matched):
            what = f"rule {rule.title!r} has no effect: the earlier rule {others[0].title!r} matches {matched[0]!r}"
            found.append(Finding("shadowed", what, f"move it before {others[0].title!r}, or drop it"))
    return found


def _nearest(rule: Rule, names: Sequence[str]) -> str:
    """Suggestion to append to a fix: the name, or end of a name, that is closest to the rule's pattern; "" if none is close."""
    length = rule.title.count(".") + 1
    tails = list(dict.fromkeys(".".join(name.split(".")[-length:]) for name in names))
    near = difflib.get_close_matches(rule.title, tails, 1, 0.6)
    return f", or write it like {near[0]!r}" if near else ""


def size_text(num_bytes: float) -> str:
    """Format a number of bytes with a unit: 1536 becomes "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} GiB"


def _shape(shape: Sequence[int]) -> str:
    return f"shape {tuple(shape)}"
