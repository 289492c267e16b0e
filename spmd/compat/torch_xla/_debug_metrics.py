"""`torch_xla.debug.metrics`: this package's counters under torch_xla's names, and compile times."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any

import jax

from spmd.base import _counters
from spmd.device import _adapter, _whole
from spmd.program._job_checks import is_compiling

# torch_xla's metric -> (our counter of samples, our counter of the accumulated amount)
_AMOUNTS = {
    "OutboundData": ("uploads", "upload_bytes"),
    "InboundData": ("host_reads", "download_bytes"),
    "InputOutputAliasCount": ("step_programs_made", "aliased_buffers"),  # inputs whose memory results reuse
}
_ALSO = {"TransferToDeviceTime": "OutboundData", "TransferFromDeviceTime": "InboundData"}
# torch_xla's counter -> ours. Every program runs on all devices of its values, which torch_xla calls "replicated" execution.
_COUNTERS = {
    "VirtualDeviceUsage": ("uploads",),
    "ExecuteReplicated": ("operations", "programs"),
    "UncachedCompile": ("step_programs_made",),
    "CachedCompile": ("step_programs_found",),
}
# torch_xla's metric of executions -> our counters. Nothing waits for executions, so there is a count and no time.
_EXECUTIONS = {"EagerOpExecuteTime": ("operations",), "ExecuteTime": ("programs",), "ExecuteReplicatedTime": ("operations", "programs")}
_compilations: list[tuple[float, float]] = []  # (time, seconds) of each
_of_operations: list[tuple[float, float]] = []  # compilations for eager operations
_in_program: list[bool] = []
_total = [0]


_COMPILED = {"CompileTime": _compilations, "EagerOpCompileTime": _of_operations}


def listen() -> None:
    """Record every compilation from now on. Called once."""

    def on_event(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            _compilations.append((time.time(), duration_secs))
            _total[0] += 1
            if not (_in_program or is_compiling()):
                _of_operations.append(_compilations[-1])

    jax.monitoring.register_event_duration_secs_listener(on_event)


def enter(stack: ExitStack) -> None:
    """Count eager operations until `stack` closes."""
    modules: tuple[Any, ...] = (_adapter, _whole)
    for module in modules:
        original = module.note_operation
        module.note_operation = _counted(original)
        stack.callback(setattr, module, "note_operation", original)


def _counted(note: Callable[[Any], None]) -> Callable[[Any], None]:
    def note_operation(out: Any) -> None:
        _counters.count("operations")
        note(out)

    return note_operation


@contextmanager
def program() -> Generator[None]:
    """While active a compiled function is called, so compilations are not counted as those of eager operations."""
    _in_program.append(True)
    try:
        yield
    finally:
        _in_program.pop()
    _counters.count("programs")


def num_compilations() -> int:
    """Number of programs compiled since the modules were installed."""
    return _total[0]


def counter_names() -> list[str]:
    """Names of all counters that are not zero."""
    counts = _counters.snapshot()
    return sorted([*counts, *(theirs for theirs, ours in _COUNTERS.items() if any(name in counts for name in ours))])


def counter_value(name: str) -> int | None:
    """A counter's value, or None if nothing was counted."""
    counts = _counters.snapshot()
    found = [counts[ours] for ours in _COUNTERS.get(name, (name,)) if ours in counts]
    return sum(found) if found else None


def metric_names() -> list[str]:
    """Names of all metrics with samples."""
    return [name for name in (*_COMPILED, *_AMOUNTS, *_ALSO, *_EXECUTIONS) if metric_data(name) is not None]


def metric_data(name: str) -> tuple[int, float, list[tuple[float, float]]] | None:
    """(number of samples, their sum, retained samples as (time, value)), or None without samples. Times in nanoseconds, data in bytes."""
    if name in _COMPILED:
        times = _COMPILED[name]
        return (len(times), sum(s for _, s in times) * 1e9, [(t, s * 1e9) for t, s in times]) if times else None
    if name in _EXECUTIONS:
        counts = _counters.snapshot()
        total = sum(counts.get(ours, 0) for ours in _EXECUTIONS[name])
        return (total, 0.0, []) if total else None
    samples, amount = _AMOUNTS.get(_ALSO.get(name, name), ("", ""))
    counts = _counters.snapshot()
    return (counts[samples], counts.get(amount, 0), []) if samples in counts else None


def clear_counters() -> None:
    """Set every counter to zero. Data metrics are counters too."""
    _counters.reset()


def clear_metrics() -> None:
    """Delete the compile times and set every counter to zero."""
    _compilations.clear()
    _of_operations.clear()
    _counters.reset()


def clear_all() -> None:
    clear_metrics()


def metrics_report() -> str:
    """All metrics and counters as text."""
    lines: list[str] = []
    for name in metric_names():
        data = metric_data(name)
        assert data is not None
        lines += [f"Metric: {name}", f"  TotalSamples: {data[0]}", f"  Accumulator: {_shown(name, data[1])}"]
    for name in counter_names():
        lines += [f"Counter: {name}", f"  Value: {counter_value(name)}"]
    return "\n".join(lines) + "\n"


def short_metrics_report(counter_names: list[str] | None = None, metric_names: list[str] | None = None) -> str:
    """The metrics and counters with these names, as text."""
    lines: list[str] = []
    for name in metric_names or ["CompileTime", "TransferToDeviceTime", "TransferFromDeviceTime"]:
        data = metric_data(name)
        if data is not None:
            lines += [f"Metric: {name}", f"  TotalSamples: {data[0]}", f"  Accumulator: {_shown(name, data[1])}"]
    for name in counter_names or ["MarkStep"]:
        if counter_value(name) is not None:
            lines += [f"Counter: {name}", f"  Value: {counter_value(name)}"]
    return "\n".join(lines) + "\n"


def _shown(name: str, amount: float) -> str:
    return f"{amount / 1e6:.3f}ms" if name in _COMPILED else f"{amount:.0f}B"
