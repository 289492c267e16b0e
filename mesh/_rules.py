"""Rules: specs for the tensors of a model, chosen by name. Immutable. This module does not depend on models or tensors.

    rules = Rules(
        ("attn.q_proj.weight", ("model", None)),         # a glob: '*' matches within one part of a name, '**' any number
        ("layers.*.mlp.**", largest_dim("data")),        # a function of name and shape
        (re.compile(r"norm\\d?\\.(weight|bias)$"), None),   # replicated on purpose, whatever the rank
    )
    rules.first("layers.0.attn.q_proj.weight")           # the first matching rule, or None

A glob matches a whole name or its last parts, so the same rules work for a model and for a module that contains it. A glob that
begins with '^' matches whole names only. A compiled regular expression may match anywhere in a name.
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
    """A function that returns the spec for a tensor, or None to replicate it."""

    def __call__(self, name: str, shape: tuple[int, ...], mesh: Mesh, /) -> SpecLike | None: ...


@dataclass(frozen=True)
class Rule:
    """One entry of `Rules`.

    Attributes:
        pattern: a glob or a compiled regular expression for names of parameters and buffers.
        spec: one entry per dim; None to replicate on purpose; or a function of name, shape and mesh.
        is_optional: whether the rule may be unused. Otherwise a rule that decides no placement is a finding.
    """

    pattern: Pattern
    spec: PartitionSpec | SpecFunction | None
    is_optional: bool = False

    def matches(self, name: str) -> bool:
        """Whether the pattern matches this name."""
        if isinstance(self.pattern, re.Pattern):
            return self.pattern.search(name) is not None
        return _glob(self.pattern).fullmatch(name) is not None

    def spec_for(self, name: str, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
        """The spec for one tensor. Its rank is not checked against `shape`.

        Raises:
            SpecError: the rule's function returned something that is not a spec.
        """
        spec = self.spec if self.spec is None or isinstance(self.spec, PartitionSpec) else self.spec(name, shape, mesh)
        return replicated(len(shape)) if spec is None else as_spec(spec)

    @property
    def title(self) -> str:
        """The pattern as written."""
        return self.pattern.pattern if isinstance(self.pattern, re.Pattern) else self.pattern


@dataclass(frozen=True, init=False, repr=False)
class Rules:
    """Ordered (pattern, spec) pairs. The first pattern that matches a name decides.

    Args:
        pairs: (pattern, spec) as described in `Rule`, or `Rule` objects.

    Raises:
        SpecError: an argument is not a pair, a pattern is empty, or a spec is malformed.
    """

    rules: tuple[Rule, ...]

    def __init__(self, *pairs: tuple[Pattern, SpecLike | SpecFunction | None] | Rule) -> None:
        object.__setattr__(self, "rules", tuple(_as_rule(pair) for pair in pairs))

    def first(self, name: str) -> Rule | None:
        """The first rule that matches this name, or None."""
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
        """Rules that shard each tensor also over `axes` (see `split_largest_dim`), including tensors that no rule matches.

        Args:
            axes: one axis or several.
            names: the tensors to shard further. None: all.
        """
        rules = [replace(rule, spec=_SplitLargestDim(rule, axes, names)) for rule in self.rules]
        return Rules(*rules, Rule("**", _SplitLargestDim(None, axes, names), is_optional=True))


@dataclass(frozen=True)
class _SplitLargestDim:
    """Spec function: the spec of another rule (None: replicated), with the largest dim also sharded over `axes`."""

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
    """A spec function that shards the largest dim that `axes` divide.

    Args:
        axes: one axis or several.
        min_elements: tensors with fewer elements stay replicated.
    """
    return _SplitLargestDim(None, axes, min_elements=min_elements)


def split_largest_dim(spec: SpecLike, shape: Sequence[int], mesh: Mesh, axes: Axis | Sequence[Axis]) -> PartitionSpec:
    """Add `axes` to the largest dim of `spec`.

    Args:
        spec: one entry per dim of `shape`.
        shape: global shape.
        mesh: the mesh of `axes`.
        axes: one axis or several. Axes that `spec` already uses are ignored.

    Returns:
        The spec with `axes` added to the largest dim that they divide (the first one if several are equal). A dim that `spec`
        already shards is chosen only if the axes divide no other dim. If they divide none, `spec` is returned as it is.
    """
    resolved = as_spec(spec).resolved(mesh.axis_names)
    used = {axis for entry in resolved for axis in entry_axes(entry)}
    wanted = entry_axes(PartitionSpec(_as_entry(axes)).resolved(mesh.axis_names)[0])
    extra = tuple(axis for axis in wanted if axis not in used)
    count = math.prod(mesh.axis_size(axis) for axis in extra)
    shard_sizes = [size // math.prod(mesh.axis_size(a) for a in entry_axes(entry)) for size, entry in zip(shape, resolved, strict=True)]
    fitting = [dim for dim, size in enumerate(shard_sizes) if size and size % count == 0]
    if not extra or not fitting:
        return resolved
    chosen = max(fitting, key=lambda dim: (resolved[dim] is None, shard_sizes[dim], -dim))
    entries: list[Entry] = list(resolved)
    entries[chosen] = (*entry_axes(entries[chosen]), *extra)
    return PartitionSpec(*entries).resolved(mesh.axis_names)


def without_axes(spec: PartitionSpec, axes: Sequence[str]) -> PartitionSpec:
    """`spec` without `axes`: the spec of the tensor after a gather over these axes."""
    kept = [tuple(axis for axis in entry_axes(entry) if axis not in axes) for entry in spec]
    return PartitionSpec(*(entry if len(entry) > 1 else entry[0] if entry else None for entry in kept))


def replicated(rank: int) -> PartitionSpec:
    """The spec of a replicated tensor with `rank` dims."""
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
                fix="write ('layers.*.up.weight', ('model', None)); the spec None replicates",
            )
        )
    pattern, spec = pair
    if isinstance(pattern, str) and (left := re.search(r"[{}\[\]]", re.sub(r"\[[^\]]+\]|\{[^{}]+\}", "", pattern))):
        what = f"the pattern {pattern!r} of a rule has {left.group()!r} without its partner"
        without = re.sub(r"[{}\[\]]", "", pattern)
        raise SpecError(message(what, "'{a,b}' matches a or b, '[ab]' one of these letters", fix=f"close it, or write {without!r}"))
    if spec is None or isinstance(spec, PartitionSpec) or callable(spec):
        return Rule(pattern, cast("PartitionSpec | SpecFunction | None", spec))
    try:
        return Rule(pattern, as_spec(spec))
    except SpecError as error:
        shown = pattern if isinstance(pattern, str) else pattern.pattern
        raise SpecError(f"rule {shown!r}: {error}") from error


@functools.cache
def _glob(pattern: str) -> re.Pattern[str]:
    """Regular expression for a glob. It matches the whole name or its last parts ('^': the whole name only). '**' matches any number
    of parts, '*' and '?' match within one part, and '{a,b}' matches either."""
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
