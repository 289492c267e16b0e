"""The demo's output as rich renderables: tables and a curve. This module does not print."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import rich.box
from rich.console import Console, ConsoleOptions
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text
from torch import nn

from mesh import Mesh, ShardingSpec, size_text
from spmd import XLAShardedTensor

_BRAILLE = 0x2800
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # bit of each dot in a character cell, by column and row


def facts(rows: Sequence[tuple[str, str]]) -> Table:
    """A table of names and values without a frame."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    for row in rows:
        table.add_row(*row)
    return table


def sharding_table(model: nn.Module, mesh: Mesh) -> Table:
    """A table of all parameters with spec, shape of a shard and bytes per device. Parameters that repeat in each layer share a row."""
    groups: dict[tuple[str, tuple[int, ...], ShardingSpec], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        spec = parameter.partition_spec if isinstance(parameter, XLAShardedTensor) else None
        sharding = ShardingSpec(mesh, (None,) * parameter.dim() if spec is None else spec)
        groups.setdefault((re.sub(r"\.\d+\.", ".*.", name), tuple(parameter.shape), sharding), []).append(parameter)
    rows: list[tuple[str, ...]] = []
    whole = local = 0
    for (name, shape, sharding), parameters in groups.items():
        num_bytes = sum(parameter.nbytes for parameter in parameters)
        whole, local = whole + num_bytes, local + num_bytes // sharding.num_shards
        piece = "" if sharding.is_replicated else f"→ [cyan]{dims(sharding.shard_shape(shape))}[/]"
        spec = "[dim]replicated[/]" if sharding.is_replicated else f"[cyan]({', '.join(map(str, sharding.partition_spec))})[/]"
        rows.append((name.replace("*", f"0-{len(parameters) - 1}"), dims(shape), piece, spec, size_text(num_bytes // sharding.num_shards)))
    table = Table(box=rich.box.SIMPLE_HEAD, show_footer=True, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("parameter", "total", no_wrap=True)
    table.add_column("shape", justify="right", no_wrap=True)
    table.add_column("shard", no_wrap=True)
    table.add_column("spec", f"of {size_text(whole)}", justify="right", no_wrap=True)
    table.add_column("bytes", size_text(local), justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def dims(shape: Sequence[int]) -> str:
    """A shape as text: `128×64`."""
    return "×".join(map(str, shape))


@dataclass(frozen=True)
class Series:
    """The points of one line, with ascending x."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    style: str


@dataclass(frozen=True)
class Curve:
    """Plot of series with braille dots, two by four per character. A later series hides an earlier one where they cross."""

    series: Sequence[Series]
    x_name: str
    height: int = 12

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment | Text]:
        width = max(20, min(options.max_width, 100) - 10)
        xs = [x for series in self.series for x in series.x]
        ys = [y for series in self.series for y in series.y]
        left, right, low, high = min(xs), max(xs), min(ys), max(ys)
        cells: dict[tuple[int, int], tuple[int, str]] = {}
        for series in self.series:
            for x, y in _joined(series, 4 * width):
                column = round((x - left) / ((right - left) or 1) * (2 * width - 1))
                row = round((high - y) / ((high - low) or 1) * (4 * self.height - 1))
                bits, owner = cells.get((row // 4, column // 2), (0, series.style))
                bits = bits if owner == series.style else 0
                cells[row // 4, column // 2] = bits | _DOTS[column % 2][row % 4], series.style
        for line in range(self.height):
            value = high - (high - low) * line / (self.height - 1)
            yield Segment(f"{value:8.2f} ┤" if line % 3 == 0 or line == self.height - 1 else "         │", Style(dim=True))
            for column in range(width):
                bits, style = cells.get((line, column), (0, ""))
                yield Segment(chr(_BRAILLE + bits) if bits else " ", Style.parse(style))
            yield Segment.line()
        yield Segment("         └" + "─" * width + "\n", Style(dim=True))
        end = f"{self.x_name} {right:g}"
        yield Segment(f"          {left:<{width - len(end)}g}{end}\n", Style(dim=True))
        yield Text.assemble("          ", *((f"⣀⣀ {series.name}   ", series.style) for series in self.series))


def _joined(series: Series, num_points: int) -> Iterator[tuple[float, float]]:
    """The points of a series, with interpolated points between them so that the line has no gaps."""
    points = list(zip(series.x, series.y, strict=True))
    between = max(1, num_points // max(1, len(points) - 1))
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        for part in range(between):
            yield x0 + (x1 - x0) * part / between, y0 + (y1 - y0) * part / between
    yield from points[-1:]
