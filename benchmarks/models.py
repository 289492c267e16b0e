"""Runs unmodified models of Hugging Face and timm on device 'jax', and compares them with CPU torch: eager, compiled, and training.

    python -m benchmarks.models                           # all of ZOO; writes models.json and docs/models.md
    python -m benchmarks.models --models '^(GPT-2|T5)$'   # some models; only prints

Every model is tiny and randomly initialized, so nothing is downloaded. There are three columns, each compared with CPU torch:

    eager      the forward pass: every tensor of the ModelOutput, including caches; decoders then get one more token and the cache
    compiled   the same under spmd.compile, with caches passed from one call to the next; no value may be read back to the host
    gradients  an eager backward pass, then a compiled SGD step: loss, all gradients, and all parameters and buffers after the step; tied
               weights must still be tied

A model that passes in models.json but no longer passes is an error, and the record is not changed unless `--accept` is given.
"""

from __future__ import annotations

import argparse
import collections
import copy
import dataclasses
import functools
import json
import os
import re
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn

from benchmarks import zoo, zoo_timm, zoo_vision
from benchmarks.seeds import FAST_COMPILATION
from benchmarks.sweep_record import guard
from benchmarks.worker import WHOLE, Worker, merged, serve, shard_of, sweep_parser

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "models.json"
TABLE = ROOT / "docs" / "models.md"
TIMM = ROOT / ".venv-timm"
COLUMNS = ("eager", "compiled", "gradients")
MODELS_PER_WORKER = 12  # compiled programs accumulate in a worker's memory
LEARNING_RATE = 0.1

# (rtol, atol) of torch.testing
TOLERANCES = {torch.float32: (1.3e-6, 1e-5), torch.float64: (1e-7, 1e-7)}
PASSES = ("pass", "pass in float64")
# A second check, because atol would hide a small tensor that is completely wrong: relative to the tensor's norm and to the largest norm
# among all tensors.
NORM_RTOL, NORM_ATOL = 1e-3, 1e-6
# If rounding in float32 exceeds the tolerances, the reference is CPU torch in float64. The device's error may be at most this many times
# the error of CPU torch in float32,
ROUNDING = 3.0
# and at most this, relative to the tensor's norm plus the largest norm among all tensors.
WORST_RTOL, WORST_ATOL = 1e-2, 1e-4

ZOO = zoo.ARCHITECTURES | zoo_vision.ARCHITECTURES | zoo_timm.ARCHITECTURES
Named = dict[str, torch.Tensor]


class Mismatch(AssertionError):
    """A result differs from CPU torch."""


class Inexact(Mismatch):
    """A result differs from CPU torch only in finite floating point values."""


def build(row: zoo.Architecture) -> nn.Module:
    """The model on the CPU, without dropout, with weights large enough that an error in any of them changes the result."""
    torch.manual_seed(0)
    model = _MAKERS[row.library](row)
    with torch.no_grad():
        for parameter in model.parameters():
            enlarge(parameter)
    return model


def of_transformers(row: zoo.Architecture) -> nn.Module:
    import transformers

    model_class = getattr(transformers, row.model)
    config = (getattr(transformers, row.config) if row.config else model_class.config_class)(**row.sizes)
    without_dropout(config)
    return model_class(config)


def of_timm(row: zoo.Architecture) -> nn.Module:
    model = imported_timm().create_model(row.model, **row.sizes)
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and ("drop" in name or (name == "p" and "Drop" in type(module).__name__)):
                setattr(module, name, 0.0)
    return model


_MAKERS: dict[str, Callable[[zoo.Architecture], nn.Module]] = {"transformers": of_transformers, "timm": of_timm}


@functools.cache
def imported_timm() -> Any:
    """The package timm, from the folder that `make models` installs it into, or from the environment.

    timm imports torchvision, whose operators are built for CUDA and so missing in a CPU build of torch. torchvision registers metadata
    for two of them during its import, which fails if they are not declared. They are declared here without an implementation, since no
    model calls them. The import would also fail in Hugging Face's models, so torchvision is kept out of their import path.
    """
    sys.path.append(str(TIMM))
    declared = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            declared.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import timm

    return timm


def without_dropout(config: Any) -> None:
    """Set every dropout, drop-path and layer-drop rate of a configuration and its nested configurations to 0."""
    for name, value in list(vars(config).items()):
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
        elif "drop" in name and isinstance(value, (list, tuple)):
            setattr(config, name, type(value)(0.0 for _ in value))
        elif hasattr(value, "to_dict"):
            without_dropout(value)


