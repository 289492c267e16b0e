"""Settings of the whole process: what a compiled function does depends on them as in Python, and what it sets, every call sets."""

import atexit
import calendar
import codecs
import csv
import datetime
import decimal
import faulthandler
import gc
import getpass
import gettext
import logging
import mimetypes
import os
import resource
import shutil
import signal
import socket
import sys
import threading
import time
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import pytest
import torch

import spmd

TENSOR, ARRAY = torch.tensor([1.23456789]), np.array([1.23456789])


def warned() -> float:
    try:
        warnings.warn("of a test", FutureWarning, stacklevel=1)
    except FutureWarning:
        return 2.0
    return 1.0


def divided() -> float:
    try:
        return float(np.float64(1) / np.float64(0) > 0)
    except FloatingPointError:
        return 2.0


# what depends on a setting, and what changes that
READS: dict[str, tuple[Callable[[], float], Callable[[], Any]]] = {
    "decimals": (lambda: float(decimal.Decimal(1) / 3), lambda: setattr(decimal.getcontext(), "prec", 3)),
    "their context": (lambda: float(decimal.getcontext().prec), lambda: setattr(decimal.getcontext(), "prec", 4)),
    "a tensor's text": (lambda: float(len(f"{TENSOR}")), lambda: torch.set_printoptions(precision=6)),
    "in a list": (lambda: float(len(str([TENSOR]))), lambda: torch.set_printoptions(precision=7)),
    "with %": (lambda: float(len("%s" % TENSOR)), lambda: torch.set_printoptions(precision=8)),  # noqa: UP031
    "an array's text": (lambda: float(len(repr(ARRAY))), lambda: np.set_printoptions(precision=3)),
    "by numpy": (lambda: float(len(np.array2string(ARRAY))), lambda: np.set_printoptions(precision=4)),
    "a warning": (warned, lambda: warnings.simplefilter("error", FutureWarning)),
    "a division": (divided, lambda: np.seterr(divide="raise")),
    "digits": (lambda: float(sys.get_int_max_str_digits()), lambda: sys.set_int_max_str_digits(5000)),
    "a library's own": (
        lambda: float(torch.backends.cuda.matmul.allow_tf32),
        lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    ),
}


@pytest.fixture
def settings() -> Iterator[None]:
    tf32, digits, limit = torch.backends.cuda.matmul.allow_tf32, sys.get_int_max_str_digits(), sys.getrecursionlimit()
    with decimal.localcontext(), np.errstate(divide="ignore"), np.printoptions(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            torch.set_printoptions(profile="default")
            sys.set_int_max_str_digits(digits)
            sys.setrecursionlimit(limit)
            torch.backends.cuda.matmul.allow_tf32 = tf32


def test_what_depends_on_a_setting_sees_its_change(settings: None) -> None:
    def read(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x * read() for read, _ in READS.values()])

    step, x = spmd.compile(read, max_retraces=30), torch.ones(())
    for _, change in [*READS.values()]:
        torch.testing.assert_close(step(x.to("jax")).cpu(), read(x))
        change()
        torch.testing.assert_close(step(x.to("jax")).cpu(), read(x))
    num_traces = step.num_traces
    step(x.to("jax"))
    assert step.num_traces == num_traces <= len(READS) + 1


def set_all() -> None:
    decimal.getcontext().prec = 5
    torch.set_printoptions(precision=5)
    np.set_printoptions(precision=5)
    np.seterr(divide="raise")
    warnings.simplefilter("error", FutureWarning)
    sys.setrecursionlimit(4321)
    torch.backends.cuda.matmul.allow_tf32 = True


def seen() -> list[Any]:
    found = decimal.getcontext().prec, len(str(TENSOR)), np.get_printoptions()["precision"], np.geterr()["divide"]
    return [*found, warnings.filters[0][0], sys.getrecursionlimit(), torch.backends.cuda.matmul.allow_tf32]


def test_what_the_function_sets_every_call_sets(settings: None) -> None:
    limit, before = sys.getrecursionlimit(), seen()

    def set_and_double(x: torch.Tensor) -> torch.Tensor:
        set_all()
        return x * 2

    step = spmd.compile(set_and_double)
    step.prepare(torch.ones(2, device="jax"))
    assert seen() == before
    for _ in range(3):
        with decimal.localcontext(), np.errstate(), np.printoptions(), warnings.catch_warnings():
            step(torch.ones(2, device="jax"))
            assert seen() == [5, 17, 5, "raise", "error", 4321, True]
        torch.set_printoptions(profile="default")
        sys.setrecursionlimit(limit)
        torch.backends.cuda.matmul.allow_tf32 = False


def handler(*given: Any) -> None: ...


class Logger(logging.Logger): ...


def set_zone(name: str) -> None:
    os.environ["TZ"] = name
    time.tzset()


def forget_level() -> None:
    logging._levelToName.pop(35, None)
    logging._nameToLevel.pop("NOTE", None)


