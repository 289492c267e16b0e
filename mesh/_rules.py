"""Rules: which tensors of a model get which spec, by name. Immutable values; no model and no tensor is known here.

    rules = Rules(
        ("attn.q_proj.weight", ("model", None)),         # a glob: '*' is one part of a name, '**' any number of parts
        ("layers.*.mlp.**", largest_dim("data")),        # a function of name and shape
        (re.compile(r"norm\\d?\\.(weight|bias)$"), None),   # replicated on purpose, whatever the rank
    )
    rules.first("layers.0.attn.q_proj.weight")           # the first rule that matches, or None

A glob matches the whole name or its tail from a dot on, so the same rules fit a model and one that holds it; one that
begins with '^' matches whole names only. A compiled regular expression is searched for.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias, cast

from mesh._mesh import Mesh
from mesh._mesh_errors import SpecError, message
from mesh._spec import Axis, Entry, PartitionSpec, SpecLike, as_spec, entry_axes

Pattern: TypeAlias = str | re.Pattern[str]


class SpecFunction(Protocol):
    """A spec that depends on the tensor; returns None for "replicated"."""

    def __call__(self, name: str, shape: tuple[int, ...], mesh: Mesh, /) -> SpecLike | None: ...


@dataclass(frozen=True)
class Rule:
    """One line of `Rules`.

    Attributes:
        pattern: a glob or a compiled regular expression, for names of parameters and buffers.
        spec: one entry per dim; None for a tensor that is replicated on purpose; or a function of name, shape and mesh.
        is_optional: deciding about no tensor is no finding.
    """

    pattern: Pattern
    spec: PartitionSpec | SpecFunction | None
    is_optional: bool = False

    def matches(self, name: str) -> bool:
        """Whether the rule is for a tensor of this name."""
        if isinstance(self.pattern, re.Pattern):
            return self.pattern.search(name) is not None
        return _glob(self.pattern).fullmatch(name) is not None

    def spec_for(self, name: str, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
        """The rule's spec for one tensor; its rank is not checked here, except that None fits every rank.

        Raises:
            SpecError: the rule's function returned no spec.
        """
        spec = self.spec if self.spec is None or isinstance(self.spec, PartitionSpec) else self.spec(name, shape, mesh)
        return replicated(len(shape)) if spec is None else as_spec(spec)

    @property
    def title(self) -> str:
        """The pattern as written."""
        return self.pattern.pattern if isinstance(self.pattern, re.Pattern) else self.pattern


@dataclass(frozen=True, init=False, repr=False)
class Rules:
    """Ordered (pattern, spec) pairs; the first that matches a name decides.

    Args:
        pairs: (pattern, spec), as `Rule` describes them.

    Raises:
        SpecError: a pair is no pair, a pattern is empty, or a spec is malformed.
    """

    rules: tuple[Rule, ...]

    def __init__(self, *pairs: tuple[Pattern, SpecLike | SpecFunction | None] | Rule) -> None:
        object.__setattr__(self, "rules", tuple(_as_rule(pair) for pair in pairs))

    def first(self, name: str) -> Rule | None:
        """The rule that decides about this name."""
        return next((rule for rule in self.rules if rule.matches(name)), None)

    def __iter__(self) -> Iterator[Rule]:
        return iter(self.rules)

    def __len__(self) -> int:
        return len(self.rules)

    def __add__(self, other: Rules) -> Rules:
        return Rules(*self.rules, *other.rules)

    def __repr__(self) -> str:
        return f"Rules({', '.join(f'({rule.title!r}, {rule.spec})' for rule in self.rules)})"

    def split_further(self, axes: Axis | Sequence[Axis], names: Collection[str] | None = None) -> Rules:
        """The same rules, each tensor also split over `axes` (see `split_largest_dim`), also those that no rule named.

        Args:
            names: the tensors to split further; default: all.
        """
        rules = [replace(rule, spec=_Further(rule, axes, names)) for rule in self.rules]
        return Rules(*rules, Rule("**", _Further(None, axes, names), is_optional=True))


@dataclass(frozen=True)
class _Further:
    """Spec function: another rule's spec, split further over `axes`."""

    rule: Rule | None
    axes: Axis | Sequence[Axis]
    names: Collection[str] | None = None
    min_elements: int = 0

    def __call__(self, name: str, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
        spec = replicated(len(shape)) if self.rule is None else self.rule.spec_for(name, shape, mesh)
        if len(spec) != len(shape) or math.prod(shape) < self.min_elements or (self.names is not None and name not in self.names):
            return spec
        return split_largest_dim(spec, shape, mesh, self.axes)

    def __str__(self) -> str:
        return f"{'replicated' if self.rule is None else self.rule.spec}, its largest dim also over {self.axes!r}"


def largest_dim(axes: Axis | Sequence[Axis], min_elements: int = 0) -> SpecFunction:
    """A spec function: split the largest dim that `axes` divide; tensors of fewer elements stay replicated."""
    return _Further(None, axes, min_elements=min_elements)


def split_largest_dim(spec: SpecLike, shape: Sequence[int], mesh: Mesh, axes: Axis | Sequence[Axis]) -> PartitionSpec:
    """`spec` with its largest dim also split over `axes`.

    Args:
        spec: one entry per dim of `shape`.
        axes: axes of the mesh; those that `spec` already uses are left out.

    Returns:
        The spec with `axes` added to the largest dim that they divide (the first of equal ones); a dim that `spec` splits
        already only if they divide no other; `spec` itself if they divide none.
    """
    resolved = as_spec(spec).resolved(mesh.axis_names)
    used = {axis for entry in resolved for axis in entry_axes(entry)}
    wanted = entry_axes(PartitionSpec(_as_entry(axes)).resolved(mesh.axis_names)[0])
    extra = tuple(axis for axis in wanted if axis not in used)
    count = math.prod(mesh.axis_size(axis) for axis in extra)
    pieces = [size // math.prod(mesh.axis_size(a) for a in entry_axes(entry)) for size, entry in zip(shape, resolved, strict=True)]
    fitting = [dim for dim, piece in enumerate(pieces) if piece and piece % count == 0]
    if not extra or not fitting:
        return resolved
    chosen = max(fitting, key=lambda dim: (resolved[dim] is None, pieces[dim], -dim))
    entries: list[Entry] = list(resolved)
    entries[chosen] = (*entry_axes(entries[chosen]), *extra)
    return PartitionSpec(*entries).resolved(mesh.axis_names)


def without_axes(spec: PartitionSpec, axes: Sequence[str]) -> PartitionSpec:
    """The spec of a tensor gathered over `axes`: the same without them."""
    kept = [tuple(axis for axis in entry_axes(entry) if axis not in axes) for entry in spec]
    return PartitionSpec(*(entry if len(entry) > 1 else entry[0] if entry else None for entry in kept))


def replicated(rank: int) -> PartitionSpec:
    """The spec of a tensor of `rank` dims that every device holds whole."""
    return PartitionSpec(*(None,) * rank)


def _as_entry(axes: Axis | Sequence[Axis]) -> Entry:
    return axes if isinstance(axes, str | int) else tuple(axes)


def _as_rule(pair: object) -> Rule:
    if isinstance(pair, Rule):
        return pair
    if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], str | re.Pattern) or pair[0] == "":
        raise SpecError(
            message(
                f"{pair!r} is not a rule",
                "a rule is a pair of a pattern and a spec",
                fix="write ('layers.*.up.weight', ('model', None)); None as spec replicates",
            )
        )
    pattern, spec = pair
    if spec is None or isinstance(spec, PartitionSpec) or callable(spec):
        return Rule(pattern, cast("PartitionSpec | SpecFunction | None", spec))
    try:
        return Rule(pattern, as_spec(spec))
    except SpecError as error:
        shown = pattern if isinstance(pattern, str) else pattern.pattern
        raise SpecError(f"rule {shown!r}: {error}") from error


@functools.cache
def _glob(pattern: str) -> re.Pattern[str]:
    """The whole name or its tail from a dot on; '**' is any number of parts, '*' and '?' stay within one, '{a,b}' chooses."""
    out = "" if pattern.startswith("^") else r"(?:.*\.)?"
    for piece in re.findall(r"\*\*\.|\*\*|\[[^\]]+\]|\{[^}]+\}|.", pattern.removeprefix("^")):
        if piece in _WILDCARDS:
            out += _WILDCARDS[piece]
        elif len(piece) > 1 and piece[0] == "{":
            out += "(?:" + "|".join(map(re.escape, piece[1:-1].split(","))) + ")"
        else:
            out += piece if len(piece) > 1 else re.escape(piece)
    return re.compile(out)


_WILDCARDS = {"**.": r"(?:.*\.)?", "**": r".*", "*": r"[^.]*", "?": r"[^.]"}
