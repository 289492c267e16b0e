"""A gang: processes that are started and ended together, with their output and exits handled as they happen.

Everything runs on one thread with one selector, because processes are forked here, and a fork copies locks that
other threads have acquired.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from mesh.launch._reaper import Reaper, kill_group


class InMember(Exception):
    """Raised in the forked process, to unwind the launcher's frames. Its `run` then runs the program."""

    def __init__(self, run: Callable[[], int]) -> None:
        super().__init__()
        self.run = run


@dataclass(frozen=True)
class Exit:
    """Exit of a member: code as in `subprocess` (negative: a signal), and the time.time() at which it was seen."""

    member: int
    code: int
    time: float


@dataclass
class _Member:
    pid: int
    pidfd: int
    streams: dict[int, tuple[bool, bytearray]] = field(default_factory=dict[int, tuple[bool, bytearray]])


class Gang:
    """The processes of one attempt.

    Args:
        reaper: gets the process group of every member.
        on_line: called with (member, is_stderr, line without newline) for each line that a member writes.
    """

    def __init__(self, reaper: Reaper, on_line: Callable[[int, bool, str], None]) -> None:
        self._reaper, self._on_line = reaper, on_line
        self._selector = selectors.DefaultSelector()
        self._members: dict[int, _Member] = {}
        self._inputs: list[int] = []
        self.exits: list[Exit] = []
        self.killed: set[int] = set()  # by `end`, so that their exit codes have no meaning

    @property
    def running(self) -> list[int]:
        """Members that have not ended."""
        ended = {end.member for end in self.exits}
        return [member for member in self._members if member not in ended]

    def pid(self, member: int) -> int:
        """Process id of a member."""
        return self._members[member].pid

    def listen(self, descriptor: int) -> None:
        """Make `step` return when this descriptor is readable."""
        self._selector.register(descriptor, selectors.EVENT_READ, None)

    def fork(self, member: int, run: Callable[[int, int], Callable[[], int]]) -> None:
        """Start a member as a fork of this process.

        Args:
            member: index of the process.
            run: called in the fork with the descriptors for its stdout and stderr. It returns a function, which runs after the
                launcher's frames are unwound and returns the exit code.
        """
        (out_reader, out), (err_reader, err) = os.pipe(), os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        # Block signals until the child has installed its own handlers.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
        pid = os.fork()
        if pid == 0:
            for descriptor in (*self._descriptors(), *self._reaper.descriptors, out_reader, err_reader):
                os.close(descriptor)
            self._selector.close()
            raise InMember(run(out, err))
        with contextlib.suppress(PermissionError, ProcessLookupError):  # the child has done this itself, or is gone
            os.setpgid(pid, pid)  # here too: the child may be stopped before its first instruction, and is killed by its group
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        os.close(out)
        os.close(err)
        self._add(member, pid, out_reader, err_reader)

    def spawn(self, member: int, command: Sequence[str], environ: Mapping[str, str], sent: bytes | None = None) -> None:
        """Start a member as a new program. If `sent` is given, it is written to its stdin, which stays open until the gang ends."""
        (out_reader, out), (err_reader, err) = os.pipe(), os.pipe()
        stdin = subprocess.DEVNULL if sent is None else subprocess.PIPE
        process = subprocess.Popen(command, env=dict(environ), stdin=stdin, stdout=out, stderr=err, process_group=0)
        os.close(out)
        os.close(err)
        if sent is not None:
            assert process.stdin is not None
            self._inputs.append(os.dup(process.stdin.fileno()))
            os.write(self._inputs[-1], sent)
            process.stdin.close()
        process.returncode = 0  # the gang waits for it, not the Popen object
        self._add(member, process.pid, out_reader, err_reader)

    def step(self, timeout_s: float) -> bool:
        """Wait for events and handle them. True if a descriptor of `listen` is readable."""
        is_readable = False
        for event, _ in self._selector.select(max(0.0, timeout_s)):
            if event.data is None:
                is_readable = True
            elif event.fd == self._members[event.data].pidfd:
                self._reap(event.data)
            else:
                self._read(event.data, event.fd)
        return is_readable

    def stopped(self) -> list[int]:
        """Members that are stopped by a signal (SIGSTOP)."""
        found: list[int] = []
        for member in self.running:
            change = os.waitid(os.P_PID, self._members[member].pid, os.WSTOPPED | os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if change is not None and change.si_code == os.CLD_STOPPED:
                found.append(member)
        return found

    def send(self, number: int) -> None:
        """Send a signal to every running member, but not to its child processes."""
        for member in self.running:
            os.kill(self._members[member].pid, number)

    def end(self, grace_s: float) -> None:
        """End all members. Running ones get `grace_s` seconds to end by themselves; then their process groups are killed."""
        for descriptor in self._inputs:
            os.close(descriptor)
        self._inputs.clear()
        deadline = time.monotonic() + grace_s
        while self.running and time.monotonic() < deadline:
            self.step(deadline - time.monotonic())
        self.killed.update(self.running)
        for member in self._members.values():
            kill_group(member.pid)
        deadline = time.monotonic() + 5.0
        while self.running and time.monotonic() < deadline:
            self.step(0.1)
        self._drain()
        self._selector.close()

    def _add(self, member: int, pid: int, out: int, err: int) -> None:
        self._reaper.watch(pid)
        pidfd = os.pidfd_open(pid)
        self._members[member] = _Member(pid, pidfd, {out: (False, bytearray()), err: (True, bytearray())})
        for descriptor in (pidfd, out, err):
            os.set_blocking(descriptor, False)
            self._selector.register(descriptor, selectors.EVENT_READ, member)

    def _descriptors(self) -> list[int]:
        return [d for member in self._members.values() for d in (member.pidfd, *member.streams)] + self._inputs

    def _reap(self, index: int) -> None:
        member = self._members[index]
        _, status = os.waitpid(member.pid, 0)
        self.exits.append(Exit(index, os.waitstatus_to_exitcode(status), time.time()))
        self._selector.unregister(member.pidfd)
        os.close(member.pidfd)
        member.pidfd = -1
        for descriptor in list(member.streams):  # its last output is still in the pipes
            self._read(index, descriptor)

    def _read(self, index: int, descriptor: int) -> None:
        member = self._members[index]
        while descriptor in member.streams:
            is_error, partial = member.streams[descriptor]
            try:
                piece = os.read(descriptor, 65536)
            except BlockingIOError:
                return
            partial += piece
            *lines, rest = partial.split(b"\n")
            if not piece or len(rest) > 1_000_000:  # end of the stream, or a program that writes no newlines
                lines, rest = [*lines, *([rest] if rest else [])], bytearray()
            partial[:] = rest
            for line in lines:
                self._on_line(index, is_error, line.decode("utf-8", "replace"))
            if not piece:
                self._selector.unregister(descriptor)
                os.close(descriptor)
                del member.streams[descriptor]

    def _drain(self) -> None:
        """Read the rest of the pipes and close them. Do not wait for their end, because a grandchild may keep them open for ever."""
        for index, member in self._members.items():
            for descriptor in list(member.streams):
                self._read(index, descriptor)
            for descriptor in list(member.streams):
                self._selector.unregister(descriptor)
                os.close(descriptor)
            member.streams.clear()
            if member.pidfd >= 0:
                os.close(member.pidfd)
                member.pidfd = -1
