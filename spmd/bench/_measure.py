"""Runs one benchmark on one mesh: each contender in its own process, one step at a time in turn. Returns the figures as plain data."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmd.bench import _facts
from spmd.bench._goals import goals
from spmd.bench._machine import machine
from spmd.bench._process import PeerError, PeerProcess
from spmd.bench._task import Job
from spmd.bench._timing_statistics import paired_ratio, summary

CLOCKS = ("ready_s", "returned_s", "returned_cpu_s")
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Entrant:
    """A contender of a run.

    Attributes:
        name: its name in tables.
        file: its file in `peers/`, without `.py`.
        python: its Python interpreter.
        absent: the reason why it does not take part, or "".
    """

    name: str
    file: str
    python: str
    absent: str = ""


@dataclass(frozen=True)
class Effort:
    """The number of measurements.

    Attributes:
        rounds: timed steps of each contender. 0 only reads the programs.
        losses: steps before the timed ones, whose loss is recorded.
        traces: how many fresh programs are traced, lowered and compiled with empty caches, and as many again with warm caches.
    """

    rounds: int = 20
    losses: int = 20
    traces: int = 2


def num_phases(entrants: list[Entrant], effort: Effort) -> int:
    """The number of times that `measure` reports progress."""
    present = sum(not entrant.absent for entrant in entrants)
    return present * (2 + (effort.rounds + 1 if effort.rounds else 0) + 2 * effort.traces)


def measure(job: Job, entrants: list[Entrant], effort: Effort, report: Progress, save: Path | None = None) -> dict[str, Any]:
    """Run a benchmark.

    Args:
        job: the benchmark, its sizes and its mesh.
        entrants: the contenders.
        effort: the number of measurements.
        report: called with a description of each phase that has ended.
        save: a file for our trained weights.

    Returns:
        The result as JSON-serializable data: job, machine, figures of each contender, goals.

    Raises:
        PeerError: ours or JAX by hand failed.
    """
    result: dict[str, Any] = {"job": _described(job), "machine": machine(), "unit": job.script.UNIT}
    result["items_per_step"], result["model_flops"] = job.script.num_items(job.config), _facts.model_flops(job)
    peers: dict[str, dict[str, Any]] = {entrant.name: {"absent": entrant.absent} for entrant in entrants if entrant.absent}
    with _started(job, entrants, effort, peers, report) as running:
        if save is not None:
            running["ours"].ask("save", path=str(save.resolve()))
        _take_turns(running, effort.rounds, peers, report)
        _compile_again(running, effort.traces, peers, report)
        _read_programs(running, job, peers, report)
    _compare(result, peers, job)
    return result | {"peers": peers, "goals": goals(peers, job)}


def _described(job: Job) -> dict[str, Any]:
    kept = {name: value for name, value in job.to_dict().items() if name not in ("folder", "real_data", "weights")}
    return {**kept, "mesh": job.mesh_text, "data": "real" if job.real_data else "default", "config": vars(job.config)}


@contextmanager
def _started(
    job: Job, entrants: list[Entrant], effort: Effort, peers: dict[str, Any], report: Progress
) -> Generator[dict[str, PeerProcess]]:
    """Start the contenders' processes. A contender that fails is skipped with the reason, except ours and JAX by hand, which raise."""
    running: dict[str, PeerProcess] = {}
    try:
        for entrant in entrants:
            if entrant.absent:
                continue
            process = PeerProcess(entrant.name, entrant.file, entrant.python)
            running[entrant.name] = process
            try:
                peers[entrant.name] = process.ask("make", job=job.to_dict())
                if effort.losses and not job.topology:
                    peers[entrant.name] |= process.ask("losses", count=effort.losses)
            except PeerError as error:
                if entrant.name in ("ours", "jax"):
                    raise
                peers[entrant.name] = {"absent": str(error).splitlines()[0]}
                running.pop(entrant.name).stop()
            report(f"{entrant.name}: first steps")
        yield running
    finally:
        for process in running.values():
            process.stop()


def _take_turns(running: dict[str, PeerProcess], rounds: int, peers: dict[str, Any], report: Progress) -> None:
    """Run one step of each contender per round. The order rotates every round, so that each contender comes first equally often."""
    clocks = {name: {clock: list[float]() for clock in CLOCKS} for name in running}
    names = list(running)
    for number in range(-1 if rounds else 0, rounds):  # one warm-up round
        turn = number % len(names)
        for name in (*names[turn:], *names[:turn]):
            for clock, values in running[name].ask("steps", count=1).items():
                if number >= 0:
                    clocks[name][clock].extend(values)
            report(f"round {number + 1} of {rounds}: {name}")
    for name, of in clocks.items() if rounds else ():
        peers[name]["clocks"] = of


def _compile_again(running: dict[str, PeerProcess], traces: int, peers: dict[str, Any], report: Progress) -> None:
    """Time tracing, lowering and compilation, alternating between empty ("cold") and warm caches, `traces` times each."""
    for number in range(2 * traces):
        kind = "warm" if number % 2 else "cold"
        for name, process in running.items():
            stages = process.ask("stages", cold=kind == "cold")
            if stages:
                peers[name].setdefault(kind, []).append(stages)
            report(f"{name}: {kind} trace {number // 2 + 1} of {traces}")


def _read_programs(running: dict[str, PeerProcess], job: Job, peers: dict[str, Any], report: Progress) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name, process in running.items():
            path = Path(folder) / f"{name}.hlo"
            peers[name]["program"] = _facts.read_program(path, process.ask("program", hlo_path=str(path)), job)
            report(f"{name}: program")


def _compare(result: dict[str, Any], peers: dict[str, Any], job: Job) -> None:
    """Replace the contenders' single measurements by summaries, and add their ratios to JAX by hand."""
    hand = peers.get("jax", {}).get("clocks")
    for peer in peers.values():
        clocks = peer.get("clocks")
        if clocks:
            rates = [result["items_per_step"] / seconds for seconds in clocks["ready_s"]]
            peer["per_second"] = summary(rates)
            if hand:
                peer["ratios"] = {clock: paired_ratio(clocks[clock], hand[clock]) for clock in CLOCKS}
            peer["seconds"] = clocks["ready_s"]
            peer["clocks"] = {clock: summary(values) for clock, values in clocks.items()}
            kind = peer.get("device_kind", "")
            peer["mfu"] = _facts.mfu(result["model_flops"], peer["clocks"]["ready_s"]["median"], job.num_devices, _facts.peak_flops(kind))
        for kind in ("cold", "warm"):
            if kind in peer:
                runs = peer[kind]
                peer[kind] = {stage: statistics.median(run[stage] for run in runs) for stage in runs[0]}
