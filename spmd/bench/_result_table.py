"""Results as tables in the terminal."""

from __future__ import annotations

from typing import Any

import rich.box
from rich.table import Table

from spmd.bench._facts import MFU

_RATES, _TIMES = ("median", "mean", "p90", "std", "CV"), ("ratio", "step ms", "dispatch ms", "trace+lower s", "compile s")
_WIDTH = 120  # terminal columns that a table with one row per contender needs
_HEADER = ("", *_RATES, *_TIMES, "peak MiB", "GFLOP")


def title_of(result: dict[str, Any]) -> str:
    """Title of a result: benchmark, variant, preset and mesh."""
    job = result["job"]
    parts = (job["name"], job["config"]["variant"], job["preset"], job["mesh"], "" if job["dtype"] == "float32" else job["dtype"])
    return " ".join(part for part in parts if part) + (" on GPU" if job["platform"] == "gpu" else "")


def rows_of(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """One row per contender: items per second, ratio of the step time to JAX by hand, times, and figures of the program."""
    rows: list[tuple[str, ...]] = []
    for name, peer in result["peers"].items():
        if "absent" in peer:
            rows.append((name, peer["absent"]))
            continue
        row = [name]
        rates, clocks, program = peer.get("per_second"), peer.get("clocks"), peer.get("program")
        row += [f"{rates[key]:,.4g}" for key in ("median", "mean", "p90", "std")] + [f"{rates['cv']:.1%}"] if rates else [""] * 5
        row.append(f"{peer['ratios']['ready_s']:.3f}" if "ratios" in peer else "")
        row += [f"{1e3 * clocks[clock]['median']:.4g}" for clock in ("ready_s", "returned_cpu_s")] if clocks else ["", ""]
        stages = peer.get("warm") or (program or {}).get("stages")
        row += [f"{stages['trace_s'] + stages['lower_s']:.3g}", f"{stages['compile_s']:.3g}"] if stages else ["", ""]
        row += [f"{program['peak_bytes'] / 2**20:,.4g}", f"{program['flops'] / 1e9:,.4g}"] if program else ["", ""]
        rows.append(tuple(row))
    return rows


def header_of(result: dict[str, Any]) -> tuple[str, ...]:
    """Names of the columns. The name of the first rate contains its unit."""
    return (_HEADER[0], f"{result['unit']}/s", *_HEADER[2:])


def table(result: dict[str, Any], width: int = _WIDTH) -> Table:
    """A table with one row per contender, or one column per contender if the terminal has too few columns for that."""
    shown = Table(title=title_of(result), caption=_caption(result), box=rich.box.SIMPLE_HEAD)
    if width < _WIDTH:
        return _transposed(shown, header_of(result), rows_of(result))
    for name in header_of(result):
        shown.add_column(name, justify="right" if name else "left")
    for row in rows_of(result):
        shown.add_row(*row)
    return shown


def _transposed(shown: Table, header: tuple[str, ...], rows: list[tuple[str, ...]]) -> Table:
    """A column per contender that took part. The title lists the others with their reasons."""
    present, absent = [row for row in rows if len(row) == len(header)], [row for row in rows if len(row) != len(header)]
    shown.title = "\n".join([str(shown.title), *(f"{row[0]}: {row[1]}" for row in absent if len(row) > 1)])
    shown.add_column("")
    for row in present:
        shown.add_column(row[0], justify="right")
    for i, name in enumerate(header[1:], start=1):
        if any(row[i] for row in present):
            shown.add_row(name, *(row[i] for row in present))
    shown.min_width = 72  # for the caption
    return shown


def goals(result: dict[str, Any]) -> Table:
    """The figures with goals, and whether each goal is met."""
    shown = Table("figure", "ours", "theirs", "ratio", "goal", "", box=rich.box.SIMPLE_HEAD)
    for goal in result["goals"]:
        mark = "[green]met[/]" if goal["met"] else "[red]missed[/]"
        shown.add_row(goal["what"], f"{goal['ours']:,.4g}", f"{goal['theirs']:,.4g}", f"{goal['ratio']:.3f}", f"<= {goal['goal']:g}", mark)
    return shown


def _caption(result: dict[str, Any]) -> str:
    about, share = result["machine"], result["peers"].get("ours", {}).get("mfu")
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    shown = "MFU n/a" if share is None else f"MFU {share:.1%}"
    return (
        f"{about['cpu']}, {about['cores']} cores; {versions}\n{result['model_flops'] / 1e9:,.4g} GFLOP in the model's step; {shown}: {MFU}"
    )


def collectives(result: dict[str, Any]) -> Table:
    """Collectives by kind and axis: count and bytes per device and step."""
    programs = {name: peer["program"]["collectives"] for name, peer in result["peers"].items() if peer.get("program")}
    shown = Table("collectives", *programs, box=rich.box.SIMPLE_HEAD)
    for kind in sorted({kind for of in programs.values() for kind in of}):
        cells = (of.get(kind) for of in programs.values())
        shown.add_row(kind, *(f"{cell['count']} ({cell['bytes'] / 2**20:,.4g} MiB)" if cell else "-" for cell in cells))
    return shown
