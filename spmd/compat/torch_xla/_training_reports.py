"""`torch_xla.test.test_utils`: the lines that torch_xla's training scripts print."""

from __future__ import annotations

import sys
from datetime import datetime
from typing import Any


def now(format: str = "%H:%M:%S") -> str:
    """The time of day as text."""
    return datetime.now().strftime(format)


def print_training_update(
    device: Any, step: int, loss: Any, rate: float, global_rate: float, epoch: int | None = None, summary_writer: Any = None
) -> None:
    """Print device, step, loss and samples per second in one line. The rates also go to `summary_writer`, if given."""
    of_epoch = f" Epoch={epoch}" if epoch is not None else ""
    rates = f"Rate={rate:.2f} GlobalRate={global_rate:.2f}"
    _print(f"| Training Device={device}/0{of_epoch} Step={step} Loss={float(loss):.5f} {rates} Time={now()}")
    write_to_summary(summary_writer, dict_to_write={"examples/sec": rate, "average_examples/sec": global_rate})


def print_test_update(device: Any, accuracy: float | None, epoch: int | None = None, step: int | None = None) -> None:
    """Print device, step and accuracy in one line."""
    parts = [f"Step={step}"] * (step is not None) + [f"Epoch={epoch}"] * (epoch is not None)
    parts += [f"Accuracy={accuracy:.2f}"] if accuracy is not None else []
    _print(" ".join(["| Test", f"Device={device}/0", *parts, f"Time={now()}"]))


def get_summary_writer(logdir: str | None) -> Any:
    """A TensorBoard writer for a folder, or None without one. Needs the package tensorboard."""
    if not logdir:
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(log_dir=logdir)


def write_to_summary(
    summary_writer: Any, global_step: int | None = None, dict_to_write: dict[str, float] | None = None, write_xla_metrics: bool = False
) -> None:
    """Write scalars by name to a TensorBoard writer, with `write_xla_metrics` the counters too. Does nothing without a writer."""
    if summary_writer is None:
        return
    from spmd.compat.torch_xla import _debug_metrics

    counted = {name: _debug_metrics.counter_value(name) or 0 for name in _debug_metrics.counter_names()} if write_xla_metrics else {}
    for name, value in {**(dict_to_write or {}), **counted}.items():
        summary_writer.add_scalar(name, value, global_step)


def close_summary_writer(summary_writer: Any) -> None:
    """Flush and close the writer, if there is one."""
    if summary_writer is not None:
        summary_writer.flush()
        summary_writer.close()


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
