"""Does a compiled function ever do anything else than Python? Random programs with state in Python, beside CPU torch.

    make fuzz                                       # 30 minutes
    make fuzz MINUTES=5
    python -m benchmarks.fuzz --seeds 17,1204       # these, each with its program

A seed makes a small program (`fuzz_programs`): counters, schedules, queues and caches of tensors, flags, hooks, optimizers, views and
in-place writes, called some times while its state is changed in between. It runs on CPU torch and on device "jax": compiled, over eight
devices, or eager. After each call results and all state are compared: values, dtypes, and who is who. Results go to
benchmarks/results/fuzz.json, with the program of each seed that was not equal.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from benchmarks.layouts import FAST_COMPILATION
from benchmarks.worker import Worker

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "fuzz.json"
MINUTES = 30.0
TIMEOUT_S = 180.0
TRIALS_PER_WORKER = 100  # compiled programs pile up in its memory
KINDS = ("equal", "refused", "wrong", "error", "abort")


def work() -> None:
    """Answer one JSON line per seed on standard output until standard input ends."""
    warnings.simplefilter("ignore")
    import jax
    import torch

    import mesh

    mesh.virtual_devices(8)
    from benchmarks.fuzz_trials import trial

    torch.set_num_threads(1)
    answer = sys.stdout
    sys.stdout = sys.stderr
    answer.write('"ready"\n')
    answer.flush()
    for number, line in enumerate(sys.stdin):
        answer.write(json.dumps(trial(json.loads(line)["seed"])) + "\n")
        answer.flush()
        if number % 25 == 24:
            jax.clear_caches()


def start() -> Worker:
    return Worker([sys.executable, "-m", "benchmarks.fuzz", "--worker"], env={**os.environ, "XLA_FLAGS": FAST_COMPILATION})


def run(first: int, seconds: float, timeout_s: float) -> dict[int, dict[str, Any]]:
    """Trials from the seed `first` on, for so many seconds."""
    found: dict[int, dict[str, Any]] = {}
    worker, began = start(), time.monotonic()
    while time.monotonic() - began < seconds:
        seed = first + len(found)
        answer = worker.ask({"seed": seed}, timeout_s)
        found[seed] = {"mode": "", "result": f"abort: {answer}"} if isinstance(answer, str) else answer
        if isinstance(answer, str) or len(found) % TRIALS_PER_WORKER == 0:
            worker.stop()
            worker = start()
        if kind_of(found[seed]) != "equal":
            print(seed, found[seed]["mode"], found[seed]["result"], flush=True)
        if len(found) % 100 == 0:
            sys.stderr.write(f"{len(found)} programs, {time.monotonic() - began:.0f} s\n")
    worker.stop()
    return found


def kind_of(one: dict[str, Any]) -> str:
    return one["result"].partition(":")[0]


def summary(found: dict[int, dict[str, Any]], seconds: float) -> dict[str, Any]:
    """What the record holds: counts, refusals by their message, and the programs that were not equal."""
    from benchmarks.fuzz_programs import source

    kinds = collections.Counter(map(kind_of, found.values()))
    modes = collections.Counter(one["mode"] for one in found.values())
    refusals = collections.Counter(one["result"].splitlines()[0] for one in found.values() if kind_of(one) == "refused")
    return {
        "seeds": [min(found), max(found)],
        "programs": len(found),
        "seconds": round(seconds),
        **{kind: kinds[kind] for kind in KINDS},
        "calls": sum(one.get("calls", 0) for one in found.values()),
        "traces": sum(one.get("traces", 0) for one in found.values()),
        "modes": dict(modes),
        "refusals": dict(refusals.most_common()),
        "not_equal": {str(s): {**one, "program": source(s).splitlines()} for s, one in found.items() if kind_of(one) != "equal"},
    }


def show(seeds: list[int]) -> None:
    """Run these seeds here, each program and its result printed."""
    import mesh

    mesh.virtual_devices(8)
    from benchmarks.fuzz_programs import source
    from benchmarks.fuzz_trials import trial

    for seed in seeds:
        print(source(seed))
        print(trial(seed), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=MINUTES, metavar="M")
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    parser.add_argument("--seeds", default="", metavar="S,S", help="only these, with their programs")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, metavar="S", help="seconds for each")
    parser.add_argument("--json", type=Path, default=RESULTS, metavar="OUT")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.worker:
        work()
        return
    if chosen.seeds:
        show([int(seed) for seed in chosen.seeds.split(",")])
        return
    began = time.monotonic()
    found = run(chosen.first, chosen.minutes * 60, chosen.timeout)
    record = summary(found, time.monotonic() - began)
    chosen.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print({key: value for key, value in record.items() if key != "not_equal"})
    if record["wrong"] or record["error"] or record["abort"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
