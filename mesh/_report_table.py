"""A rules report as a rich table: one row per tensor, with repeated layers merged into one row and findings below."""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Sequence

import rich.box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from mesh._report import Finding, Placement, RulesReport, size_text


def table(report: RulesReport) -> RenderableType:
    """The report as a rich table, followed by its findings."""
    groups: dict[tuple[object, ...], list[Placement]] = {}
    for placement in report:
        groups.setdefault((_stack(placement.name), placement.shape, placement.sharding, placement.rule), []).append(placement)
    shown = Table(title=str(report.mesh), box=rich.box.SIMPLE_HEAD, show_footer=True, show_edge=False, title_justify="left")
    shown.add_column("tensor", "total", overflow="fold")
    shown.add_column("shape", justify="right", no_wrap=True)
    shown.add_column("shard", justify="right", no_wrap=True)
    shown.add_column("spec", f"of {size_text(report.num_bytes)}", no_wrap=True)
    shown.add_column("per device", size_text(report.bytes_per_device), justify="right", no_wrap=True)
    shown.add_column("rule", overflow="fold", style="dim")
    for members in groups.values():
        shown.add_row(*_row(members))
    return Group(shown, *(_finding(finding) for finding in report.findings))


def text(report: RulesReport) -> str:
    """The table as plain text, without colours."""
    stream = io.StringIO()
    Console(file=stream, width=shutil.get_terminal_size((140, 24)).columns, color_system=None).print(table(report))
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def _row(members: Sequence[Placement]) -> tuple[RenderableType, ...]:
    first = members[0]
    name = _stack(first.name) if len(members) > 1 else first.name
    count = f" ({len(members)})" if len(members) > 1 else ""
    spec = Text("replicated", "dim") if first.sharding.is_replicated else Text(_entries(first), "cyan")
    shard = "" if first.sharding.is_replicated else _dims(first.sharding.shard_shape(first.shape))
    total = size_text(sum(member.bytes_per_device for member in members))
    return Text(name + count), _dims(first.shape), shard, spec, total, Text(first.rule or "none")


def _stack(name: str) -> str:
    """The tensor's name with each layer number replaced by '*'."""
    return re.sub(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", "*", name)


def _entries(placement: Placement) -> str:
    return "(" + ", ".join("+".join(map(str, e)) if isinstance(e, tuple) else str(e) for e in placement.sharding.partition_spec) + ")"


def _dims(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape)) or "scalar"


def _finding(finding: Finding) -> Text:
    style = "bold red" if finding.is_error else "yellow"
    return Text.assemble((f"{finding.kind}: ", style), finding.what, "\n  ", ("fix: ", "bold"), finding.fix)
