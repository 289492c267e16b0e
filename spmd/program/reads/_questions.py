"""Functions of Python's library that ask the process something, and functions that change it.

logging.getLevelName(35), signal.getsignal(s), sys.gettrace()    # asked again before each call, and compared
resource.getrusage(0), gc.get_count()                            # refused: measurements
atexit.register(f), time.tzset()                                 # refused: no call can undo them
"""

from __future__ import annotations

import codecs
import gc
import os
import re
import signal
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from spmd.base._signals import handler_of
from spmd.program.reads._places import PLAIN, is_same
from spmd.program.reads._trace_errors import refused

Question = tuple[tuple[Any, ...], str, Callable[[], Any]]  # a key that identifies it, its title in messages, a function that answers it

_ASKS = re.compile(
    r"(get|is|has|list|active|current|main|lookup|guess|enumerate|which|access|find_spec|nl_langinfo|localeconv|_ncall|sched_get)\w*"
)
_PROCESS = frozenset(  # modules with functions that ask the process
    (
        *("sys", "gc", "signal", "locale", "threading", "thread", "logging", "faulthandler", "csv", "tracemalloc", "codecs", "mimetypes"),
        *("resource", "posix", "nt", "os", "socket", "gettext", "multiprocessing", "asyncio", "getpass", "shutil", "atexit", "urllib"),
        *("importlib", "weakref", "site", "sysconfig", "platform"),
    )
)
_BOTH = frozenset(("field_size_limit", "textdomain"))  # ask without an argument, and set with one
_MEASURES = {
    "sys": ("getrefcount", "getallocatedblocks"),
    "gc": ("get_count", "get_stats", "get_objects", "get_referrers"),
    "resource": ("getrusage",),
    "posix": ("getloadavg", "times", "statvfs"),
    "shutil": ("disk_usage",),
    "tracemalloc": ("get_traced_memory", "get_tracemalloc_memory", "take_snapshot"),
    "socket": ("gethostbyname", "gethostbyname_ex", "gethostbyaddr", "getaddrinfo", "getnameinfo", "getfqdn", "create_connection"),
}
_CHANGES = {
    "sys": ("settrace", "setprofile", "addaudithook", "set_asyncgen_hooks"),
    "threading": ("settrace", "setprofile", "settrace_all_threads", "setprofile_all_threads"),
    "gc": ("freeze", "unfreeze"),
    "signal": ("alarm", "setitimer", "siginterrupt", "set_wakeup_fd", "pthread_sigmask", "raise_signal", "pthread_kill"),
    "thread": ("stack_size",),
    "posix": ("nice", "setpriority", "sched_setaffinity", "putenv", "unsetenv", "kill", "killpg"),
    "atexit": ("register", "unregister"),
    "codecs": ("register", "register_error", "unregister"),
    "csv": ("register_dialect", "unregister_dialect"),
    "asyncio": ("set_event_loop", "set_event_loop_policy"),
    "calendar": ("setfirstweekday",),
    "copyreg": ("pickle",),
    "faulthandler": ("enable", "disable", "register"),
    "tracemalloc": ("start", "stop"),
    "time": ("tzset",),
    "mimetypes": ("add_type", "init"),
    "multiprocessing": ("set_start_method",),
    "logging": ("basicConfig", "captureWarnings", "shutdown"),
    "importlib": ("reload",),
}
_OF_TIME_ZONE = frozenset(("localtime", "ctime", "mktime", "strftime", "fromtimestamp", "timestamp", "astimezone"))
_TIME_ZONE: Question = ("the time zone",), "the time zone", lambda: (time.tzname, time.timezone, time.altzone)
_STANDARD_ERRORS = (
    "strict",
    "ignore",
    "replace",
    "backslashreplace",
    "surrogateescape",
    "surrogatepass",
    "xmlcharrefreplace",
    "namereplace",
)


def questions_of_process(name: str, module: str, fn: Any, args: tuple[Any, ...]) -> Iterator[Question]:
    """The questions that a call of a library function asks the process.

    Args:
        name, module, fn, args: the function's names, the function, and its arguments.
    """
    if name in _OF_TIME_ZONE and (module == "time" or _is_of_dates(fn, args)):
        yield _TIME_ZONE
    elif name in ("decode", "encode"):
        for errors in args:
            if isinstance(errors, str) and errors.isidentifier() and errors not in _STANDARD_ERRORS and _handler(errors):
                yield ("codec errors", errors), f"codecs.lookup_error({errors!r})", partial(_handler, errors)
    elif _asks(name, _top(module), args):
        yield _question(name, module, fn, args)


