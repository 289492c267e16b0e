"""The functions of `torch_xla` itself."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from spmd.base._errors import SpmdError, TraceError, message
from spmd.compat.torch_xla import _debug_metrics
from spmd.compat.torch_xla import _xla_model as xm
from spmd.compat.torch_xla._device_names import XLA
from spmd.compat.torch_xla._replicas import spawn
from spmd.compat.torch_xla._step_ends import mark_step as sync
from spmd.program._step import Step
from spmd.program._step import compile as compile_step

__version__ = "2.9.0+spmd"


def device(index: int | None = None) -> torch.device:
    """The one PyTorch device, "xla:0"."""
    if index not in (None, 0):
        raise IndexError(message(f"there is no device xla:{index}", "xla:0 stands for all devices", fix="torch_xla.device()"))
    return XLA


def devices() -> list[torch.device]:
    return [XLA]


def real_devices() -> list[str]:
    return xm.xla_real_devices()


def device_count() -> int:
    """Number of devices of this process."""
    return len(real_devices())


def manual_seed(seed: int, device: Any = None) -> None:
    xm.set_rng_state(seed, device)


class _Region:
    """Returned by `compile()` without a function: a decorator, and a context manager that only ends the step."""

    def __init__(self, name: str | None = None, limit: int | None = None) -> None:
        self._name, self._limit = name, limit

    def __call__(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        return _compiled(fn, self._name, self._limit)

    def __enter__(self) -> None:
        return None

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            sync()


def compile(
    f: Callable[..., Any] | None = None, full_graph: bool | None = False, name: str | None = None, max_different_graphs: int | None = None
) -> Any:
    """`spmd.compile`: one program with its backward pass and optimizer. Gradients stay readable; results have no autograd graph.

    Without a function: a decorator, or a context manager in which operations run as outside it.

    Args:
        f: the function or module.
        full_graph: accepted for compatibility; it is always so.
        name: name of the function in errors.
        max_different_graphs: raise if more programs than this were needed.
    """
    return _Region(name, max_different_graphs) if f is None else _compiled(f, name, max_different_graphs)


def _compiled(f: Callable[..., Any], name: str | None, limit: int | None = None) -> Callable[..., Any]:
    step: Step[..., Any] = compile_step(f, keep_grads=True, max_retraces=1_000_000)  # pyright: ignore[reportAssignmentType]

    @functools.wraps(f, updated=())
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            with _debug_metrics.program():
                result = step(*args, **kwargs)
        except TraceError as error:
            what = "Unexpected execution happens inside the compiled function, exiting"
            raise TraceError(f"{what}\n{error}") from error
        if limit is not None and step.num_executables > limit:
            raise SpmdError(
                message(
                    f"{name or getattr(f, '__name__', 'the function')} needed {step.num_executables} programs, but {limit} are allowed",
                    *step.retraces[-1:],
                    fix="keep shapes and Python values constant",
                )
            )
        sync()
        return result

    run.spmd_step = step  # pyright: ignore[reportAttributeAccessIssue]
    return run


def step() -> _Region:
    """A context manager that ends the step on exit."""
    return _Region()


def launch(fn: Callable[..., Any], args: tuple[Any, ...] = (), start_method: str = "spawn", debug_single_process: bool = False) -> None:
    """`fn(0, *args)`, once: see `xla_multiprocessing.spawn`."""
    spawn(fn, args)
