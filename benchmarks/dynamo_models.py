"""Runs models of Hugging Face and timm under `torch.compile(model, backend="spmd")`, and compares them with CPU torch.

    python -m benchmarks.dynamo_models                           # all of CHOSEN; writes dynamo_models.json and docs/compile_models.md
    python -m benchmarks.dynamo_models --models '^(GPT-2|T5)$'   # some models; only prints

The models, their inputs and the comparison are those of `benchmarks.models`. There are two columns:

    inference   the forward pass: every tensor of the result, including caches; decoders then get one more token and the cache
    training    loss.backward() through the compiled model and an SGD step: loss, gradients, parameters and buffers

Each result also records the graphs, programs and graph breaks, and the graphs that ran operation by operation.
"""

from __future__ import annotations

import copy
import json
import os
import re
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from benchmarks import models, zoo_timm
from benchmarks.models import PASSES, ZOO, Subject, reason, state, train_step, trained
from benchmarks.seeds import FAST_COMPILATION
from benchmarks.worker import Worker, serve, shard_of, sweep_parser

RESULTS = models.ROOT / "benchmarks" / "results" / "dynamo_models.json"
TABLE = models.ROOT / "docs" / "compile_models.md"
COLUMNS = ("inference", "training")
MODELS_PER_WORKER = 8
SLOW = re.compile(
    "Switch|DETR|Grounding|LLaVA|Qwen2-VL|Qwen2.5|Idefics|PaliGemma|Longformer|LED|BigBird|OWL|XLNet|RWKV|Jamba|Bamba|Recurrent|SigLIP 2"
)
CHOSEN = [
    *(name for name, row in ZOO.items() if row.library == "transformers" and not SLOW.search(name)),
    *(name for name in zoo_timm.ARCHITECTURES if not ZOO[name].remark),
]


class Captured(Subject):
    """One architecture under torch.compile."""

    def inference(self) -> None:
        fast = torch.compile(self.device, backend="spmd")
        with torch.no_grad():
            self._compare_forward(fast)

    def training(self) -> None:
        want = trained(self.row, copy.deepcopy(self.host), self.inputs())
        comparison = self.comparison(lambda: trained(self.row, self.double(), models.in_double(self.row.inputs())))
        model = copy.deepcopy(self.device).train(not self.row.samples)
        fast: Any = torch.compile(model, backend="spmd")
        loss = train_step(fast, torch.optim.SGD(model.parameters(), lr=models.LEARNING_RATE), models.on_device(self.inputs()))
        comparison.require("step", state(model, loss), want)
        self.notes += comparison.notes


def check(name: str) -> dict[str, Any]:
    """The result of each column: "pass", "pass in float64" (see `benchmarks.models.check`) or a failure's reason; and Dynamo's graphs."""
    import spmd.dynamo

    row, found = ZOO[name], dict[str, Any]()
    counters = torch._dynamo.utils.counters
    for column in COLUMNS:
        torch._dynamo.reset()
        counters.clear()
        before = set(spmd.dynamo.graphs())
        subject = Captured(row)
        try:
            subject.column(column)
            found[column] = PASSES[0]
        except models.Inexact as error:
            try:
                Captured(row, torch.float64).column(column)
                found[column] = PASSES[1]
            except Exception:
                found[column] = reason(error)
        except Exception as error:  # any exception is a result
            found[column] = reason(error)
        made = [graph for graph in spmd.dynamo.graphs() if graph not in before]
        found[f"{column}_graphs"] = {
            "graphs": len(made),
            "programs": sum(graph.num_programs for graph in made),
            "breaks": sorted({text.splitlines()[0] for text in counters["graph_break"]}),
            "refused": sorted({graph.refused.splitlines()[0] for graph in made if graph.refused}),
        }
    return found


