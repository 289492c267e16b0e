"""Runs compiled functions in several processes with one cache folder: the first traces them, others use the stored traces.

    python tests/program/stored_harness.py FOLDER first|same|changed [CASE ...]

Each case is a function of a device, a way to compile, and whether something that the trace reads is other than in the first process. It
returns values, which must be those of CPU torch in every process. The script prints, for each case, the difference from CPU torch (None if
there is none), and the number of traces.
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

Values = list[Any]
Case = Callable[[str, Callable[..., Any], bool], Values]
CASES: dict[str, Case] = {}
MODULES = (
    *("stored_cases", "stored_class_cases", "stored_hook_cases", "stored_number_cases", "stored_python_cases", "stored_torch_cases"),
    *("stored_jax_cases", "stored_process_cases"),
)


def case(run: Case) -> Case:
    assert run.__name__ not in CASES, run.__name__
    CASES[run.__name__] = run
    return run


def inputs(device: str) -> torch.Tensor:
    return torch.arange(12, dtype=torch.float32).reshape(3, 4).to(device) / 7 - 0.6


def calls(step: Any, device: str, count: int = 2) -> Values:
    """Results of a function of one tensor, called several times."""
    x = inputs(device)
    return [step(x) for _ in range(count)]


def train(model: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
    """One step of training."""
    optimizer.zero_grad()
    loss = (model(x) ** 2).mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def trained(model: nn.Module, optimizer: Any, wrap: Any, device: str, count: int = 3) -> Values:
    """Losses, parameters and optimizer state after some steps of training."""
    losses = calls(wrap(lambda x: train(model, optimizer, x)), device, count)
    return [*losses, *(p.detach() for p in model.parameters()), *(v for s in optimizer.state.values() for v in s.values())]


def differences(found: Any, expected: Any) -> Iterator[str]:
    """What differs from CPU torch, at torch's own tolerances; dtypes and shapes too."""
    for i, (one, other) in enumerate(zip(found, expected, strict=True)):
        if isinstance(other, torch.Tensor):
            try:
                torch.testing.assert_close(one.detach().cpu(), other.detach(), equal_nan=True)
            except AssertionError as error:
                yield f"value {i}: {error}"
        elif one != other or type(one) is not type(other):
            yield f"value {i} is {one!r}, on the CPU {other!r}"


def load() -> dict[str, Case]:
    """All cases."""
    for name in MODULES:
        importlib.import_module(f"tests.program.{name}")
    return CASES


def main(folder: str, variant: str, *names: str) -> None:
    import spmd
    from spmd.base import _program_files

    load()
    _program_files.WORTH_KEEPING_S = 0.0  # executables that compile fast too
    spmd.configure(cache_dir=folder)
    found: dict[str, tuple[str | None, int]] = {}
    for name in names or CASES:
        run, steps = CASES[name], []

        def wrap(fn: Any, steps: Any = steps, name: str = name, **options: Any) -> Any:
            if isinstance(fn, types.FunctionType):
                fn.__name__ = name  # traces of different cases are not those of one function
            steps.append(spmd.compile(fn, **options))
            return steps[-1]

        try:
            expected = run("cpu", lambda fn, **_: fn, variant == "changed")
            difference = next(differences(run("jax", wrap, variant == "changed"), expected), None)
        except Exception as error:
            difference = f"{type(error).__name__}: {error}"
        found[name] = difference, sum(step.num_traces for step in steps)
    print(json.dumps(found))


if __name__ == "__main__":
    from tests.program import stored_harness

    stored_harness.main(*sys.argv[1:])
