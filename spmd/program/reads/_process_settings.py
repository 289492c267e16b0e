"""Settings of the process in Python, numpy and torch, and the operations that read them implicitly.

A quotient of decimals depends on `decimal.getcontext()`, a division of arrays on `np.seterr`, the text of a tensor on
`torch.set_printoptions`, and whether a warning raises on the filters of `warnings`. If a trace does one of these, the setting is guarded:
it is read again before every call. A setting that the function sets is set by every call.
"""

from __future__ import annotations

import builtins
import csv
import decimal
import functools
import gc
import gettext
import locale
import logging
import os
import resource
import signal
import socket
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from spmd.base._signals import handler_of
from spmd.base._torch import print_options
from spmd.program.reads._decimal_flags import digits_of
from spmd.program.reads._library import is_recorded
from spmd.program.reads._process_only import question_of_hashes
from spmd.program.reads._questions import COLLECTING, Question, questions_of_process, umask

_MAX_DEPTH = 6
TEXTS = frozenset(map(id, (builtins.str, builtins.repr, builtins.format, builtins.ascii)))
_METHODS_OF_TEXT = ("__str__", "__repr__", "__format__", "format", "format_map")
_NUMPYS_TEXTS = ("array2string", "array_str", "array_repr", "format_float_positional", "format_float_scientific")


class Setting(NamedTuple):
    """One setting.

    Attributes:
        title: its name in messages.
        read: gives its value now, as plain values.
        put: sets its value.
    """

    title: str
    read: Callable[[], Any]
    put: Callable[[Any], Any]

    @property
    def question(self) -> Question:
        """The question that is asked before each call."""
        return (id(SETTINGS), self.title), self.title, self.read


def _decimals(context: decimal.Context | None = None) -> Any:
    return digits_of(context or decimal.getcontext())


def _plain(options: dict[str, Any]) -> Any:
    return tuple((name, value if isinstance(value, (int, float, str, type(None))) else repr(value)) for name, value in options.items())


def _put_numpys_text(options: Any) -> None:
    np.set_printoptions(**{name: value for name, value in options if name not in ("override_repr", "formatter")})


def _locale() -> Any:
    return locale.setlocale(locale.LC_ALL)


def _put_locale(name: str) -> None:
    locale.setlocale(locale.LC_ALL, name)


def _deterministic() -> Any:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _put_filters(filters: Any) -> None:
    warnings.resetwarnings()  # also invalidates the caches that depend on the filters
    warnings.filters[:] = filters  # type: ignore[index]


_DECIMALS: Question = ("decimals",), "decimal.getcontext()", _decimals
_ERRORS = Setting("np.geterr()", lambda: tuple(np.geterr().items()), lambda modes: np.seterr(**dict(modes)) and None)
_OF_NUMPY = Setting("np.get_printoptions()", lambda: _plain(dict(np.get_printoptions())), _put_numpys_text)
_OF_TORCH = Setting("torch.set_printoptions()", lambda: _plain(print_options()), lambda options: print_options().update(options))
_LOCALE = Setting("locale.setlocale()", _locale, _put_locale)
_FILTERS = Setting("the filters of warnings", lambda: tuple(warnings.filters), _put_filters)
SETTINGS: dict[int, Setting] = {  # by id of the function that sets each
    id(decimal.setcontext): Setting("decimal.setcontext()", decimal.getcontext, decimal.setcontext),
    id(np.seterr): _ERRORS,
    id(np.set_printoptions): _OF_NUMPY,
    id(torch.set_printoptions): _OF_TORCH,
    id(locale.setlocale): _LOCALE,
    **dict.fromkeys(map(id, (warnings.simplefilter, warnings.filterwarnings, warnings.resetwarnings)), _FILTERS),
    id(sys.setrecursionlimit): Setting("sys.getrecursionlimit()", sys.getrecursionlimit, sys.setrecursionlimit),
    id(sys.setswitchinterval): Setting("sys.getswitchinterval()", sys.getswitchinterval, sys.setswitchinterval),
    id(sys.set_int_max_str_digits): Setting("sys.get_int_max_str_digits()", sys.get_int_max_str_digits, sys.set_int_max_str_digits),
    id(torch.use_deterministic_algorithms): Setting(
        "torch.use_deterministic_algorithms()",
        _deterministic,
        lambda modes: torch.use_deterministic_algorithms(modes[0], warn_only=modes[1]),
    ),
    id(torch.set_float32_matmul_precision): Setting(
        "torch.get_float32_matmul_precision()", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    ),
    id(torch.set_num_threads): Setting("torch.get_num_threads()", torch.get_num_threads, torch.set_num_threads),
    id(torch.set_warn_always): Setting("torch.is_warn_always_enabled()", torch.is_warn_always_enabled, torch.set_warn_always),
    id(torch.set_deterministic_debug_mode): Setting(
        "torch.get_deterministic_debug_mode()", torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode
    ),
    id(torch.autograd.set_detect_anomaly): Setting(
        "torch.is_anomaly_enabled()",
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda modes: torch.set_anomaly_enabled(*modes),
    ),
    id(os.chdir): Setting("os.getcwd()", os.getcwd, os.chdir),
    id(os.umask): Setting("os.umask()", umask, os.umask),
    id(csv.field_size_limit): Setting("csv.field_size_limit()", csv.field_size_limit, csv.field_size_limit),
    id(gettext.textdomain): Setting("gettext.textdomain()", gettext.textdomain, gettext.textdomain),
    id(logging.disable): Setting("logging.disable()", lambda: logging.root.manager.disable, logging.disable),
    **dict.fromkeys(map(id, (gc.enable, gc.disable)), Setting("gc.isenabled()", COLLECTING.is_enabled, COLLECTING.put)),
}


