"""The state of libraries that a trace may depend on without a recorded read: settings, and what the program has put into them.

Code of libraries is not recorded (`reads._library`). Within a process its state is taken to be constant. Another process may have another
one: a function of torch that was replaced, a custom operator with another implementation, other filters of warnings.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from spmd.base._torch import custom_operators
from spmd.lowering import lowerings
from spmd.program.find._static import is_a, is_python_class
from spmd.program.reads import is_library
from spmd.program.stored._description import description

_OF_CLASSES = ("pybind11_builtins",)  # the module of classes in C++
_SEARCHED = frozenset(("torch", "numpy", "einops", "einx"))  # libraries that compute with tensors: their modules `a` and `a.b`,
_ALSO_SEARCHED = ("torch.autograd.", "torch.utils.", "torch.amp.", "torch.nn.attention.")  # and these. Code of `torch.nn` is recorded
_OURS = tuple(f"{Path(__file__).parents[3] / name}{os.sep}" for name in ("spmd", "mesh"))  # our files
_NAMESPACES = (torch.Tensor, torch, torch.nn.functional, torch.functional, torch.special, torch.linalg, torch.fft)


def library_state() -> Iterator[Any]:
    """The state of libraries, as plain values.

    Raises:
        NotStorable: the program has put something into a library that cannot be compared.
    """
    yield tuple(_settings_of_torch())
    filters: Any = warnings.filters
    yield tuple((action, _pattern(text), description(kind), _pattern(module), line) for action, text, kind, module, line in filters)
    yield logging.root.manager.disable, tuple(_log_levels())
    yield tuple((place, description(value)) for place, value in _functions_of_the_program())
    yield tuple(_aliases())
    yield tuple(_rules())


def _settings_of_torch() -> Iterator[Any]:
    matmul, cudnn, cuda = torch.backends.cuda.matmul, torch.backends.cudnn, torch.backends.cuda
    yield torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    yield torch.get_float32_matmul_precision(), matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark
    yield cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled()
    yield torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled(), torch.backends.mha.get_fastpath_enabled()
    yield str(torch.get_default_device()), torch.is_autocast_cache_enabled(), torch.is_warn_always_enabled()
    yield torch.backends.opt_einsum.enabled, torch.backends.opt_einsum.strategy


def _pattern(pattern: Any) -> Any:
    return None if pattern is None else str(getattr(pattern, "pattern", pattern))


def _log_levels() -> Iterator[tuple[str, int, bool]]:
    """The loggers with a level of their own: whether code logs depends on it."""
    yield "", logging.root.level, logging.root.disabled
    for name, logger in sorted(logging.root.manager.loggerDict.items()):
        if is_a(logger, logging.Logger) and (logger.level or logger.disabled):  # type: ignore[union-attr]
            yield name, logger.level, logger.disabled  # type: ignore[union-attr]


def _spaces() -> Iterator[tuple[str, Any]]:
    """The dicts of the modules of libraries and of their classes, by name."""
    seen: set[int] = set()
    for name, module in list(sys.modules.items()):
        is_searched = name.count(".") < 2 and name.partition(".")[0] in _SEARCHED
        if (is_searched or name.startswith(_ALSO_SEARCHED)) and is_a(module, types.ModuleType):
            space = vars(module)
            yield name, space
            for value in list(space.values()):
                if is_a(value, type) and id(value) not in seen:
                    seen.add(id(value))
                    yield f"{name}.{value.__qualname__}", vars(value)


def _functions_of_the_program() -> Iterator[tuple[str, Any]]:
    """Functions and callable objects in libraries that are not theirs, by where they are."""
    is_theirs: dict[Any, bool] = {types.FunctionType: False, functools.partial: False}  # by class
    for name, space in _spaces():
        for key, value in list(space.items()):
            kind = type(value)
            if kind not in is_theirs:
                is_theirs[kind] = not _is_of_the_program(value)
            if not is_theirs[kind] and _is_of_the_program(value):
                yield f"{name}.{key}", value


def _is_of_the_program(value: Any) -> bool:
    """Whether a function or object is not of a library."""
    kind = type(value)
    if kind is functools.partial:
        return _is_of_the_program(value.func)
    name = value.__globals__.get("__name__") if kind is types.FunctionType else kind.__module__ if is_python_class(kind) else None
    return name is not None and not _is_of_libraries(name)


@functools.cache
def _is_of_libraries(module: str) -> bool:
    root = module.partition(".")[0]
    return is_library(module) or root in _OF_CLASSES or (root in sys.stdlib_module_names and root != "__main__")


def _aliases() -> Iterator[tuple[str, Any]]:
    """The functions of the main namespaces of torch, each with its own name: one may have been replaced by another."""
    for space in _NAMESPACES:
        for key, value in vars(space).items():
            if is_a(value, (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)):
                yield key, value.__qualname__


def _rules() -> Iterator[Any]:
    """The lowerings and custom operators of the program."""
    for op, lowering in lowerings().items():
        if not lowering.source.startswith(_OURS):
            yield str(op), *map(description, (lowering.rule, lowering.check, *(lowering.decides or ())))
    for name, operator in sorted(custom_operators.items()):
        parts = [part for held in vars(operator).values() for part in (held.values() if is_a(held, dict) else (held,))]
        yield name, *(description(part) for part in parts if _is_of_the_program(part))


__all__ = ["library_state"]
