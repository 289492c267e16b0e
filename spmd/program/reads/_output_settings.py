"""Whether the function itself has changed where its warnings and log records go: then they cannot wait for the end of the call.

with warnings.catch_warnings(record=True) as caught:    # at the end of the call, this list is no longer filled
    warnings.warn("slow path")
"""

from __future__ import annotations

import logging
import sys
import warnings
from typing import TYPE_CHECKING, Any

from spmd.program.find._static import attributes_of
from spmd.program.reads._number_place import ABSENT

if TYPE_CHECKING:
    from spmd.program.reads._recorder import Recording

_OF_LOGGER = ("level", "disabled", "propagate", "parent", "handlers", "filters")
_OF_HANDLER = ("level", "formatter", "filters", "stream")
_DECIDED = ("ignore", "error")  # what these filters do is done at once, and nothing is shown


def shown_now() -> tuple[Any, ...]:
    """What decides which warnings and records are shown, and where: filters, functions, and the standard error."""
    functions = warnings.showwarning, getattr(warnings, "_showwarnmsg_impl", None)
    return tuple(warnings.filters), functions, (sys.stderr, logging.root.manager.disable)


def has_own_settings(recording: Recording, fn: Any) -> bool:
    """Whether the function has changed where the warnings, or the records, of `fn` go."""
    if fn is warnings.warn:
        return shown_now() != recording.journal.shown
    if getattr(fn, "__module__", None) != "logging":
        return False
    if shown_now()[2] != recording.journal.shown[2]:
        return True
    logger: Any = getattr(fn, "__self__", logging.root)
    while isinstance(logger, logging.LoggerAdapter):
        logger = logger.logger
    while isinstance(logger, logging.Logger):
        if any(_is_changed(recording, holder, names) for holder, names in _parts_of(logger)):
            return True
        if not all(map(recording.is_before, logger.handlers)):
            return True
        logger = logger.parent if logger.propagate else None
    return False


def is_kept(recording: Recording, fn: Any) -> bool:
    """Whether a warning goes to a list of the function's, or is no more than an exception or nothing."""
    if fn is not warnings.warn:
        return False
    impl = getattr(warnings, "_showwarnmsg_impl", None)
    if impl is not recording.journal.shown[1][1] and type(getattr(impl, "__self__", None)) is list:
        return True
    action, text, category, module, line = warnings.filters[0] if warnings.filters else ("", "", Warning, "", 0)
    return action in _DECIDED and text is None and category is Warning and module is None and not line


def _parts_of(logger: logging.Logger) -> list[tuple[Any, tuple[str, ...]]]:
    return [(logger, _OF_LOGGER), *((handler, _OF_HANDLER) for handler in logger.handlers)]


def _is_changed(recording: Recording, holder: Any, names: tuple[str, ...]) -> bool:
    journal, attributes = recording.journal, attributes_of(holder) or {}
    if any(journal.is_written(holder, name) or journal.is_written(attributes, name) for name in names):
        return True
    lists = (part for part in (attributes.get("handlers"), attributes.get("filters")) if isinstance(part, list))
    return any((before := journal.before(part)) is not ABSENT and before != part for part in lists)


__all__ = ["has_own_settings", "is_kept", "shown_now"]
