"""Refuses what only a trace would do on the host: draw random numbers, and write to CPU tensors.

A number from `random`, numpy's global generator or torch's CPU generator would be a constant, the same in every call.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from spmd.base._errors import TraceAgain, TraceError, message
from spmd.base._progress import PROGRESS
from spmd.device._host_copies import is_host_copy
from spmd.program.reads import LateWritesNeeded
from spmd.program.trace._trace_settings import Drawn, TraceSettings


class NumbersDrawn(TraceAgain):
    """Random numbers of the host were drawn during a trace, by the function or by another thread. The next trace shows which."""

    def __init__(self, drawn: Drawn) -> None:
        super().__init__()
        self._drawn = drawn

    def other_settings(self, settings: TraceSettings) -> TraceSettings:
        return replace(settings, drawn=self._drawn)


@contextmanager
def no_host_random(settings: TraceSettings | None = None) -> Generator[None]:
    """Context that raises TraceError at its end if random numbers were drawn on the host. The generators are restored.

    While other threads run, such as one that loads data, the numbers may be theirs. So the generators are left as they are, and the trace
    is repeated: a thread that waits for the step to take its data draws no more.

    Args:
        settings: the settings of a trace that can be repeated.

    Raises:
        NumbersDrawn: numbers were drawn, perhaps by another thread.
    """
    states, others = _random_states(), _other_threads()
    failed = True
    try:
        yield
        failed = False
    finally:
        drawn = [name for name, before, after in zip(_GENERATORS, states, _random_states(), strict=True) if not _is_same(before, after)]
        others |= _other_threads()
        earlier = Drawn(0, states) if settings is None or settings.drawn is None else settings.drawn
        is_unclear = bool(drawn and others) and settings is not None and earlier.num_traces < _MAX_DRAWN
        if drawn and not is_unclear:
            random.setstate(earlier.states[0])
            np.random.set_state(earlier.states[1])
            torch.set_rng_state(earlier.states[2])
        if is_unclear and not failed:
            raise NumbersDrawn(Drawn(earlier.num_traces + 1, earlier.states))
        if drawn and not failed:
            may_be_loader = drawn == [_OF_TORCH]
            fix = "draw on the device, torch.rand(..., device='jax'), or draw before the call and pass them as an argument"
            raise TraceError(
                message(
                    f"the compiled function draws random numbers on the host, from {drawn[0]}",
                    "every call would use the same numbers",
                    *(["`for batch in loader` of a DataLoader draws too: a seed for each iteration"] if may_be_loader else []),
                    *([f"or another thread does, one of: {', '.join(sorted(others))}"] if others else []),
                    fix=f"{fix}; loop over batches = list(loader) that were made before it" if may_be_loader else fix,
                )
            )


@contextmanager
def no_host_writes(tensors: Sequence[tuple[str, torch.Tensor]], settings: TraceSettings) -> Generator[None]:
    """Context that raises TraceError at its end if one of these (name, CPU tensor) was updated in place.

    Small tensors, such as counters and flags, are restored.

    Raises:
        LateWritesNeeded: the trace can be repeated with such writes at the end of the call.
    """
    before = [(name, t, *_version_and_copy(t)) for name, t in tensors]
    gradients = [(name, t, t.grad) for name, t in tensors]
    failed = True
    try:
        yield
        failed = False
    finally:
        written = [(name, t, copy) for name, t, version, copy in before if _is_written(t, version, copy)]
        for _, t, copy in written:
            if copy is not None:
                with torch.inference_mode(t.is_inference()), torch.no_grad():  # in this order: inference_mode(False) turns gradients on
                    t.copy_(copy)
        given = [(name, t, grad) for name, t, grad in gradients if is_host_copy(t.grad)]
        for _, t, grad in given:
            t.grad = grad
        if given and not failed:
            what = f"a copy to the host of a traced tensor was made the gradient of {given[0][0]}, which is on the CPU"
            raise TraceError(message(what, "only the trace would do so", fix="move it to the device: .to('jax'), or set it after the call"))
        if written and not failed and not settings.has_late_writes and all(copy is not None for *_, copy in written):
            raise LateWritesNeeded
        if written and not failed:
            name, tensor, _ = written[0]
            raise TraceError(
                message(
                    f"the compiled function updates {name} in place, which is on the CPU (shape {tuple(tensor.shape)})",
                    "only the trace would update it, not every call",
                    fix="move it to the device: .to('jax'), or update it outside of the function",
                )
            )


def _version_and_copy(tensor: torch.Tensor) -> tuple[int | None, torch.Tensor | None]:
    """The version of a tensor, and a copy if it is small. An inference tensor has no version, and is always copied."""
    version = None if tensor.is_inference() else tensor._version
    return version, tensor.detach().clone() if version is None or tensor.numel() <= _SMALL else None


def _is_written(tensor: torch.Tensor, version: int | None, copy: torch.Tensor | None) -> bool:
    if version is None:
        return copy is not None and not bool(torch.equal(tensor, copy))
    return tensor._version != version


_SMALL = 64
_MAX_DRAWN = 3  # traces during which numbers are drawn before a function counts as the one that draws them
_DRAW_NONE = (PROGRESS, "tqdm_monitor")  # threads that draw no random numbers
_OF_TORCH = "torch's CPU generator"
_GENERATORS = ("Python's random", "numpy.random", _OF_TORCH)


def _other_threads() -> set[str]:
    """The names of the threads that may draw random numbers now, but for this one."""
    return {thread.name for thread in threading.enumerate() if thread is not threading.current_thread() and thread.name not in _DRAW_NONE}


def _random_states() -> tuple[Any, Any, torch.Tensor]:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _is_same(before: Any, after: Any) -> bool:
    if isinstance(before, torch.Tensor):
        return torch.equal(before, after)
    return all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
