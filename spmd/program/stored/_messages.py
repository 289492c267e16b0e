"""The log records and warnings of a trace. A process that uses a stored trace shows them again, since it does not run the function."""

from __future__ import annotations

import logging
import sys
import threading
import types
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from spmd.base._warnings import warnings_shown
from spmd.program.find._static import is_python_class

_PLAIN = (bool, int, float, str, type(None))
# attributes that each record gets when it is made, or by a formatter
_OF_RECORD = frozenset(vars(logging.makeLogRecord({}))) - {"name", "levelno", "levelname", "pathname", "lineno", "funcName", "stack_info"}


@dataclass
class Messages:
    """What was logged and warned of.

    Attributes:
        records: the attributes of each log record.
        warned: (text, class, file, line) of each warning.
        lost: what of them cannot be shown again, as a noun phrase; None if nothing.
    """

    records: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    warned: list[tuple[str, type[Warning], str, int]] = field(default_factory=list[tuple[str, type[Warning], str, int]])
    lost: str | None = None

    @contextmanager
    def noted(self) -> Generator[None]:
        """While active, note the log records and warnings of this thread."""
        make, here = logging.getLogRecordFactory(), threading.get_ident()
        made: list[logging.LogRecord] = []

        def noting(*args: Any, **kwargs: Any) -> logging.LogRecord:
            record = make(*args, **kwargs)
            if threading.get_ident() == here and not record.name.startswith("spmd"):
                made.append(record)
            return record

        noting.__wrapped__ = make  # type: ignore[attr-defined]

        def note(message: warnings.WarningMessage) -> None:
            if threading.get_ident() == here:
                self._note_warning(message)

        logging.setLogRecordFactory(noting)
        try:
            with warnings_shown(note):
                yield
        finally:
            if logging.getLogRecordFactory() is noting:
                logging.setLogRecordFactory(make)
            for record in made:
                self._note_record(record)

    def _note_record(self, record: logging.LogRecord) -> None:
        held = vars(record)
        args = tuple(held["args"].values()) if type(held["args"]) is dict else held["args"] or ()
        about = {name: value for name, value in held.items() if name not in _OF_RECORD}
        if held["exc_info"] or not all(type(value) in _PLAIN for value in (held["msg"], *args, *about.values())):
            self.lost = "a log record with objects"
        else:
            self.records.append({**about, "msg": record.getMessage()})

    def _note_warning(self, warning: warnings.WarningMessage) -> None:
        kind: type[Warning] = warning.category
        message: Any = warning.message
        if is_python_class(kind) or type(message) is not kind or type(message.args) is not tuple or list(map(type, message.args)) != [str]:
            self.lost = "a warning of a class of the program"
        else:
            self.warned.append((message.args[0], kind, warning.filename, warning.lineno))

    def show(self) -> None:
        """Log and warn again."""
        for about in self.records:
            logger = logging.getLogger(about["name"])
            if logger.isEnabledFor(about["levelno"]):
                logger.handle(logging.makeLogRecord(about))
        for text, category, file, line in self.warned:
            warnings.warn_explicit(text, category, file, line, registry=_registry(file))


def _registry(file: str) -> Any:
    """Where Python notes the warnings that a file has shown, so that each is shown once."""
    for module in list(sys.modules.values()):
        space = vars(module) if type(module) is types.ModuleType else {}
        if space.get("__file__") == file:
            return space.setdefault("__warningregistry__", {})
    return None


__all__ = ["Messages"]