def enlarge(parameter: torch.Tensor) -> None:
    """Scale small weights up to a standard deviation that preserves the size of sums, at most 0.18 (32 ** -0.5). Add noise to constants."""
    if parameter.numel() < 2 or not parameter.is_floating_point():
        return
    spread = float(parameter.std())
    if spread == 0.0:
        parameter.add_(0.1 * torch.randn(parameter.shape))
    elif spread < 0.05:
        num_summed = parameter.numel() / parameter.shape[0]
        parameter.mul_(max(min(0.18, num_summed**-0.5), spread) / spread)


def loss_of(output: Any) -> torch.Tensor:
    """The model's own loss, or else the sum of the mean squares of all results that require grad."""
    loss = getattr(output, "loss", None)
    if loss is not None:
        return loss
    return torch.stack([t.square().mean() for t in tensors(output).values() if t.requires_grad]).sum()


def tensors(value: Any) -> Named:
    """All tensors in a result, by path. Searches ModelOutputs, containers, and objects of transformers such as caches."""
    return dict(_walk(value, "", set()))


def _walk(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path or "result", value
        return
    if isinstance(value, Mapping):
        parts = [(f"{path}.{k}" if path else str(k), v) for k, v in value.items()]
    elif isinstance(value, (list, tuple)):
        parts = [(f"{path}[{i}]", v) for i, v in enumerate(value)]
    elif type(value).__module__.startswith("transformers.") and not isinstance(value, (type, nn.Module)):
        parts = [(f"{path}.{k}", v) for k, v in vars(value).items()]
    else:
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    for name, part in parts:
        yield from _walk(part, name, seen)


@dataclasses.dataclass
class Comparison:
    """Compares named tensors with CPU torch, in float64 if the tolerances for float32 are exceeded.

    Attributes:
        exact: computes the tensors by CPU torch in float64. None: the reference is float64 already, and no larger error is allowed.
        notes: tensors that exceeded torch.testing's tolerance but passed by their distance from float64.
    """

    exact: Callable[[], Named] | None
    notes: list[str] = dataclasses.field(default_factory=list)
    _exact: Named | None = None

    def require(self, what: str, got: Named, want: Named) -> None:
        """Raise Mismatch for the first tensor that is missing, or differs in shape, dtype or value."""
        if got.keys() != want.keys():
            raise Mismatch(f"{what}: only on one side: {sorted(got.keys() ^ want.keys())[:4]}")
        largest = max((float(t.detach().double().norm()) for t in want.values() if t.is_floating_point()), default=0.0)
        for name, expected in want.items():
            found = got[name].detach().cpu()
            expected = expected.detach()
            if found.dtype != expected.dtype or found.shape != expected.shape:
                raise Mismatch(f"{what}: {name} is {found.dtype}{list(found.shape)}, not {expected.dtype}{list(expected.shape)}")
            if not is_close(found, expected, largest):
                self._require_as_good(what, name, found, expected, largest)

    def _require_as_good(self, what: str, name: str, found: torch.Tensor, expected: torch.Tensor, largest: float) -> None:
        wild = ~found.isfinite() | ~expected.isfinite()
        error = float((found.double() - expected.double()).masked_fill(wild, 0.0).abs().max()) if found.numel() else 0.0
        text = f"{what}: {name} differs by {error:.1e} where values reach {float(expected.double().abs().max()):.1e}"
        if not found.is_floating_point() or not torch.equal(found[wild], expected[wild]):  # masked scores are -inf in both
            raise Mismatch(text)
        if self.exact is None:
            raise Inexact(text)
        if self._exact is None:
            self._exact = self.exact()
        true = self._exact.get(name)
        if true is None or true.shape != found.shape:
            raise Mismatch(text)
        true = true.detach().double().masked_fill(wild, 0.0)
        own, theirs = (float((t.double().masked_fill(wild, 0.0) - true).norm()) for t in (found, expected))
        if own > ROUNDING * theirs or own > WORST_RTOL * float(true.norm()) + WORST_ATOL * largest:
            raise Inexact(f"{text}; from float64 it is {own:.1e} away, CPU torch {theirs:.1e}")
        self.notes.append(f"{what}: {name}: {own:.1e} from float64's, CPU torch {theirs:.1e}")


def is_close(found: torch.Tensor, expected: torch.Tensor, largest: float) -> bool:
    rtol, atol = TOLERANCES[torch.float64 if expected.dtype == torch.float64 else torch.float32]
    if not torch.allclose(found, expected, rtol=rtol, atol=atol, equal_nan=True):
        return False
    if not expected.is_floating_point() or not expected.isfinite().all():
        return True
    distance = float((found.double() - expected.double()).norm())
    return distance <= NORM_RTOL * float(expected.double().norm()) + NORM_ATOL * largest


class Subject:
    """One architecture in one dtype: the model on the CPU, and a copy on the device."""

    def __init__(self, row: zoo.Architecture, dtype: torch.dtype = torch.float32) -> None:
        self.row, self.dtype = row, dtype
        self.host: Any = build(row).eval()
        if dtype == torch.float64:
            self.host = self.double()
        self.device = copy.deepcopy(self.host).to("jax")
        self.notes: list[str] = []

    def inputs(self) -> zoo.Inputs:
        """The keyword arguments of a call, on the CPU."""
        return in_double(self.row.inputs()) if self.dtype == torch.float64 else self.row.inputs()

    def comparison(self, exact: Callable[[], Named]) -> Comparison:
        """A comparison for this dtype. `exact` computes the tensors by CPU torch in float64."""
        return Comparison(None if self.dtype == torch.float64 else exact)

    def column(self, name: str) -> None:
        """Check one column. Raises an exception if it does not pass."""
        getattr(self, name)()

    def double(self) -> nn.Module:
        """The model in float64 on the CPU, with a loop over experts, because torch's grouped matmul does not support float64."""
        model: Any = copy.deepcopy(self.host).double()
        if self.row.library == "transformers":
            model.set_experts_implementation("eager")
        return model

    def eager(self) -> None:
        with torch.no_grad():
            self._compare_forward(lambda **inputs: self.device(**inputs))

    def compiled(self) -> None:
        import spmd

        @spmd.compile
        def forward(**inputs: Any) -> Any:
            return self.device(**inputs)

        with torch.no_grad():
            self._compare_forward(forward)
            inputs = on_device(self.inputs())
            before = spmd.metrics.counters()["host_reads"]
            forward(**inputs)
            reads = spmd.metrics.counters()["host_reads"] - before
        if reads:
            raise Mismatch(f"the compiled forward read {reads} values back to the host")

    def gradients(self) -> None:
        import spmd

        want = trained(self.row, copy.deepcopy(self.host), self.inputs())
        comparison = self.comparison(lambda: trained(self.row, self.double(), in_double(self.row.inputs())))
        eager = copy.deepcopy(self.device)
        comparison.require("eager step", trained(self.row, eager, on_device(self.inputs())), want)

        model = copy.deepcopy(self.device).train(not self.row.samples)
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)

        @spmd.compile(keep_grads=True)
        def step(**inputs: Any) -> torch.Tensor:
            return train_step(model, optimizer, inputs)

        loss = step(**on_device(self.inputs()))
        comparison.require("compiled step", state(model, loss), want)
        before = spmd.metrics.counters()["host_reads"]
        step(**on_device(self.inputs()))
        reads = spmd.metrics.counters()["host_reads"] - before
        if reads:
            raise Mismatch(f"the compiled step read {reads} values back to the host")
        self.notes += comparison.notes

    def _compare_forward(self, forward: Callable[..., Any]) -> None:
        want = self.host(**self.inputs())
        got = forward(**on_device(self.inputs()))
        if type(got) is not type(want):
            raise Mismatch(f"the result is a {type(got).__name__}, not a {type(want).__name__}")
        comparison = self.comparison(lambda: tensors(self.double()(**in_double(self.row.inputs()))))
        comparison.require("forward", tensors(got), tensors(want))
        self.notes += comparison.notes
        if self.row.then is None:
            return
        comparison = self.comparison(lambda: tensors(continued(self.double(), self.row)))
        comparison.require("with the cache", tensors(continued(forward, self.row, on_device)), tensors(continued(self.host, self.row)))
        self.notes += comparison.notes


