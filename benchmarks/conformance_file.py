"""Runs one file of torch_xla as `__main__` and records the outcome of each of its tests as a JSON line.

python -m spmd.compat.torch_xla benchmarks/conformance_file.py OUT FILE ARGUMENTS      # see benchmarks/conformance.py
"""

from __future__ import annotations

import json
import os.path
import runpy
import sys
import traceback
import types
import unittest
from collections.abc import Callable
from typing import Any

# Replaces torchax, which torch_xla's tests import only to set the matmul precision; torchax occupies the same device slot as `spmd`.
_torchax: Any = types.ModuleType("torchax")


def _enable_accuracy_mode() -> None:
    import jax

    jax.config.update("jax_default_matmul_precision", "highest")


_torchax.enable_accuracy_mode = _enable_accuracy_mode


def declare_torchvision_operators() -> None:
    """Declare torchvision's operators, so that its models import without its compiled extension, which is for another build of torch."""
    import torch

    declared = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        declared.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(declared)


_kept: list[Any] = []


class Record:
    """Writes outcomes immediately, so that a crash loses only the outcome of the running test."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._failed: dict[str, str] = {}

    def write(self, test: str, outcome: str) -> None:
        with open(self._path, "a", encoding="utf-8") as out:
            out.write(json.dumps({"test": test, "outcome": outcome}) + "\n")

    def started(self, test: Any) -> None:
        self.write(name_of(test), "no result: the process ended")

    def failed(self, test: Any, error: Any) -> None:
        self._failed[name_of(test)] = f"fail: {summary_of(error)}"
        self.write(name_of(test), self._failed[name_of(test)])

    def skipped(self, test: Any, reason: str) -> None:
        self.write(name_of(test), f"skip: {reason}")

    def passed(self, test: Any) -> None:
        self.write(name_of(test), self._failed.get(name_of(test), "pass"))


def name_of(test: Any) -> str:
    """ "Class.method", or the name of a class whose set-up failed."""
    if hasattr(test, "_testMethodName"):
        return f"{type(test).__name__}.{test._testMethodName}"
    return f"{test.id()} (set-up)"


def summary_of(error: Any) -> str:
    """The type, the first line of the message and the place of an error, without details that differ between runs."""
    kind, value, tb = error
    text = str(value).strip().splitlines() or [""]
    where = traceback.extract_tb(tb)[-1]
    return f"{kind.__name__}: {text[0][:160]} ({os.path.basename(where.filename)}:{where.lineno})"


def listen(record: Record) -> None:
    """Add hooks to unittest.TestResult that record every outcome."""

    def hook(name: str, callback: Callable[..., None]) -> None:
        original = getattr(unittest.TestResult, name)

        def hooked(self: Any, test: Any, *details: Any) -> None:
            callback(test, *details)
            original(self, test, *details)

        setattr(unittest.TestResult, name, hooked)

    hook("startTest", record.started)
    hook("addSuccess", record.passed)
    hook("addError", record.failed)
    hook("addFailure", record.failed)
    hook("addSkip", record.skipped)
    hook("addExpectedFailure", lambda test, error: record.passed(test))
    hook("addUnexpectedSuccess", lambda test: record.write(name_of(test), "fail: unexpected success"))
    original_sub = unittest.TestResult.addSubTest

    def sub(self: Any, test: Any, subtest: Any, error: Any) -> None:
        if error is not None:
            record.failed(test, error)
        original_sub(self, test, subtest, error)

    unittest.TestResult.addSubTest = sub


def cut_sizes(examples: str) -> None:
    """Reduce models, batches and numbers of steps of the examples where they have no option for it."""
    import torch_xla.utils.utils as xu

    sys.path.append(examples)
    import decoder_only_model

    decoder_only_model.DecoderOnlyConfig.__init__.__defaults__ = (64, 2, 4, 2, 128, 256, False, False)
    xu.SampleGenerator = _small(xu.SampleGenerator)


def _small(generator: Any) -> Any:
    def make(data: Any, sample_count: int) -> Any:
        import torch_xla.runtime as xr

        rows = 2 * xr.global_runtime_device_count()
        parts = {1: (), 2: (slice(128),), 4: (..., slice(64), slice(64))}
        return generator(tuple(t[(slice(rows), *parts[t.dim()])] for t in data), min(sample_count, 3))

    return make


def main(out: str, file: str, arguments: list[str]) -> None:
    record = Record(out)
    folder, found, _ = file.rpartition("/examples/")
    if found:
        declare_torchvision_operators()
        cut_sizes(f"{folder}/examples")
    listen(record)
    sys.modules["torchax"] = _torchax
    sys.argv[:] = [file, *arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(file))
    try:
        runpy.run_path(file, run_name="__main__")
    except SystemExit as end:
        record.write("", "pass" if end.code in (None, 0, False) else f"fail: exit code {end.code}")
    except BaseException as error:
        traceback.print_exc()
        record.write("", f"fail: {summary_of((type(error), error, error.__traceback__))}")
    else:
        record.write("", "pass")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
