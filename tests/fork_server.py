"""A process that has imported `spmd` once and forks whenever a test starts a program: three CPU seconds saved for each.

    code, out, err = run(["spmd.cli", "launch", "-n", "2", "train.py"], environ, folder)

A fork ends as a process of its own does: it leaves the server's frames, and the interpreter shuts down. What Python and jax read
from the environment when they are imported is that of the first call; `XLA_FLAGS` is read later, by each fork.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_REQUEST_BYTES = 2**20


def run(argv: Sequence[str], environ: Mapping[str, str], folder: Path, timeout_s: float = 300) -> tuple[int, str, str]:
    """Run a program in a fork: its exit code, and what it wrote to stdout and stderr.

    Args:
        argv: `spmd.cli` and its arguments, or the path of a script and its arguments.
        environ: all environment variables.
        folder: where it runs.

    Raises:
        subprocess.TimeoutExpired: it ran longer than `timeout_s`, and was killed.
    """
    channel = _server()
    request = json.dumps({"argv": list(argv), "environ": dict(environ), "folder": str(folder)}).encode()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        channel.settimeout(timeout_s)
        socket.send_fds(channel, [request], [out.fileno(), err.fileno()])
        pid = int(channel.recv(64))
        try:
            code = int(channel.recv(64))
        except TimeoutError:
            os.kill(pid, signal.SIGKILL)
            channel.settimeout(None)
            channel.recv(64)
            raise subprocess.TimeoutExpired(list(argv), timeout_s) from None
        out.seek(0)
        err.seek(0)
        return code, out.read().decode(), err.read().decode()


@functools.cache
def _server() -> socket.socket:
    """This process's end of the line to its server, which ends when the line does."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-W", "ignore::UserWarning", "-m", "tests.fork_server", str(there.fileno())]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    environ.pop("JAX_DISABLE_MOST_OPTIMIZATIONS", None)  # read once, and not for all forks
    server = subprocess.Popen(command, cwd=ROOT, env=environ, pass_fds=[there.fileno()], stdin=subprocess.DEVNULL)
    there.close()

    def end() -> None:
        here.close()
        server.wait()

    atexit.register(end)
    return here


def _serve(channel: socket.socket) -> Callable[[], object]:
    """Fork for each request; returns in each fork with what to run there, and in the server when nobody asks any more."""
    import torch._dynamo  # by the first optimizer, otherwise

    import spmd.cli

    del spmd, torch
    while True:
        request, descriptors, _, _ = socket.recv_fds(channel, _REQUEST_BYTES, 2)
        if not request:
            return lambda: 0
        pid = os.fork()
        if pid == 0:
            channel.close()
            return functools.partial(_run, json.loads(request), *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        with contextlib.suppress(BrokenPipeError):
            channel.send(str(pid).encode())
            channel.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())


def _run(request: dict[str, object], out: int, err: int) -> object:
    atexit.register(gc.freeze)  # runs last: the shutdown need not look through all that the server imported, a second and more
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.close(out)
    os.close(err)
    os.environ.clear()
    os.environ.update(request["environ"])  # type: ignore[call-overload]
    os.chdir(request["folder"])  # type: ignore[arg-type]
    program, *arguments = request["argv"]  # type: ignore[misc]
    sys.argv[:] = [program, *arguments]
    if program == "spmd.cli":
        import spmd.cli

        return spmd.cli.main(arguments)
    sys.path[0] = os.path.dirname(program)
    return runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    raise SystemExit(0 if isinstance(done := _serve(socket.socket(fileno=int(sys.argv[1])))(), dict) else done)
