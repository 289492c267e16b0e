"""Runs a training step under torch.compile(backend="spmd") as one donated program of spmd.compile's engine.

Note [Whole steps]
Dynamo does not make a single graph of a typical step (torch 2.13): it skips `zero_grad`, `optimizer.step` begins with a graph break of
torch's own, and `backward` is a break too. `config.trace_autograd_ops` removes the last one, but for all backends of the process, and not
where the loss is returned. Compiled autograd makes a graph of the backward pass only. Calls of ours in Dynamo's graph (`allow_in_graph`)
would have to hide the optimizer and its numbers from the guards. So the step would be three or more graphs with an eager engine in
between, every gradient and parameter would pass from one to the next, and the learning rate would be a constant that recompiles. The engine
of `spmd.compile` makes one program of the same function, with its own guards. So a function that computes gradients or steps an optimizer
goes there. If the engine refuses it (a value is needed in the middle), Dynamo's graphs run instead, except under `fullgraph=True`, which
requires a single graph.
"""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from spmd.base._errors import SpmdError, TraceError, message
from spmd.base._torch_late import compile_arguments, stance
from spmd.patches._table import current, replace
from spmd.program._step import Step
from spmd.program._step import compile as compile_step
from spmd.program.reads import is_library

logger = logging.getLogger("spmd.dynamo")
_CONTEXT = "torch._dynamo.eval_frame.OptimizeContext.__call__"
_OPTIONS = ("keep_grads", "max_retraces", "on_retrace", "max_programs", "check", "debug_nans", "check_indices", "roll")
_DEPTH = 4


def register(backend: Callable[..., Any]) -> None:
    """Make torch.compile with this backend run a training step as one program, from now on."""
    torchs = current(_CONTEXT)

    def __call__(self: Any, fn: Any) -> Any:
        compiled = torchs(self, fn)
        asked = compile_arguments(self)
        if asked.backend is not backend or not is_whole_step(fn):
            return compiled
        options = checked_options(asked.options) | ({"dynamic": True} if asked.dynamic else {})
        return whole_step(fn, compiled, options, fullgraph=asked.fullgraph)

    replace(_CONTEXT, __call__)


def whole_step(fn: Callable[..., Any], compiled: Callable[..., Any], options: dict[str, Any], *, fullgraph: bool) -> Callable[..., Any]:
    """`fn` as one program. From the first call that cannot be a program, Dynamo's version of it (`compiled`) runs.

    Attributes of the result:
        spmd_step: the `Step`, with its programs, retraces and collectives.
    """
    chosen: dict[str, Any] = {"keep_grads": not _steps(fn)} | options
    step = compile_step(fn, **chosen)
    refused: list[TraceError] = []

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        if refused or stance() != "default":
            return compiled(*args, **kwargs)
        try:
            return step(*args, **kwargs)
        except TraceError as error:
            if fullgraph:
                raise
            logger.warning("%s cannot run as one program, so Dynamo's graphs run instead: %s", step, error)
            refused.append(error)
        return compiled(*args, **kwargs)

    vars(run)["spmd_step"] = step
    return run


def step_of(fn: Any) -> Step[..., Any]:
    """The `Step` of a training step compiled by torch.compile(backend="spmd"): its collectives, memory and retraces.

    Raises:
        SpmdError: `fn` is not such a function.
    """
    found = getattr(fn, "spmd_step", None)
    if found is None:
        what = f"{getattr(fn, '__name__', fn)!r} is not a training step that torch.compile(backend='spmd') runs as one program"
        raise SpmdError(message(what, fix="spmd.dynamo.graphs() lists the graphs of other functions"))
    return found


def checked_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a step; SpmdError if there are unknown ones."""
    unknown = sorted(options.keys() - set(_OPTIONS))
    if unknown:
        raise SpmdError(
            message(
                f"backend='spmd' has no option {unknown[0]!r}",
                f"options of a training step: {', '.join(_OPTIONS)}; graphs have none",
                fix='torch.compile(train_step, backend="spmd", options={"keep_grads": True})',
            )
        )
    return options


def is_whole_step(fn: Any) -> bool:
    """Whether a function computes gradients or steps an optimizer, judged by names in its code and in functions that it names."""
    if isinstance(getattr(fn, "__self__", None), torch.optim.Optimizer):
        return True
    if not isinstance(fn, (types.FunctionType, types.MethodType)) or isinstance(getattr(fn, "__self__", None), torch.nn.Module):
        return False
    return any("backward" in names or {"autograd", "grad"} <= names for names in _names(fn)) or (_steps(fn) and _has_optimizer(fn))


def _steps(fn: Any) -> bool:
    return isinstance(getattr(fn, "__self__", None), torch.optim.Optimizer) or any("step" in names for names in _names(fn))


def _has_optimizer(fn: Any) -> bool:
    return any(isinstance(value, torch.optim.Optimizer) for found in _functions(fn) for value in _named(found))


def _names(fn: Any) -> Iterator[set[str]]:
    return (set(_code_names(found.__code__)) for found in _functions(fn))


def _code_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _code_names(constant)


def _functions(fn: Any) -> list[types.FunctionType]:
    """The function and the user functions that its code names as globals, closure variables or methods; not those of modules."""
    found: dict[int, types.FunctionType] = {}

    def visit(value: Any, depth: int) -> None:
        value = getattr(value, "__func__", value)
        if not isinstance(value, types.FunctionType) or id(value) in found or depth > _DEPTH or is_library(value.__module__):
            return
        found[id(value)] = value
        names = set(_code_names(value.__code__))
        for other in _named(value):
            visit(other, depth + 1)
            if not isinstance(other, (type, torch.nn.Module, types.ModuleType)):
                for name in names & vars(type(other)).keys():
                    visit(vars(type(other))[name], depth + 1)

    visit(fn, 0)
    owner = getattr(fn, "__self__", None)
    for name in {n for f in list(found.values()) for n in _code_names(f.__code__)} & vars(type(owner)).keys():
        visit(vars(type(owner))[name], 1)
    return list(found.values())


def _named(fn: types.FunctionType) -> Iterator[Any]:
    """Current values of the names in a function's code: globals and closure variables."""
    for name in _code_names(fn.__code__):
        if name in fn.__globals__:
            yield fn.__globals__[name]
    for cell in fn.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # bound later
            continue


__all__ = ["checked_options", "is_whole_step", "register", "step_of", "whole_step"]
