"""Checks that layouts do not change values: random operations and training steps over random meshes and layouts, against CPU torch.

    python -m benchmarks.layouts                          # 3,000 trials (about an hour on one core)
    python -m benchmarks.layouts --trials 200 --first 3000
    python -m benchmarks.layouts --first 1000000 --trials 200      # the trials of seeds 0 to 199 under spmd.lazy()
    python -m benchmarks.layouts --seeds 17,1204          # runs these seeds and prints their trials

Each trial has a seed, which draws the operation, sizes, dtype, mesh and layouts, and whether it is compiled and differentiated. Trials run
in a worker process, so that an abort or a hang is the result of one trial. Results are written to benchmarks/results/layouts.json, and the
table to docs/layouts.md.
"""

from __future__ import annotations

import argparse
import collections
import json
import re
from pathlib import Path
from typing import Any

from benchmarks.seeds import kind_of, trials

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "layouts.json"
PAGE = ROOT / "docs" / "layouts.md"
NUM_TRIALS = 3000
TIMEOUT_S = 120.0
KINDS = ("right", "refused", "wrong", "foreign", "abort")


def run(seeds: list[int], timeout_s: float, verbose: bool) -> dict[str, dict[str, str]]:
    """Run the trials of these seeds. Each result has the keys "what" and "result"."""
    found: dict[str, dict[str, str]] = {}
    for seed, answer in trials("benchmarks.layout_trials", seeds, timeout_s):
        one = found[str(seed)] = {"what": "", **answer}
        if verbose or kind_of(one["result"]) not in ("right", "refused"):
            print(f"{seed} {one['what']}: {one['result']}", flush=True)
    return found


def table(found: dict[str, dict[str, str]]) -> str:
    """The Markdown table for docs/layouts.md: number of trials by operation and result."""
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for one in found.values():
        words = one["what"].split()
        name = "died" if not words else " ".join(words[:2]) if words[0] == "step" else words[0]
        counts[name][kind_of(one["result"])] += 1
    total = sum(counts.values(), collections.Counter[str]())
    lines = [f"| | trials | {' | '.join(KINDS)} |", "|---|---|" + "---|" * len(KINDS)]
    for name, count in [("**all**", total), *sorted(counts.items())]:
        lines.append(f"| {name} | {sum(count.values())} | {' | '.join(str(count[kind]) for kind in KINDS)} |")
    return "\n".join(lines)


def write(found: dict[str, dict[str, str]]) -> None:
    """Write the results, with a description of each trial that is not right, and the table in docs/layouts.md."""
    by_seed: dict[str, Any] = {seed: one["result"] if one["result"] == "right" else one for seed, one in found.items()}
    kinds = collections.Counter(kind_of(one["result"]) for one in found.values())
    whole = {"trials": len(found), **{kind: kinds[kind] for kind in KINDS}, "seeds": by_seed}
    RESULTS.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(re.sub(r"(?s)(<!-- table -->\n).*(<!-- end -->)", lambda m: f"{m[1]}{table(found)}\n{m[2]}", page), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=NUM_TRIALS, metavar="N")
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    parser.add_argument("--seeds", default="", metavar="S,S", help="run only these, and print each result")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, metavar="S", help="timeout of each, in seconds")
    parser.add_argument("--json", type=Path, default=None, metavar="OUT", help="also write the trials to this file")
    chosen = parser.parse_args()
    seeds = [int(s) for s in chosen.seeds.split(",") if s] or list(range(chosen.first, chosen.first + chosen.trials))
    found = run(seeds, chosen.timeout, bool(chosen.seeds))
    print(table(found))
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if not chosen.seeds and chosen.first == 0 and chosen.trials >= NUM_TRIALS:
        write(found)
    if any(kind_of(one["result"]) in ("wrong", "foreign", "abort") for one in found.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
