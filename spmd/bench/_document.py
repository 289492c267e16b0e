"""Generates docs/benchmarks.md from the results alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from spmd.bench._facts import MFU
from spmd.bench._result_table import header_of, rows_of, title_of

_HEAD = """# Benchmarks

Written by `make bench` from `benchmarks/results/*.json`; do not edit. The scripts are in `benchmarks/`, one PyTorch file and one
hand-written JAX file per benchmark. Every contender runs in its own process. In each round every contender runs one step, one after
another, so that load on the machine slows all of them alike. **ratio** is the step time of a contender divided by that of JAX by hand
in the same round; the table shows the median over the rounds.

- *JAX by hand*: `jax.jit` of one step with donated state and explicit shardings; the same math, precision and shardings as ours.
- *torchax*: the PyTorch script's loss through torchax, everything else as in JAX by hand. *torch*, *torch.compile*: one CPU
  process without sharding. *fsdp*: torch FSDP2 over gloo, one process per device.
- Ours calls `mesh.virtual_devices`, which makes glibc keep the memory that a step frees. The peers use jax and torch with their
  defaults. To measure this effect on a CPU step, run all with `MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=17179869184` in the environment.
- *dispatch*: CPU time of the calling thread until the call returned. *trace + lower*, *compile*: median over fresh programs.
- *peak*: arguments + outputs + temporaries - donated bytes, per device. *GFLOP*: matmuls and convolutions of the program, per device.
- {mfu}. Virtual CPU devices have no peak FLOPs, so there MFU is n/a.
- Topologies (`on v5e:2x4`) are compiled ahead of time by libtpu, without a TPU. Their programs are compared but not run.
"""


def document(results: dict[str, list[dict[str, Any]]]) -> str:
    """The page as Markdown: a table of goals, then one section per benchmark."""
    parts = [_HEAD.format(mfu=MFU), *_goals([result for listed in results.values() for result in listed])]
    for name, listed in results.items():
        if not listed:
            continue
        parts += [f"## {name}\n"]
        if any("clocks" in peer for result in listed for peer in result["peers"].values()):
            parts.append(f"![Step times and loss curves of {name}](images/bench-{name}.png)\n")
        for result in listed:
            parts += [f"### {title_of(result)}\n", *_about(result), *_contenders(result), *_collectives(result)]
    return "\n".join(parts).rstrip() + "\n"


def _markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(header) + " |", "| --- " + "| ---: " * (len(header) - 1) + "|"]
    return [*lines, *("| " + " | ".join((*row, *[""] * (len(header) - len(row)))) + " |" for row in rows), ""]


def _goals(results: list[dict[str, Any]]) -> list[str]:
    rows = [
        (
            title_of(result),
            goal["what"],
            f"{goal['ours']:,.4g}",
            f"{goal['theirs']:,.4g}",
            f"{goal['ratio']:.3f}",
            f"{goal['goal']:g}",
            _mark(goal),
        )
        for result in results
        for goal in result["goals"]
    ]
    return ["## Goals\n", *_markdown(("run", "figure", "ours", "theirs", "ratio", "goal", ""), rows)]


def _mark(goal: dict[str, Any]) -> str:
    return "met" if goal["met"] else "**missed**"


def _about(result: dict[str, Any]) -> list[str]:
    about = result["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    gflop = f"{result['model_flops'] / 1e9:,.4g} GFLOP in the model's forward and backward"
    return [f"{about['cpu']}, {about['cores']} cores; Python {about['python']}, {versions}; {gflop}.\n"]


def _contenders(result: dict[str, Any]) -> list[str]:
    return _markdown(header_of(result), rows_of(result))


def _collectives(result: dict[str, Any]) -> list[str]:
    programs = {name: peer["program"]["collectives"] for name, peer in result["peers"].items() if peer.get("program")}
    kinds = sorted({kind for of in programs.values() for kind in of})
    cells = [[of.get(kind) for of in programs.values()] for kind in kinds]
    shown = [[f"{cell['count']} ({cell['bytes']:,} B)" if cell else "-" for cell in row] for row in cells]
    return _markdown(("collectives", *programs), ([kind, *row] for kind, row in zip(kinds, shown, strict=True))) if kinds else []