def _pairs() -> Iterator[tuple[int, Setting]]:
    """The functions `set...` that have a function `get...` beside them."""
    for module in (sys, gc, socket, logging, np, torch.hub, torch.multiprocessing):
        for name, put in vars(module).items():
            read = getattr(module, f"get{name[3:]}", None) if name.startswith("set") and name not in _NOT_REPEATED else None
            if callable(put) and callable(read):
                yield id(put), Setting(f"{module.__name__}.get{name[3:]}()", read, partial(_put_parts, put))


def _put_parts(put: Callable[..., Any], value: Any) -> None:
    if isinstance(value, tuple):
        put(*value)
    else:
        put(value)


_NOT_REPEATED = ("settrace", "setprofile", "set_asyncgen_hooks")
for _fn, _setting in _pairs():
    SETTINGS.setdefault(_fn, _setting)


def setting_of_call(fn: Any, args: tuple[Any, ...]) -> Setting | None:
    """The setting that a call of `fn` sets; None if it sets none."""
    if fn is signal.signal and args:
        return Setting(f"signal.getsignal({args[0]!r})", partial(handler_of, args[0]), partial(signal.signal, args[0]))
    if fn is resource.setrlimit and args:
        return Setting(f"resource.getrlimit({args[0]!r})", partial(resource.getrlimit, args[0]), partial(resource.setrlimit, args[0]))
    if fn is torch.set_autocast_enabled and args and isinstance(args[0], str):
        device = args[0]
        return Setting(
            f"torch.is_autocast_enabled({device!r})",
            partial(torch.is_autocast_enabled, device),
            partial(torch.set_autocast_enabled, device),
        )
    return SETTINGS.get(id(fn)) if args or fn is gc.enable or fn is gc.disable or fn is warnings.resetwarnings else None


def question_of_content(value: Any, cls: type) -> Question | None:
    """The setting that operations on an object of class `cls` read; None if there is none."""
    if cls is set or cls is frozenset:
        return question_of_hashes(value) if len(value) > 1 else None
    return _question_of_class(cls)


@functools.cache
def _question_of_class(cls: type) -> Question | None:
    if cls is decimal.Decimal or cls is decimal.Context:
        return _DECIMALS
    return _ERRORS.question if issubclass(cls, (np.ndarray, np.generic)) else None


def questions_of_text(value: Any, depth: int = 0) -> Iterator[Question]:
    """The settings that conversion of a value to text reads."""
    if isinstance(value, torch.Tensor):
        yield _OF_TORCH.question
    elif isinstance(value, (np.ndarray, np.generic)):
        yield _OF_NUMPY.question
    elif type(value) in (list, tuple, dict, set, frozenset) and depth < _MAX_DEPTH:
        for part in value.values() if type(value) is dict else value:
            yield from questions_of_text(part, depth + 1)


def questions_of_call(fn: Any, args: tuple[Any, ...]) -> Iterator[Question]:
    """The settings that a call of a library function reads."""
    if is_recorded(type(fn).__module__):  # an object of the user's, whose `__getattr__` must not run
        return
    name, module = getattr(fn, "__name__", ""), getattr(fn, "__module__", None) or ""
    owner = getattr(fn, "__self__", None)
    if id(fn) in TEXTS or name in _METHODS_OF_TEXT or (name in _NUMPYS_TEXTS and str(module).startswith("numpy")):
        yield from questions_of_text((owner, *args))
    if isinstance(owner, decimal.Context):
        yield ("decimals", id(owner)), "a decimal.Context", partial(_decimals, owner)
    elif module in ("decimal", "_decimal"):
        yield _DECIMALS
        if fn is decimal.getcontext:  # what is written to it is written to this object
            yield ("context",), "the object decimal.getcontext()", decimal.getcontext
    elif module in ("csv", "_csv"):
        for dialect in (arg for arg in args if isinstance(arg, str) and arg in csv.list_dialects()):
            yield ("csv", dialect), f"csv.get_dialect({dialect!r})", partial(_dialect, dialect)
    elif module in ("locale", "_locale"):
        yield _LOCALE.question
    elif isinstance(fn, np.ufunc):
        yield _ERRORS.question
    elif name in ("warn", "warn_explicit") and module in ("warnings", "_warnings") and args:
        yield _of_warning(args)
    yield from questions_of_process(name, str(module), fn, args)


def _dialect(name: str) -> Any:
    try:
        held = csv.get_dialect(name)
    except csv.Error:  # it was unregistered
        return None
    return tuple(getattr(held, attribute) for attribute in dir(held) if not attribute.startswith("__"))


def _of_warning(args: tuple[Any, ...]) -> Question:
    is_made = isinstance(args[0], Warning)
    given = next((a for a in args[1:] if isinstance(a, type) and issubclass(a, Warning)), UserWarning)
    category, text = type(args[0]) if is_made else given, str(args[0])
    return ("warning", category, text), f"the filters of warnings for {category.__name__}", partial(_actions, category, text)


def _actions(category: type[Warning], text: str) -> Any:
    """The actions of the filters that may apply to a warning, up to the first that applies in every module."""
    found: list[str] = []
    for action, pattern, kind, module, line in warnings.filters:
        if issubclass(category, kind) and (pattern is None or pattern.match(text)):
            is_anywhere = module is None and line == 0
            found.append(action if is_anywhere else f"{action} in {module and module.pattern}:{line}")
            if is_anywhere:
                break
    return tuple(found)


__all__ = ["SETTINGS", "TEXTS", "Setting", "question_of_content", "questions_of_call", "questions_of_text", "setting_of_call"]
