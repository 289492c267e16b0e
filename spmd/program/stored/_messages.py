"""The log records and warnings of a trace. A process that uses a stored trace shows them again, since it does not run the function."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from spmd.base._warnings import warnings_shown


@dataclass
class Messages:
    """What was logged and warned of.

    Attributes:
        records: the attributes of each log record.
        warned: (text, class, file, line) of each warning.
    """

    records: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    warned: list[tuple[str, type[Warning], str, int]] = field(default_factory=list[tuple[str, type[Warning], str, int]])

    @contextmanager
    def noted(self) -> Generator[None]:
        """While active, note the log records and warnings of this thread."""
        make, here = logging.getLogRecordFactory(), threading.get_ident()

        def noting(*args: Any, **kwargs: Any) -> logging.LogRecord:
            record = make(*args, **kwargs)
            if threading.get_ident() == here and not record.name.startswith("spmd"):
                about = {name: getattr(record, name) for name in ("name", "levelno", "levelname", "pathname", "lineno", "funcName")}
                self.records.append({**about, "msg": record.getMessage()})
            return record

        def note(message: warnings.WarningMessage) -> None:
            if threading.get_ident() == here:
                self.warned.append((str(message.message), message.category, message.filename, message.lineno))

        logging.setLogRecordFactory(noting)
        try:
            with warnings_shown(note):
                yield
        finally:
            logging.setLogRecordFactory(make)

    def show(self) -> None:
        """Log and warn again."""
        for about in self.records:
            logger = logging.getLogger(about["name"])
            if logger.isEnabledFor(about["levelno"]):
                logger.handle(logging.makeLogRecord(about))
        for text, category, file, line in self.warned:
            warnings.warn_explicit(text, category, file, line)


__all__ = ["Messages"]