def forget_dialect() -> None:
    if "of a test" in csv.list_dialects():
        csv.unregister_dialect("of a test")


def answer_errors(text: str) -> None:
    codecs.register_error("of_a_test", lambda error: (text, cast(Any, error).end))


LOGGER, STREAM = logging.getLogger("of a test"), logging.NullHandler()
RELEASED = threading.Event()
DAY, HERE = datetime.datetime(2000, 1, 1), os.path.dirname(os.path.abspath(__file__))
answer_errors("?")
Use = Callable[[], Any]
# what asks the process something, what changes the answer, and what changes it back
ASKS: dict[str, tuple[Use, Use, Use]] = {
    "name of a level": (lambda: len(logging.getLevelName(35)), lambda: logging.addLevelName(35, "NOTE"), forget_level),
    "signal": (
        lambda: signal.getsignal(signal.SIGUSR1) is handler,
        lambda: signal.signal(signal.SIGUSR1, handler),
        lambda: signal.signal(signal.SIGUSR1, signal.SIG_DFL),
    ),
    "collection": (gc.isenabled, gc.disable, gc.enable),
    "debugging of collection": (gc.get_debug, lambda: gc.set_debug(gc.DEBUG_UNCOLLECTABLE), lambda: gc.set_debug(0)),
    "profile function": (lambda: sys.getprofile() is None, lambda: sys.setprofile(handler), lambda: sys.setprofile(None)),
    "flags of the linker": (sys.getdlopenflags, lambda: sys.setdlopenflags(258), lambda: sys.setdlopenflags(2)),
    "fixed time": (lambda: time.localtime(0).tm_hour, lambda: set_zone("XYZ5"), lambda: set_zone("UTC")),
    "text of a time": (
        lambda: len(time.strftime("%Z", (2000, 1, 1, 0, 0, 0, 0, 1, 0))),
        lambda: set_zone("ABCDE5"),
        lambda: set_zone("UTC"),
    ),
    "naive date": (lambda: int(DAY.timestamp()) % 86400, lambda: set_zone("XYZ5"), lambda: set_zone("UTC")),
    "date of a number": (lambda: datetime.datetime.fromtimestamp(0).hour, lambda: set_zone("XYZ5"), lambda: set_zone("UTC")),
    "mask": (lambda: (lambda old: (os.umask(old), old)[1])(os.umask(0o22)), lambda: os.umask(0o77), lambda: os.umask(0o22)),
    "folder": (lambda: len(os.getcwd()), lambda: os.chdir("/"), lambda: os.chdir(HERE)),
    "terminal": (
        lambda: shutil.get_terminal_size().columns,
        lambda: os.environ.update(COLUMNS="33"),
        lambda: os.environ.pop("COLUMNS", None),
    ),
    "user": (lambda: len(getpass.getuser()), lambda: os.environ.update(LOGNAME="of a test"), lambda: os.environ.pop("LOGNAME", None)),
    "time-out": (socket.getdefaulttimeout, lambda: socket.setdefaulttimeout(7), lambda: socket.setdefaulttimeout(None)),
    "handler of codecs": (
        lambda: len(b"\xff".decode("ascii", "of_a_test")),
        lambda: answer_errors("abc"),
        lambda: answer_errors("?"),
    ),
    "type of a file": (
        lambda: len(mimetypes.guess_type("a.zzz")[0] or ""),
        lambda: mimetypes.add_type("text/zzz", ".zzz"),
        mimetypes.init,
    ),
    "handler of faults": (faulthandler.is_enabled, lambda: faulthandler.enable(2), faulthandler.disable),
    "threads": (
        threading.active_count,
        lambda: (RELEASED.clear(), threading.Thread(target=RELEASED.wait).start()),
        lambda: (RELEASED.set(), [t.join() for t in threading.enumerate() if "wait" in t.name]),
    ),
    "tracing of memory": (tracemalloc.is_tracing, tracemalloc.start, tracemalloc.stop),
    "fields of CSV": (csv.field_size_limit, lambda: csv.field_size_limit(1000), lambda: csv.field_size_limit(131072)),
    "dialects": (lambda: len(csv.list_dialects()), lambda: csv.register_dialect("of a test", delimiter=";"), forget_dialect),
    "class of loggers": (
        lambda: logging.getLoggerClass() is Logger,
        lambda: logging.setLoggerClass(Logger),
        lambda: logging.setLoggerClass(logging.Logger),
    ),
    "domain": (lambda: len(gettext.textdomain()), lambda: gettext.textdomain("of"), lambda: gettext.textdomain("messages")),
    "buffer of numpy": (np.getbufsize, lambda: np.setbufsize(16000), lambda: np.setbufsize(8192)),
    "function of numpy": (lambda: np.geterrcall() is handler, lambda: np.seterrcall(handler), lambda: np.seterrcall(None)),
}


