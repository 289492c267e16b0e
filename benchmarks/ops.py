"""Compares torch's operators on device 'jax' with the CPU: every OpInfo, by dtype, and with gradients, in place, with out= and sharded.

    python -m benchmarks.ops                                        # all (more than an hour on one core)
    python -m benchmarks.ops --ops '^(add|nn.functional.conv)' --dtypes float32,bfloat16 --kinds forward,grad
    python -m benchmarks.ops --shard 0/4 --json part0.json          # and so on, then
    python -m benchmarks.ops --merge part*.json

Ops run in a worker process, which is restarted when it crashes or an op exceeds its timeout. Results are written to
benchmarks/results/ops.json as {op: {dtype: {kind: "pass" | "skip: reason" | "first line of the failure"}}}, and a summary is printed. An
entry that passes in the record but no longer passes is an error, and the record is not changed unless `--accept` is given.
"""

from __future__ import annotations

import argparse
import collections
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.sweep_record import guard
from benchmarks.worker import WHOLE, Worker, merged, serve, shard_of, sweep_parser

ROOT = Path(__file__).resolve().parents[1]
DEFAULT_JSON = ROOT / "benchmarks" / "results" / "ops.json"
DEFAULT_DTYPES = "float32,float64,bfloat16,int64,int32,bool,complex64"
ALL_DTYPES = "float32,float64,bfloat16,float16,int64,int32,int16,int8,uint8,bool,complex64"
DEFAULT_KINDS = "forward,grad,inplace,out,sharded,sharded_grad"
SPLIT_DTYPES = ("float32",)  # dtypes of sharded inputs; the other dtypes are compared unsharded only
OPS_PER_WORKER = 100  # compiled programs accumulate in a worker's memory


def work() -> None:
    """Run in the worker: reply with one JSON line per op on standard output until standard input ends."""
    import torch

    import mesh

    mesh.virtual_devices(8)
    from tests.lowering import opinfo

    torch.set_num_threads(1)

    def answer_to(request: dict[str, Any]) -> Any:
        op = opinfo.by_name(request["op"])
        results: dict[str, dict[str, str]] = {}
        for dtype, kind in opinfo.applicable(op, tuple(getattr(torch, d) for d in request["dtypes"]), tuple(request["kinds"])):
            name = str(dtype).removeprefix("torch.")
            if kind.startswith("sharded") and name not in SPLIT_DTYPES:
                continue
            found = opinfo.check(op, dtype, kind)
            text = "pass" if found is None else f"skip: {found.reason}" if isinstance(found, opinfo.Skipped) else found
            results.setdefault(name, {})[kind] = text
        return results

    serve(answer_to, {"names": opinfo.names()})


def start() -> Worker:
    """Start a worker for operators. Its first line contains their names."""
    return Worker([sys.executable, "-m", "benchmarks.ops", "--worker"])


def options() -> argparse.Namespace:
    parser = sweep_parser("ops", __doc__, 1500.0, DEFAULT_JSON)
    parser.add_argument("--dtypes", default=DEFAULT_DTYPES, help=f"comma-separated, or 'all': {ALL_DTYPES}")
    parser.add_argument("--kinds", default=DEFAULT_KINDS)
    parser.add_argument("--verbose", action="store_true", help="print failures as they are found")
    return parser.parse_args()


def main() -> None:
    chosen = options()
    if chosen.worker:
        work()
        return
    if chosen.merge:
        results = merged(chosen.merge)
        summarise(results)
        guard(DEFAULT_JSON, results, is_whole=True, accepts=chosen.accept)
        write(results, DEFAULT_JSON)
        return
    dtypes = (ALL_DTYPES if chosen.dtypes == "all" else chosen.dtypes).split(",")
    kinds = chosen.kinds.split(",")
    worker = start()
    names = shard_of([name for name in worker.hello["names"] if re.search(chosen.ops, name)], chosen.shard)
    results: dict[str, Any] = {}
    began = time.monotonic()
    for number, name in enumerate(names):
        found = worker.ask({"op": name, "dtypes": dtypes, "kinds": kinds}, chosen.timeout)
        is_lost = isinstance(found, str)
        results[name] = {dtypes[0]: {kinds[0]: found}} if is_lost else found
        if is_lost or number % OPS_PER_WORKER == OPS_PER_WORKER - 1:
            worker.stop()
            worker = start()
        if chosen.verbose or len(names) <= 60:
            show_failures(name, results[name])
        if sys.stderr.isatty() or number % 50 == 49:
            sys.stderr.write(f"{number + 1}/{len(names)} {time.monotonic() - began:.0f} s\n")
    worker.stop()
    is_whole = not chosen.ops and chosen.shard == WHOLE
    summarise(results)
    if chosen.json is not None:
        write(results, chosen.json)
    has_all = is_whole and set(DEFAULT_DTYPES.split(",")) <= set(dtypes) and set(DEFAULT_KINDS.split(",")) <= set(kinds)
    guard(DEFAULT_JSON, results, has_all, accepts=chosen.accept)
    if is_whole and chosen.json is None:
        write(results, DEFAULT_JSON)


def write(results: dict[str, Any], out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")


def show_failures(name: str, found: dict[str, dict[str, str]]) -> None:
    for dtype, by_kind in found.items():
        for kind, text in by_kind.items():
            if text != "pass" and not text.startswith("skip"):
                print(f"{name} {dtype} {kind}: {text}", flush=True)


def summarise(results: dict[str, Any]) -> None:
    """Print the numbers of passes and of attempts, by dtype and kind."""
    passed: collections.Counter[tuple[str, str]] = collections.Counter()
    tried: collections.Counter[tuple[str, str]] = collections.Counter()
    for found in results.values():
        for dtype, by_kind in found.items():
            for kind, text in by_kind.items():
                if not text.startswith("skip"):
                    tried[dtype, kind] += 1
                    passed[dtype, kind] += text == "pass"
    for (dtype, kind), count in sorted(tried.items()):
        print(f"{dtype:10} {kind:8} {passed[dtype, kind]:4} of {count:4} pass")


if __name__ == "__main__":
    main()