def why_not_repeated(name: str, module: str) -> str | None:
    """Why no call can repeat a call of a library function; None if one can."""
    top = _top(module)
    if name in _MEASURES.get(top, ()):
        return "a measurement of the process or of its surroundings"
    if name in _CHANGES.get(top, ()):
        return "a change of the process, which no call can undo"
    return None


def _asks(name: str, top: str, args: tuple[Any, ...]) -> bool:
    """Whether a function of a module only asks the process."""
    if top not in _PROCESS or name in _MEASURES.get(top, ()) or name in ("getpass", "getrandom"):
        return False
    return _ASKS.fullmatch(name) is not None or (name in _BOTH and not args)


def _top(module: str) -> str:
    return module.partition(".")[0].lstrip("_")


def _is_of_dates(fn: Any, args: tuple[Any, ...]) -> bool:
    owner = getattr(fn, "__self__", None) or (args[0] if args else None)
    return (owner if isinstance(owner, type) else type(owner)).__module__ == "datetime"


def _handler(errors: str) -> Any:
    try:
        return codecs.lookup_error(errors)
    except LookupError:
        return None


def _question(name: str, module: str, fn: Any, args: tuple[Any, ...]) -> Question:
    keys = tuple(a if isinstance(a, PLAIN) else id(a) for a in (*args, getattr(fn, "__self__", None)))
    ask: Callable[[], Any] = partial(_answer, INSTEAD.get(id(fn), fn), args)
    if (first := ask()) == TypeError.__name__ or (name == "which" and len(args) > 1 and not isinstance(args[1], int)):
        raise refused(f"{name}() with an argument by keyword, so that it cannot be asked again: pass its arguments by position")
    if not is_same(first, ask()):
        ask = partial(_text, fn, args)
    return ("process", module, name, *keys), f"{name}()", ask


def _answer(fn: Any, args: tuple[Any, ...]) -> Any:
    """The answer, in a form that is compared."""
    try:
        found = fn(*args)
    except Exception as error:  # the traced function gets it from its own call
        return type(error).__name__
    if isinstance(found, dict):
        return tuple(part for item in found.items() for part in item)
    if isinstance(found, (list, tuple)):
        return tuple(found)
    return frozenset(found) if isinstance(found, (set, frozenset)) else found


def _text(fn: Any, args: tuple[Any, ...]) -> str:
    return repr(_answer(fn, args))


class Collecting:
    """Whether the process collects cycles of garbage, as the user's code sees it: a trace disables that for itself."""

    def __init__(self) -> None:
        self._in_trace: bool | None = None

    def is_enabled(self) -> bool:
        return gc.isenabled() if self._in_trace is None else self._in_trace

    def put(self, is_enabled: bool) -> None:
        if self._in_trace is not None:
            self._in_trace = is_enabled
        elif is_enabled:
            gc.enable()
        else:
            gc.disable()

    def suspend(self) -> None:
        """Collect nothing from now on."""
        self._in_trace = gc.isenabled()
        gc.disable()

    def resume(self) -> None:
        """After `suspend`."""
        was_enabled, self._in_trace = self._in_trace, None
        if was_enabled:
            gc.enable()


COLLECTING = Collecting()


@contextmanager
def uncollected() -> Generator[None]:
    """Disable cyclic garbage collection: a trace keeps most of its objects, and with torch and jax loaded a full collection takes 0.2 s."""
    COLLECTING.suspend()
    try:
        yield
    finally:
        COLLECTING.resume()


INSTEAD: dict[int, Callable[..., Any]] = {  # by id of a function, what runs in a trace
    id(gc.isenabled): COLLECTING.is_enabled,
    id(gc.enable): partial(COLLECTING.put, True),
    id(gc.disable): partial(COLLECTING.put, False),
    id(signal.getsignal): handler_of,
}


def umask() -> int:
    """The mask of new files, which only a change of it tells."""
    found = os.umask(0)
    os.umask(found)
    return found


__all__ = ["COLLECTING", "INSTEAD", "Question", "questions_of_process", "umask", "uncollected", "why_not_repeated"]