@pytest.fixture
def put_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Use]]:
    """Functions to call at the end; the time zone and the folder are restored too."""
    found: list[Use] = []
    monkeypatch.chdir(os.getcwd())
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield found
    for each in found:
        each()
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize("name", list(ASKS))
def test_what_asks_the_process_is_asked_again(name: str, put_back: list[Use]) -> None:
    ask, change, restore = ASKS[name]
    put_back.append(restore)

    def run(wrap: Any, device: str) -> list[float]:
        restore()
        step, found = wrap(lambda x: x * (2.0 + (ask() or 0))), []
        for call in range(4):
            found.append(step(torch.ones(1, device=device)).item())
            if call == 1:
                change()
        return found

    compiled = run(lambda fn: spmd.compile(fn, max_retraces=9), "jax")
    assert compiled == run(lambda fn: fn, "cpu")
    assert len(set(compiled)) == 2


# what sets something, what shows it, and what sets it back
SETS: dict[str, tuple[Use, Use, Use]] = {
    "mask": (lambda: os.umask(0o77), lambda: os.umask(0o22), lambda: os.umask(0o22)),
    "folder": (lambda: os.chdir("/"), os.getcwd, ASKS["folder"][2]),
    "time-out": (lambda: socket.setdefaulttimeout(7), ASKS["time-out"][0], ASKS["time-out"][2]),
    "thresholds": (lambda: gc.set_threshold(900, 11, 12), gc.get_threshold, lambda: gc.set_threshold(700, 10, 10)),
    "no collection": (gc.disable, gc.isenabled, gc.enable),
    "collection": (gc.enable, gc.isenabled, gc.disable),
    "signal": (ASKS["signal"][1], ASKS["signal"][0], ASKS["signal"][2]),
    "name of a level": (lambda: logging.addLevelName(35, "NOTE"), lambda: logging.getLevelName(35), forget_level),
    "level": (lambda: LOGGER.setLevel(7), lambda: (LOGGER.level, LOGGER.isEnabledFor(8)), lambda: LOGGER.setLevel(30)),
    "handler": (lambda: LOGGER.addHandler(STREAM), lambda: len(LOGGER.handlers), lambda: LOGGER.handlers.clear()),
    "levels": (lambda: logging.disable(30), lambda: logging.root.manager.disable, lambda: logging.disable(0)),
    "class of loggers": (ASKS["class of loggers"][1], ASKS["class of loggers"][0], ASKS["class of loggers"][2]),
    "fields of CSV": (lambda: csv.field_size_limit(1000), csv.field_size_limit, lambda: csv.field_size_limit(131072)),
    "anomalies": (
        lambda: torch.autograd.set_detect_anomaly(True) and None,
        torch.is_anomaly_enabled,
        lambda: torch.autograd.set_detect_anomaly(False),
    ),
    "warnings of torch": (lambda: torch.set_warn_always(True), torch.is_warn_always_enabled, lambda: torch.set_warn_always(False)),
    "autocast": (
        lambda: torch.set_autocast_enabled("cpu", True),
        lambda: torch.is_autocast_enabled("cpu"),
        lambda: torch.set_autocast_enabled("cpu", False),
    ),
    "buffer of numpy": (lambda: np.setbufsize(16000), np.getbufsize, lambda: np.setbufsize(8192)),
}


@pytest.mark.parametrize("name", list(SETS))
def test_what_one_function_sets_every_call_sets(name: str, put_back: list[Use]) -> None:
    use, look, restore = SETS[name]
    put_back += [restore, gc.enable]

    def run(wrap: Any, device: str) -> list[Any]:
        restore()
        step, found = wrap(lambda x: (use(), x * 2)[1]), []
        for _ in range(3):
            step(torch.ones(1, device=device))
            found.append(look())
            restore()
        return found

    assert run(spmd.compile, "jax") == run(lambda fn: fn, "cpu")


@pytest.mark.parametrize(
    "use",
    [
        *(gc.get_count, lambda: sys.getrefcount(TENSOR), lambda: resource.getrusage(0), os.times, os.getloadavg, lambda: os.nice(0)),
        *(lambda: shutil.disk_usage("/"), lambda: socket.getaddrinfo("localhost", 1), tracemalloc.get_traced_memory, time.tzset),
        *(lambda: atexit.register(handler), lambda: sys.settrace(None), lambda: mimetypes.add_type("text/zzz", ".zzz")),
        *(faulthandler.enable, tracemalloc.start, lambda: calendar.setfirstweekday(0), threading.stack_size),
        *(lambda: answer_errors("?"), lambda: shutil.which("sh", path="/bin")),
    ],
)
def test_measurements_and_changes_of_the_process_are_refused(use: Use) -> None:
    with pytest.raises(spmd.TraceError, match="a measurement of the process|a change of the process|by keyword"):
        spmd.compile(lambda x: (use(), x * 2)[1])(torch.ones(1, device="jax"))
