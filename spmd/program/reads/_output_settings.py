"""What decides where warnings and log records go. If the function has changed it at the end, they cannot wait for the end of the call.

with warnings.catch_warnings(record=True) as caught:    # when the call ends, this list is no longer filled
    warnings.warn("slow path")
"""

from __future__ import annotations

import logging
import sys
import warnings
from typing import Any

from spmd.program.find._static import attributes_of

_DECIDED = ("ignore", "error")  # what these filters do is done at once, and nothing is shown


def shown_now() -> tuple[Any, ...]:
    """What decides which warnings are shown, and where: filters, functions, and the standard error."""
    return tuple(warnings.filters), (warnings.showwarning, getattr(warnings, "_showwarnmsg_impl", None)), sys.stderr


def settings_of(fn: Any) -> tuple[Any, ...]:
    """What decides which outputs of `fn` are shown, and where; nothing for functions other than those of warnings and logging."""
    if fn is warnings.warn:
        return shown_now()
    if getattr(fn, "__module__", None) != "logging":
        return ()
    logger: Any = getattr(fn, "__self__", logging.root)
    while isinstance(logger, logging.LoggerAdapter):
        logger = logger.logger
    found: list[Any] = [sys.stderr, logging.root.manager.disable]
    while isinstance(logger, logging.Logger):
        found += [logger.level, logger.disabled, logger.propagate, *logger.filters]
        for handler in logger.handlers:
            stream = (attributes_of(handler) or {}).get("stream")
            found += [handler, handler.level, handler.formatter, stream, *handler.filters]
        logger = logger.parent if logger.propagate else None
    return tuple(found)


def is_kept(fn: Any, shown: tuple[Any, ...]) -> bool:
    """Whether a warning goes to a list of the function's, or is no more than an exception or nothing.

    Args:
        fn: the function that is called.
        shown: what `shown_now` gave when the trace began.
    """
    if fn is not warnings.warn or shown_now() == shown:
        return False
    impl = getattr(warnings, "_showwarnmsg_impl", None)
    if impl is not shown[1][1] and type(getattr(impl, "__self__", None)) is list:
        return True
    action, text, category, module, line = warnings.filters[0] if warnings.filters else ("", "", Warning, "", 0)
    return action in _DECIDED and text is None and category is Warning and module is None and not line


__all__ = ["is_kept", "settings_of", "shown_now"]
