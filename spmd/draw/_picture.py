"""Draws a tiling as coloured cells in the terminal or as SVG. With more than two split dims it consists of several panels.

Each set of devices has its own colour, so tiles of one colour are on the same devices.
"""

from __future__ import annotations

import colorsys
import html
import io
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import rich.box
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.style import Style
from rich.table import Table
from rich.text import Text

from spmd.draw._tiling import Tiling, device_text

_CELL, _GAP, _HEAD, _LINE = (84, 34), 26, 96, 18  # in SVG pixels: cell, gap between panels, width of row titles, height of a line
_MAX_TILES = 24  # tiles drawn along a dim; if there are more, those before the last one are left out
_FONT = "font-family='ui-monospace, Menlo, Consolas, monospace' font-size='12'"


@dataclass(frozen=True)
class Panel:
    """A picture of the tiles along at most two dims, at fixed tiles of the other dims.

    Attributes:
        title: the ranges of the other split dims.
        rows: the dim drawn downwards; None if there is none.
        columns: the dim drawn to the right; None if there is none.
        place: the tile number along each dim; 0 for `rows` and `columns`.
    """

    title: str
    rows: int | None
    columns: int | None
    place: tuple[int, ...]


class Picture:
    """Returned by `visualize`. Displayed by `rich.print`, by `print` without colours, and by notebooks; converts to SVG and HTML.

    Attributes:
        tiling: the tiles that are drawn.
        note: a line of text below the picture.
    """

    def __init__(self, tiling: Tiling, note: str = "") -> None:
        self.tiling = tiling
        self.note = note

    def __rich__(self) -> RenderableType:
        panels = [_terminal(self.tiling, panel) for panel in _panels(self.tiling)]
        parts: list[RenderableType] = [Text(self.tiling.title, "bold"), Columns(panels, padding=(0, 3))]
        return Group(*parts, *([Text(self.note, "dim")] if self.note else []))

    def __repr__(self) -> str:
        console = Console(file=io.StringIO(), width=120, no_color=True)
        console.print(self)
        assert isinstance(console.file, io.StringIO)
        return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())

    def to_svg(self) -> str:
        """The picture as an SVG document."""
        return _svg(self.tiling, self.note)

    def to_html(self) -> str:
        """The picture as an HTML fragment."""
        return f"<figure style='margin:0'>{self.to_svg()}</figure>"

    _repr_html_ = to_html


def _panels(tiling: Tiling) -> Iterator[Panel]:
    """One panel for each combination of tiles along the split dims before the last two."""
    split = [dim for dim, count in enumerate(tiling.tiles) if count > 1]
    shown, outer = split[-2:], split[:-2]
    if len(shown) == 1:
        rank = len(tiling.tiles)
        rows, columns = (None, shown[0]) if shown[0] == rank - 1 and rank > 1 else (shown[0], None)
    else:
        rows, columns = (shown[0], shown[1]) if shown else (None, None)
    for place in itertools.product(*(_drawn(tiling.tiles[dim]) for dim in outer)):
        at = [0] * len(tiling.tiles)
        for dim, tile in zip(outer, place, strict=True):
            at[dim] = max(tile, 0)
        if -1 not in place:
            titles = [f"{tiling.names[dim]} = {tiling.range_text(dim, tile)}" for dim, tile in zip(outer, place, strict=True)]
            yield Panel(", ".join(titles), rows, columns, tuple(at))


def _drawn(count: int) -> list[int]:
    """The numbers of the tiles of a dim that are drawn; -1 marks a gap."""
    return list(range(count)) if count <= _MAX_TILES else [*range(_MAX_TILES - 2), -1, count - 1]


def _cells(tiling: Tiling, panel: Panel) -> tuple[list[int], list[int]]:
    rows = [0] if panel.rows is None else _drawn(tiling.tiles[panel.rows])
    columns = [0] if panel.columns is None else _drawn(tiling.tiles[panel.columns])
    return rows, columns


def _ids_at(tiling: Tiling, panel: Panel, row: int, column: int) -> Any:
    at = list(panel.place)
    if panel.rows is not None:
        at[panel.rows] = row
    if panel.columns is not None:
        at[panel.columns] = column
    return tiling.devices[tuple(at)]


def _colour(tiling: Tiling, ids: Any) -> tuple[str, str]:
    """(background, text colour) for a set of devices. Hues are spread over the tiles, ordered by their first device."""
    firsts = sorted({int(i) for i in tiling.devices[..., 0].ravel()})
    position = firsts.index(int(ids[0])) / len(firsts)
    if len(firsts) == 1:
        return "#d9dee5", "#1c2430"
    red, green, blue = colorsys.hls_to_rgb(position * 0.92 + 0.02, 0.74 - 0.12 * (firsts.index(int(ids[0])) % 2), 0.62)
    return "#" + "".join(f"{round(255 * part):02x}" for part in (red, green, blue)), "#1c2430"