def work() -> None:
    """Run in the worker: reply with one JSON line per model on standard output until standard input ends."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    import transformers

    import spmd.dynamo

    if "spmd" not in torch._dynamo.list_backends(exclude_tags=None):
        torch._dynamo.register_backend(spmd.dynamo.compile_graph, "spmd")
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    serve(lambda request: check(request["model"]))


def start() -> Worker:
    flags = f"{os.environ.get('XLA_FLAGS', '')} {FAST_COMPILATION}".strip()
    return Worker([sys.executable, "-m", "benchmarks.dynamo_models", "--worker"], {**os.environ, "XLA_FLAGS": flags})


def run(names: list[str], timeout_s: float, out: Path | None) -> None:
    """Check the models, and write the results so far after each."""
    worker = start()
    for number, name in enumerate(names):
        began = time.monotonic()
        found = worker.ask({"model": name}, timeout_s)
        is_lost = isinstance(found, str)
        results = {name: dict.fromkeys(COLUMNS, found) if is_lost else found}
        print(f"{number + 1}/{len(names)} {name} ({time.monotonic() - began:.0f} s): {json.dumps(results[name])}", flush=True)
        if out is not None:
            write({**(json.loads(out.read_text()) if out.exists() else {}), **results}, out)
        if is_lost or number % MODELS_PER_WORKER == MODELS_PER_WORKER - 1:
            worker.stop()
            worker = start()
    worker.stop()


def write(results: dict[str, dict[str, Any]], out: Path) -> None:
    """Write the results in the order of the table. The record is also written as docs/compile_models.md."""
    results = {n: results[n] for n in ZOO if n in results}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=1) + "\n")
    if out == RESULTS:
        TABLE.write_text(table(results))


def table(results: dict[str, dict[str, Any]]) -> str:
    """The text of docs/compile_models.md."""
    passed = {c: sum(found[c] in PASSES for found in results.values()) for c in COLUMNS}
    whole = sum(found.get("inference_graphs", {}).get("graphs") == 1 for found in results.values())
    lines = [
        PREFACE.format(total=len(results), **passed, whole=whole, torch=torch.__version__.partition("+")[0]),
        "| model | class | inference | graphs | training | graphs |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, found in results.items():
        marks = [found[c] if found[c] in PASSES else "**fails**" for c in COLUMNS]
        counts = [str(found.get(f"{c}_graphs", {}).get("graphs", "")) for c in COLUMNS]
        lines.append(f"| {name} | `{ZOO[name].model}` | {marks[0]} | {counts[0]} | {marks[1]} | {counts[1]} |")
    lines += ["", "## Graph breaks", ""]
    breaks: dict[str, list[str]] = {}
    for name, found in results.items():
        for text in {t for c in COLUMNS for t in found.get(f"{c}_graphs", {}).get("breaks", [])}:
            breaks.setdefault(text, []).append(name)
    lines += [f"- {text}: {', '.join(names)}" for text, names in sorted(breaks.items())] or ["None."]
    lines += ["", "## Graphs that run operation by operation", ""]
    refused = [
        f"- {name}: {text}"
        for name, found in results.items()
        for text in sorted({t for c in COLUMNS for t in found.get(f"{c}_graphs", {}).get("refused", [])})
    ]
    lines += refused or ["None."]
    lines += ["", "## Failures", ""]
    failures = [f"- {name}, {c}: {models.plain(found[c])}" for name, found in results.items() for c in COLUMNS if found[c] not in PASSES]
    return "\n".join([*lines, *(failures or ["None."])]) + "\n"


PREFACE = """# Models under torch.compile

Generated by `python -m benchmarks.dynamo_models`; do not edit.

torch {torch}, `torch.compile(model, backend="spmd")`: **{inference} of {total} models agree with CPU torch in inference, and {training} in
training**. Each has a small configuration and random weights, and is compared as in [models.md](models.md). Inference is a single graph for
{whole} models. A decoder's inference consists of three calls, the last two with a cache, so it has up to three graphs without a graph
break. `pass in float64` means that the results differ in float32 by rounding and agree in float64.
"""


def main() -> None:
    chosen = sweep_parser("models", __doc__, 240.0, RESULTS).parse_args()
    if chosen.worker:
        work()
        return
    names = shard_of([n for n in CHOSEN if re.search(chosen.models, n)], chosen.shard)
    run(names, chosen.timeout, chosen.json or (None if chosen.models else RESULTS))


if __name__ == "__main__":
    main()
