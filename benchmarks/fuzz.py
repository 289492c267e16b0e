"""Compares compiled functions with CPU torch on random programs with state in Python objects.

    make fuzz                                       # 30 minutes
    make fuzz MINUTES=5
    python -m benchmarks.fuzz --seeds 17,1204       # runs these seeds and prints their programs

Each seed generates a small program (`fuzz_programs`) with counters, schedules, queues and caches of tensors, flags, hooks, optimizers,
views and in-place writes. It is called several times, with changes to its state in between. It runs on CPU torch and on device "jax":
compiled, over eight devices, eager, or under `spmd.lazy()` (seeds from 1,000,000 on, with the same programs). After each call results
and all state are compared: values, dtypes and object identities. Results are written to benchmarks/results/fuzz.json, with the program
of each seed that was not equal.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import time
from pathlib import Path
from typing import Any

from benchmarks.fuzz_programs import LAZY, source
from benchmarks.seeds import kind_of, trials

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "fuzz.json"
MINUTES = 30.0
TIMEOUT_S = 180.0
KINDS = ("equal", "refused", "wrong", "error", "abort")


def run(first: int, seconds: float, timeout_s: float) -> dict[int, dict[str, Any]]:
    """Run trials from the seed `first` on, for `seconds` seconds. Returns the result of each seed."""
    found: dict[int, dict[str, Any]] = {}
    until = time.monotonic() + seconds
    both = itertools.chain.from_iterable((seed, seed + LAZY) for seed in itertools.count(first))
    for seed, answer in trials("benchmarks.fuzz_trials", both, timeout_s):
        found[seed] = {"mode": "", **answer}
        if kind_of(found[seed]["result"]) != "equal":
            print(seed, found[seed]["mode"], found[seed]["result"], flush=True)
        if time.monotonic() > until:
            break
    return found


def summary(found: dict[int, dict[str, Any]], seconds: float) -> dict[str, Any]:
    """The record: counts, refusals by message, and the programs that were not equal."""
    kinds = collections.Counter(kind_of(one["result"]) for one in found.values())
    modes = collections.Counter(one["mode"] for one in found.values())
    refusals = collections.Counter(one["result"].splitlines()[0] for one in found.values() if kind_of(one["result"]) == "refused")
    return {
        "seeds": [min(found), max(found)],
        "programs": len(found),
        "seconds": round(seconds),
        **{kind: kinds[kind] for kind in KINDS},
        "has_grown": sum(one.get("has_grown", False) for one in found.values()),
        "calls": sum(one.get("calls", 0) for one in found.values()),
        "traces": sum(one.get("traces", 0) for one in found.values()),
        "modes": dict(modes),
        "refusals": dict(refusals.most_common()),
        "not_equal": {
            str(s): {**one, "program": source(s % LAZY).splitlines()} for s, one in found.items() if kind_of(one["result"]) != "equal"
        },
    }


def show(seeds: list[int]) -> None:
    """Run these seeds in this process, and print each program with its result."""
    import mesh

    mesh.virtual_devices(8)
    from benchmarks.fuzz_trials import trial

    for seed in seeds:
        print(source(seed % LAZY))
        print(trial(seed), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=MINUTES, metavar="M")
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    parser.add_argument("--seeds", default="", metavar="S,S", help="run only these, and print their programs")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, metavar="S", help="timeout of each, in seconds")
    parser.add_argument("--json", type=Path, default=RESULTS, metavar="OUT")
    chosen = parser.parse_args()
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
