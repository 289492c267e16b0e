"""Runs one file of torch_xla's as `__main__` and writes down what became of each of its tests, a JSON line each.

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

# What torch_xla's tests import and only switch something on with; the package claims the same slot of PyTorch as we do.
_torchax: Any = types.ModuleType("torchax")


def _enable_accuracy_mode() -> None:
    import jax

    jax.config.update("jax_default_matmul_precision", "highest")


_torchax.enable_accuracy_mode = _enable_accuracy_mode


def without_its_kernels() -> None:
    """torchvision's models import without its compiled operators, which are for another build of torch and which they do not use."""
    import torch

    declared = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        declared.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(declared)


_kept: list[Any] = []


class Record:
    """Outcomes of tests, written as they come: a crash costs the test that crashed."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._failed: dict[str, str] = {}

    def write(self, test: str, outcome: str) -> None:
        with open(self._path, "a", encoding="utf-8") as out:
            out.write(json.dumps({"test": test, "outcome": outcome}) + "\n")

    def started(self, test: Any) -> None:
        self.write(name_of(test), "no result: the process ended")

    def failed(self, test: Any, error: Any) -> None:
        self._failed[name_of(test)] = f"fail: {said_by(error)}"
        self.write(name_of(test), self._failed[name_of(test)])

    def skipped(self, test: Any, reason: str) -> None:
        self.write(name_of(test), f"skip: {reason}")

    def passed(self, test: Any) -> None:
        self.write(name_of(test), self._failed.get(name_of(test), "pass"))


def name_of(test: Any) -> str:
    """ "Class.method"; of a class that could not be set up its own name."""
    if hasattr(test, "_testMethodName"):
        return f"{type(test).__name__}.{test._testMethodName}"
    return f"{test.id()} (set-up)"


def said_by(error: Any) -> str:
    """The error's last line, without what differs from run to run."""
    kind, value, tb = error
    text = str(value).strip().splitlines() or [""]
    where = traceback.extract_tb(tb)[-1]
    return f"{kind.__name__}: {text[0][:160]} ({os.path.basename(where.filename)}:{where.lineno})"


def listen(record: Record) -> None:
    """Hear what every unittest result hears."""

    def also(name: str, hear: Callable[..., None]) -> None:
        original = getattr(unittest.TestResult, name)

        def heard(self: Any, test: Any, *details: Any) -> None:
            hear(test, *details)
            original(self, test, *details)

        setattr(unittest.TestResult, name, heard)

    also("startTest", record.started)
    also("addSuccess", record.passed)
    also("addError", record.failed)
    also("addFailure", record.failed)
    also("addSkip", record.skipped)
    also("addExpectedFailure", lambda test, error: record.passed(test))
    also("addUnexpectedSuccess", lambda test: record.write(name_of(test), "fail: passed and was not to"))
    original_sub = unittest.TestResult.addSubTest

    def sub(self: Any, test: Any, subtest: Any, error: Any) -> None:
        if error is not None:
            record.failed(test, error)
        original_sub(self, test, subtest, error)

    unittest.TestResult.addSubTest = sub


def cut_sizes(examples: str) -> None:
    """The examples' models, batches and numbers of steps as small as a laptop's, where they have no flag for them."""
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
        without_its_kernels()
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
        record.write("", f"fail: {said_by((type(error), error, error.__traceback__))}")
    else:
        record.write("", "pass")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