def continued(model: Callable[..., Any], row: zoo.Architecture, place: Callable[[Any], Any] = lambda x: x) -> Any:
    """The result for one more token, with the cache of the previous tokens."""
    assert row.then is not None
    first = model(**place({"input_ids": row.inputs()["input_ids"], "use_cache": True}))
    name, cache = next((k, first[k]) for k in ("past_key_values", "cache_params", "state") if k in first)
    return model(**place(row.then()), **{name: cache}, use_cache=True)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Mapping[str, Any]) -> torch.Tensor:
    optimizer.zero_grad()
    loss = loss_of(model(**inputs))
    loss.backward()
    optimizer.step()
    return loss


def trained(row: zoo.Architecture, model: nn.Module, inputs: Mapping[str, Any]) -> Named:
    """The state after one training step."""
    model.train(not row.samples)
    return state(model, train_step(model, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE), inputs))


def state(model: nn.Module, loss: torch.Tensor) -> Named:
    """The loss, and all gradients, parameters and buffers. A tied parameter has one name, so untying adds a name."""
    gradients = {f"gradient of {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients, **dict(model.named_parameters()), **dict(model.named_buffers())}


def on_device(inputs: Any) -> Any:
    return {k: v.to("jax") if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}


def in_double(inputs: Mapping[str, Any]) -> Any:
    return {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in inputs.items()}


def check(row: zoo.Architecture, columns: tuple[str, ...] = COLUMNS) -> dict[str, str]:
    """The result of each column: one of `PASSES`, or the reason of a failure.

    If only floating point values differ from CPU torch in float32, the column is repeated in float64 on both sides. There, an activation
    near the kink of its function, where rounding decides in float32, is on the same side. If it differs in float64 too, the column fails
    with the difference in float32. "float32" is the difference of a column that passes in float64. "notes" describes tensors that were
    compared with float64.
    """
    subject = Subject(row)
    wide: Subject | None = None
    found: dict[str, str] = {}
    for column in columns:
        try:
            subject.column(column)
            found[column] = PASSES[0]
        except Inexact as error:
            try:
                wide = wide or Subject(row, torch.float64)
                wide.column(column)
            except Exception:
                found[column] = reason(error)
            else:
                found[column] = PASSES[1]
                found["float32"] = reason(error)
        except Exception as error:  # any exception is a result
            found[column] = reason(error)
    if subject.notes:
        found["notes"] = f"{len(subject.notes)} tensors: {subject.notes[0]}"
    return found


def reason(error: BaseException) -> str:
    """A failure as one or two lines, with the line of the library's code that it came from."""
    where = traceback.extract_tb(error.__traceback__)
    models = [f for f in where if any(f"/{library}/" in f.filename for library in _MAKERS)] or where
    text = " ".join(str(error).split())[:300]
    if isinstance(error, Mismatch):
        return text
    return f"{type(error).__name__}: {text} ({Path(models[-1].filename).name}:{models[-1].lineno})"


def work() -> None:
    """Run in the worker: reply with one JSON line per model on standard output until standard input ends."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    import transformers

    import spmd  # noqa: F401  registers the device

    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)

    def answer_to(request: dict[str, Any]) -> Any:
        began = time.monotonic()
        found = check(ZOO[request["model"]], tuple(request["columns"]))
        sys.stderr.write(f"{request['model']}: {time.monotonic() - began:.0f} s\n")
        return found

    serve(answer_to)


def start() -> Worker:
    """Start a worker for models."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} {FAST_COMPILATION}".strip()
    return Worker([sys.executable, "-m", "benchmarks.models", "--worker"], {**os.environ, "XLA_FLAGS": flags})


def options() -> argparse.Namespace:
    parser = sweep_parser("models", __doc__, 900.0, RESULTS)
    parser.add_argument("--columns", default=",".join(COLUMNS))
    parser.add_argument("--update", action="store_true", help="merge the results of these models into the existing record")
    return parser.parse_args()


def main() -> None:
    chosen = options()
    if chosen.worker:
        work()
        return
    if chosen.merge:
        results = merged(chosen.merge)
        guard(RESULTS, results, is_whole=True, accepts=chosen.accept)
        write(results, RESULTS)
        return
    names = shard_of([n for n in ZOO if re.search(chosen.models, n)], chosen.shard)
    columns = tuple(chosen.columns.split(","))
    results = run(names, columns, chosen.timeout)
    whole = not chosen.models and chosen.shard == WHOLE and columns == COLUMNS
    out = chosen.json or (RESULTS if whole or chosen.update else None)
    if chosen.json is None:
        guard(RESULTS, results, is_whole=whole, accepts=chosen.accept)
    if out is None:
        return
    if chosen.update:
        results = {**json.loads(out.read_text()), **results}
    write(results, out)


def write(results: dict[str, dict[str, str]], out: Path) -> None:
    """Write the results in the order of the table. The record is also written as docs/models.md."""
    results = {n: results[n] for n in ZOO if n in results}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=1) + "\n")
    if out == RESULTS:
        TABLE.write_text(table(results))


