"""Compares our figures with their goals, which are ratios to JAX by hand and to torchax."""

from __future__ import annotations

from typing import Any

from spmd.bench._task import Job

STEP, COUNT, TRACE, DISPATCH, TORCHAX = 1.05, 1.03, 1.5, 1.5, 1.0


def goals(peers: dict[str, Any], job: Job) -> list[dict[str, Any]]:
    """One row per figure: its name, our value, the peer's value, their ratio, the goal (the largest allowed ratio), whether it is met."""
    ours, hand, torchax = (peers.get(name, {}) for name in ("ours", "jax", "torchax"))
    rows: list[dict[str, Any]] = []

    def add(what: str, mine: float, theirs: float, goal: float, ratio: float | None = None) -> None:
        ratio = (mine / theirs if theirs else float(mine > 0) + 1.0) if ratio is None else ratio
        rows.append({"what": what, "ours": mine, "theirs": theirs, "ratio": ratio, "goal": goal, "met": ratio <= goal})

    if "clocks" in ours and "clocks" in hand:
        for clock, title, goal in (("ready_s", "step, s", STEP), ("returned_cpu_s", "host dispatch, CPU s", DISPATCH)):
            if clock == "ready_s" or job.preset == "dispatch":
                add(title, ours["clocks"][clock]["median"], hand["clocks"][clock]["median"], goal, ours["ratios"][clock])
    for kind in ("warm", "cold"):
        if kind in ours and kind in hand:
            mine, theirs = (of[kind]["trace_s"] + of[kind]["lower_s"] for of in (ours, hand))
            add(f"trace + lower, {kind}, s", mine, theirs, TRACE)
    if ours.get("program") and hand.get("program"):
        for fact, title in (("flops", "FLOPs"), ("collective_bytes", "collective bytes"), ("peak_bytes", "peak bytes per chip")):
            add(title, ours["program"][fact], hand["program"][fact], COUNT)
    if "clocks" in ours and "clocks" in torchax:
        mine, theirs = (of["clocks"]["ready_s"]["median"] for of in (ours, torchax))
        add("step to torchax, s", mine, theirs, TORCHAX, ours["ratios"]["ready_s"] / torchax["ratios"]["ready_s"])
    return rows
