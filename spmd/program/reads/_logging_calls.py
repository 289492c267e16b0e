"""Calls of `logging`: which loggers and handlers a record passes, and what handlers keep of it.

What handlers write is output, and every call need not repeat it. But handlers, filters and formatters of the user's are Python code,
whose writes every call repeats; which of them run depends on levels, on `propagate` and on the lists of handlers and filters.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from spmd.program.reads._hidden_state import IN_MEMORY

if TYPE_CHECKING:
    from spmd.program.reads._recorder import Recording

_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "warn": logging.WARNING,
    "error": logging.ERROR,
    "exception": logging.ERROR,
    "critical": logging.CRITICAL,
    "fatal": logging.CRITICAL,
}
_LOGS = frozenset((*_LEVELS, "log", "handle", "callHandlers"))


def note_logging(recording: Recording, fn: Any, args: tuple[Any, ...]) -> None:
    """Record what a function of `logging` in Python reads and writes."""
    name, owner = fn.__name__, args[0] if args else None
    if name in _LOGS:
        logger = logging.root
        if isinstance(owner, (logging.Logger, logging.LoggerAdapter)):
            logger = owner
        while isinstance(logger, logging.LoggerAdapter):
            recording.load_attr(logger, "logger")
            logger = logger.logger
        _read_loggers(recording, logger)
    elif isinstance(owner, logging.Filterer):
        _note_setting(recording, name, owner)


def is_off(fn: Any, args: tuple[Any, ...]) -> bool:
    """Whether a call of a method of a logger, or of a function of `logging`, makes no record: its level is off."""
    if getattr(fn, "__module__", None) != "logging":
        return False
    level = args[0] if fn.__name__ == "log" and args else _LEVELS.get(fn.__name__)
    logger: Any = getattr(fn, "__self__", logging.root)
    while isinstance(logger, logging.LoggerAdapter):
        logger = logger.logger
    if not isinstance(level, int) or not isinstance(logger, logging.Logger):
        return False
    return logger.disabled or level <= logger.manager.disable or level < logger.getEffectiveLevel()


def _note_setting(recording: Recording, name: str, owner: Any) -> None:
    """Record the write of a method that configures a logger or handler."""
    if name == "setLevel":  # also drops what loggers have cached
        recording.journal.setting(owner, "level", f"the level of {owner!r}", lambda: owner.level, owner.setLevel)
    elif name in ("addHandler", "removeHandler", "addFilter", "removeFilter"):
        recording.mutate(owner.handlers if name.endswith("Handler") else owner.filters)
    elif name == "setFormatter":
        recording.store_attr(owner, "formatter")


def _read_loggers(recording: Recording, logger: Any) -> None:
    """Record what decides where the records of a logger go."""
    recording.load_attr(logging.root.manager, "disable")
    while logger is not None:
        for name in ("level", "disabled", "propagate", "parent", "handlers", "filters"):
            recording.load_attr(logger, name)
        for held in (logger.handlers, logger.filters):
            recording.read_content(held)
        for handler in logger.handlers:
            _read_handler(recording, handler)
        logger = logger.parent if logger.propagate else None


def _read_handler(recording: Recording, handler: Any) -> None:
    for name in ("level", "formatter", "filters"):
        recording.load_attr(handler, name)
    recording.read_content(handler.filters)
    if type(handler).__module__.partition(".")[0] == "logging":  # those of others keep what is theirs, as a terminal does
        if isinstance(stream := getattr(handler, "stream", None), IN_MEMORY):
            recording.mutate(stream)
        if isinstance(buffer := getattr(handler, "buffer", None), list):
            recording.mutate(buffer)


__all__ = ["is_off", "note_logging"]