def run(names: list[str], columns: tuple[str, ...], timeout_s: float) -> dict[str, dict[str, str]]:
    """Check the named models, and print each result immediately."""
    results: dict[str, dict[str, str]] = {}
    worker = start()
    for number, name in enumerate(names):
        began = time.monotonic()
        found = worker.ask({"model": name, "columns": columns}, timeout_s)
        is_lost = isinstance(found, str)
        results[name] = dict.fromkeys(columns, found) if is_lost else found
        marks = "  ".join(f"{c} {t if t in PASSES or c not in columns else 'FAIL ' + t}" for c, t in results[name].items())
        print(f"{number + 1}/{len(names)} {name} ({time.monotonic() - began:.0f} s): {marks}", flush=True)
        if is_lost or number % MODELS_PER_WORKER == MODELS_PER_WORKER - 1:
            worker.stop()
            worker = start()
    worker.stop()
    passed = sum(all(r[c] in PASSES for c in columns) for r in results.values())
    print(f"{passed} of {len(results)} pass {', '.join(columns)}")
    return results


def table(results: dict[str, dict[str, str]]) -> str:
    """The text of docs/models.md: counts, the table, and the reasons of failures."""
    from importlib.metadata import version

    rows = {n: (ZOO[n], found) for n, found in results.items()}
    passing = [row.library for row, found in rows.values() if all(found[c] in PASSES for c in COLUMNS)]
    totals = collections.Counter(row.library for row, _ in rows.values())
    parts = [f"{passing.count(library)} of {total} of {library}" for library, total in totals.items()]
    numbers = [imported_timm().__version__ if package == "timm" else version(package) for package in (*totals, "torch", "jax")]
    versions = [f"{package} {number.partition('+')[0]}" for package, number in zip((*totals, "torch", "jax"), numbers, strict=True)]
    lines = [
        PREFACE.format(versions=", ".join(versions), whole=len(passing), total=len(results), parts="; ".join(parts)),
        "| model | class | kind | " + " | ".join(COLUMNS) + " |",
        "| --- | --- | --- |" + " --- |" * len(COLUMNS),
    ]
    for name, (row, found) in rows.items():
        marks = " | ".join(found[c] if found[c] in PASSES else "**fails**" for c in COLUMNS)
        star = r" \*" if "notes" in found else ""
        lines.append(f"| {name}{star} | `{row.model}` | {row.kind} | {marks} |")
    failures = [
        f"- {n}, {' and '.join(columns)}: {row.remark and row.remark + ': '}{plain(found[columns[0]])}"
        for n, (row, found) in rows.items()
        if (columns := [c for c in COLUMNS if found[c] not in PASSES])
    ]
    lines += ["", "## Failures", "", *(failures or ["None."])]
    for key, preface in (("float32", WIDE_PREFACE), ("notes", NOTES_PREFACE)):
        notes = [f"- {n}: {found[key]}" for n, (_, found) in rows.items() if key in found]
        if notes:
            lines += ["", preface, "", *notes]
    return "\n".join(lines) + "\n"