def _terminal(tiling: Tiling, panel: Panel) -> RenderableType:
    rows, columns = _cells(tiling, panel)
    table = Table(box=rich.box.SQUARE, show_header=panel.columns is not None, padding=0)
    table.add_column("", style="dim", no_wrap=True)
    for column in columns:
        head = "" if panel.columns is None else "…" if column < 0 else tiling.range_text(panel.columns, column)
        table.add_column(head, justify="center", no_wrap=True, header_style="dim")
    for row in rows:
        head = "" if panel.rows is None else "…" if row < 0 else tiling.range_text(panel.rows, row)
        cells: list[Text] = []
        for column in columns:
            if row < 0 or column < 0:
                cells.append(Text("…", "dim"))
                continue
            ids = _ids_at(tiling, panel, row, column)
            background, text = _colour(tiling, ids)
            cells.append(Text(f" {device_text(ids)} ", Style(bgcolor=background, color=text)))
        table.add_row(head, *cells)
    heads = [Text(panel.title, "bold")] if panel.title else []
    return Group(*heads, Text(_corner(tiling, panel), "dim"), table)


def _corner(tiling: Tiling, panel: Panel) -> str:
    if panel.rows is None and panel.columns is None:
        return tiling.names[0] if len(tiling.names) == 1 and tiling.sizes is None else "whole"
    words = [f"{tiling.names[dim]} {arrow}" for dim, arrow in ((panel.rows, "↓"), (panel.columns, "→")) if dim is not None]
    return "  ".join(words)


def _svg(tiling: Tiling, note: str) -> str:
    panels = list(_panels(tiling))
    per_line = max(1, min(len(panels), math.ceil(math.sqrt(len(panels)))))
    rows, columns = _cells(tiling, panels[0])
    head = max(_HEAD, 10 + 7.4 * max(len(tiling.range_text(panels[0].rows, row)) for row in rows)) if panels[0].rows is not None else 24
    width = head + len(columns) * _CELL[0] + _GAP
    height = (3 if panels[0].title else 2) * _LINE + len(rows) * _CELL[1] + _GAP
    words = [_svg_text(12, 20, tiling.title, "font-weight='bold'")]
    for number, panel in enumerate(panels):
        left, top = (number % per_line) * width + 12, (number // per_line) * height + 34
        words.extend(_svg_panel(tiling, panel, left, top, head))
    bottom = math.ceil(len(panels) / per_line) * height + 34
    if note:
        words.append(_svg_text(12, bottom, note, "fill='#5b6675'"))
    longest = max(len(tiling.title), len(note), *(len(_corner(tiling, panel)) + 2 for panel in panels), *(len(p.title) for p in panels))
    total = max(per_line * width + 24, 8 * longest + 24)
    size = f"width='{total:.0f}' height='{bottom + 16:.0f}' viewBox='0 0 {total:.0f} {bottom + 16:.0f}'"
    return f"<svg xmlns='http://www.w3.org/2000/svg' {size} {_FONT}><rect width='100%' height='100%' fill='white'/>{''.join(words)}</svg>"


def _svg_panel(tiling: Tiling, panel: Panel, left: float, top: float, head: float) -> Iterator[str]:
    rows, columns = _cells(tiling, panel)
    if panel.title:
        yield _svg_text(left, top + 12, panel.title, "font-weight='bold'")
        top += _LINE
    yield _svg_text(left, top + 12, _corner(tiling, panel), "fill='#5b6675'")
    below = top + 2 * _LINE
    for i, column in enumerate(columns):
        if panel.columns is not None:
            text = "…" if column < 0 else tiling.range_text(panel.columns, column)
            yield _svg_text(left + head + (i + 0.5) * _CELL[0], below - 6, text, "text-anchor='middle' fill='#5b6675'")
    for j, row in enumerate(rows):
        y = below + j * _CELL[1]
        if panel.rows is not None:
            text = "…" if row < 0 else tiling.range_text(panel.rows, row)
            yield _svg_text(left + head - 8, y + _CELL[1] / 2 + 4, text, "text-anchor='end' fill='#5b6675'")
        for i, column in enumerate(columns):
            x = left + head + i * _CELL[0]
            if row < 0 or column < 0:
                yield _svg_text(x + _CELL[0] / 2, y + _CELL[1] / 2 + 4, "…", "text-anchor='middle' fill='#5b6675'")
                continue
            ids = _ids_at(tiling, panel, row, column)
            background, text = _colour(tiling, ids)
            size = f"width='{_CELL[0]}' height='{_CELL[1]}'"
            yield f"<rect x='{x:.0f}' y='{y:.0f}' {size} fill='{background}' stroke='white' stroke-width='2'/>"
            yield _svg_text(x + _CELL[0] / 2, y + _CELL[1] / 2 + 4, device_text(ids), f"text-anchor='middle' fill='{text}'")


def _svg_text(x: float, y: float, text: str, attributes: str = "") -> str:
    return f"<text x='{x:.0f}' y='{y:.0f}' {attributes}>{html.escape(text)}</text>" if text else ""


__all__ = ["Picture"]
