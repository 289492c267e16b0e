"""What a process of the job does: it ties its life to the launcher's, joins the job, and runs the program as `__main__`."""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import mesh
from mesh.job import _join
from mesh.job._place import PREEMPTED

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """This process is killed when its parent `parent` dies, whatever kills that (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)


def forked(environ: Mapping[str, str], out: int, err: int, parent: int) -> None:
    """Turn a fork of the launcher into a process of its own: group, signals, streams, environment."""
    os.setpgid(0, 0)
    die_with_parent(parent)
    signal.set_wakeup_fd(-1)
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL), (signal.SIGHUP, signal.SIG_DFL)):
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (out, 1), (err, 2)):
        os.dup2(source, target)
    for descriptor in (null, out, err):
        os.close(descriptor)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    os.environ.update(environ)


def run(program: Sequence[str], timeout_s: float) -> int:
    """Join the job, run the program as `__main__`, and return its exit code; failures end the process here."""
    is_module = program[0] == "-m"
    arguments = list(program[1:] if is_module else program)
    sys.argv = arguments
    # As Python does it: a script finds its neighbours, a module what lies where the command was given.
    sys.path.insert(0, os.getcwd() if is_module else str(Path(arguments[0]).resolve().parent))
    try:
        mesh.init(timeout_s=timeout_s)
        if is_module:
            runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as leaving:
        return _left(leaving)
    except BaseException as error:
        # Whatever ended the program, the others must hear of it; Python's own hook gets it as it would have.
        error.__traceback__ = _user_part(error)
        sys.excepthook(type(error), error, error.__traceback__)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _left(leaving: SystemExit) -> int:
    """The exit code of a program that ended by `sys.exit`; one that means failure ends the job at once."""
    code = leaving.code
    if code is not None and not isinstance(code, int):
        sys.stderr.write(f"{code}\n")
        code = 1
    code = code or 0
    job = _join.job()
    if code not in (0, PREEMPTED) and job is not None:
        job.alarm.failed(f"exit code {code}", code)
    return code


def _user_part(error: BaseException) -> TracebackType | None:
    """The traceback from the program's first frame on."""
    ours = (__file__, runpy.__file__, "<frozen runpy>")
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    return trace
