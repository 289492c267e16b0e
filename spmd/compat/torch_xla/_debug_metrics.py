"""`torch_xla.debug.metrics`: this package's counters under torch_xla's names, and the times of compilations."""

from __future__ import annotations

import time

import jax

from spmd.base import _counters

# torch_xla's metric -> (our counter of samples, our counter of the accumulated amount)
_AMOUNTS = {"OutboundData": ("uploads", "upload_bytes"), "InboundData": ("host_reads", "download_bytes")}
_ALSO = {"TransferToDeviceTime": "OutboundData", "TransferFromDeviceTime": "InboundData"}
_compilations: list[tuple[float, float]] = []  # (time, seconds) of each
_total = [0]


def listen() -> None:
    """Note every compilation from now on; called once."""

    def on_event(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            _compilations.append((time.time(), duration_secs))
            _total[0] += 1

    jax.monitoring.register_event_duration_secs_listener(on_event)


def num_compilations() -> int:
    """Programs compiled since the modules were installed."""
    return _total[0]


def counter_names() -> list[str]:
    """Counters that are not zero."""
    return sorted(_counters.snapshot())


def counter_value(name: str) -> int | None:
    """A counter's value, or None if nothing was counted."""
    return _counters.snapshot().get(name)


def metric_names() -> list[str]:
    """Metrics with samples."""
    return [name for name in ("CompileTime", *_AMOUNTS, *_ALSO) if metric_data(name) is not None]


def metric_data(name: str) -> tuple[int, float, list[tuple[float, float]]] | None:
    """(number of samples, their sum, (time, value) of those kept), or None without samples; times in nanoseconds, data in bytes."""
    if name == "CompileTime":
        return (
            (len(_compilations), sum(s for _, s in _compilations) * 1e9, [(t, s * 1e9) for t, s in _compilations])
            if _compilations
            else None
        )
    samples, amount = _AMOUNTS.get(_ALSO.get(name, name), ("", ""))
    counts = _counters.snapshot()
    return (counts[samples], counts.get(amount, 0), []) if samples in counts else None


def clear_counters() -> None:
    """Set every counter to zero; the data metrics are counters here."""
    _counters.reset()


def clear_metrics() -> None:
    """Forget the times of compilations, and set every counter to zero."""
    _compilations.clear()
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
    """The metrics and counters of these names, as text."""
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
    return f"{amount / 1e6:.3f}ms" if name == "CompileTime" else f"{amount:.0f}B"
