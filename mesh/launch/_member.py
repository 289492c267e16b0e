"""A process of the job: it dies with the launcher, joins the job, and runs the program as `__main__`."""

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
    """Let the kernel kill this process when its parent dies for any reason (Linux).

    Args:
        parent: process id of the parent. If it is already dead, this process exits.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the call above
        os._exit(1)


def forked(environ: Mapping[str, str], out: int, err: int, parent: int) -> None:
    """Give a fork of the launcher its own process group, signal handlers, standard streams and environment.

    Args:
        environ: environment variables to add.
        out, err: descriptors that become stdout and stderr.
        parent: process id of the launcher.
    """
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
    """Join the job, run the program as `__main__`, and return its exit code. In a job of several processes a failure ends the process.

    Args:
        program: script and arguments, or "-m", module and arguments.
        timeout_s: seconds to wait for the other processes.
    """
    is_module = program[0] == "-m"
    arguments = list(program[1:] if is_module else program)
    sys.argv = arguments
    # As in Python: a script imports from its own folder, a module from the current one.
    sys.path.insert(0, os.getcwd() if is_module else str(Path(arguments[0]).resolve().parent))
    try:
        mesh.init(timeout_s=timeout_s)
        if is_module:
            runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as error:
        return _exit_code(error)
    except BaseException as error:
        # sys.excepthook prints the error as Python does, and in a job it notifies the other processes (`mesh/job/_alarm.py`).
        error.__traceback__ = _user_part(error)
        sys.excepthook(type(error), error, error.__traceback__)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _exit_code(error: SystemExit) -> int:
    """Exit code of a program that called `sys.exit`. A code other than 0 and `PREEMPTED` ends the job at once."""
    code = error.code
    if code is not None and not isinstance(code, int):
        sys.stderr.write(f"{code}\n")
        code = 1
    code = code or 0
    job = _join.job()
    if code not in (0, PREEMPTED) and job is not None:
        job.alarm.failed(f"exit code {code}", code)
    return code


def _user_part(error: BaseException) -> TracebackType | None:
    """The traceback without the frames of the launcher and of runpy."""
    launcher_files = (__file__, runpy.__file__, "<frozen runpy>")
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename in launcher_files:
        trace = trace.tb_next
    return trace