def plain(reason: str) -> str:
    """A reason without the fix in our errors and without lines of this file."""
    return re.sub(r" called at models\.py:\d+ in \w+| fix: .*?(?= \(\w+\.py:\d+\)$)", "", reason)


PREFACE = """# Unmodified models

Generated by `make models` (`benchmarks/models.py`); do not edit.

{versions}: **{whole} of {total} architectures pass all three columns** ({parts}). Every model has
a small configuration and random weights, and runs unmodified from its package with dropout off. It is compared with CPU torch in float32
with torch.testing's tolerances (rtol 1.3e-6, atol 1e-5). In addition, no tensor may differ by more than 1e-3 of its own norm, so that the
absolute tolerance does not hide a small wrong gradient.

- **eager**: the forward pass on device `jax`, compared by every tensor of the `ModelOutput`, including caches. Decoders then get one more
  token with the cache.
- **compiled**: the same under `spmd.compile`, with the cache passed from one call to the next. No value is read back to the host.
- **gradients**: one SGD step, eager and as one compiled program, compared by the loss, all gradients, and all parameters and buffers after
  the step. Tied weights must still be tied. The compiled step reads no value back to the host.
"""
WIDE_PREFACE = """## Results compared in float64

Batch norms over few values amplify rounding in float32. It can move an activation across the kink of its function, which changes a
gradient. `pass in float64` means that device `jax` and CPU torch both ran in float64 and agree with torch.testing's tolerances for float64
(1e-7). In float32 they differ by:"""
NOTES_PREFACE = """## Results compared with the error of float32

In models marked \\* some values exceed the tolerances because of rounding in float32 sums. They are compared with CPU torch in float64:
the error of device `jax` must be at most 3 times the error of CPU torch in float32, and at most 1e-2 of the value's norm. The first such
value of each model:"""


if __name__ == "__main__":
    main()
