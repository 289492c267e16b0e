"""A gang: processes that are started together, whose output and ends are seen as they happen, and that are ended together.

Everything happens on one thread around one selector: processes are forked from here, and a fork must not find locks that
other threads hold.
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

from mesh.launch._keeper import Keeper, kill_group


class InMember(Exception):
    """Raised in the forked process, to leave the launcher's frames; its `run` is what the process is for."""

    def __init__(self, run: Callable[[], int]) -> None:
        super().__init__()
        self.run = run


@dataclass(frozen=True)
class Exit:
    """The end of a member: exit code as `subprocess` has it (negative: a signal), and when it was seen (time.time)."""

    member: int
    code: int
    time: float


@dataclass
class _Member:
    pid: int
    pidfd: int
    streams: dict[int, tuple[bool, bytearray]] = field(default_factory=dict[int, tuple[bool, bytearray]])


class Gang:
    """Processes of one attempt.

    Args:
        keeper: is told every process group.
        on_line: called with (member, is_stderr, line without its end).
    """

    def __init__(self, keeper: Keeper, on_line: Callable[[int, bool, str], None]) -> None:
        self._keeper, self._on_line = keeper, on_line
        self._selector = selectors.DefaultSelector()
        self._members: dict[int, _Member] = {}
        self._inputs: list[int] = []
        self.exits: list[Exit] = []
        self.killed: set[int] = set()  # by `end`, so that their exits say nothing

    @property
    def running(self) -> list[int]:
        """Members that have not ended."""
        over = {end.member for end in self.exits}
        return [member for member in self._members if member not in over]

    def pid(self, member: int) -> int:
        return self._members[member].pid

    def listen(self, descriptor: int) -> None:
        """Make `step` return when something can be read there."""
        self._selector.register(descriptor, selectors.EVENT_READ, None)

    def fork(self, member: int, run: Callable[[int, int], Callable[[], int]]) -> None:
        """Start a member as a fork of this process.

        Args:
            run: called in the fork with its descriptors for stdout and stderr; what it returns is run after the
                launcher's frames are left, and its result is the exit code.
        """
        (out_reader, out), (err_reader, err) = os.pipe(), os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        # Not a signal between fork and the child's own handlers.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
        pid = os.fork()
        if pid == 0:
            for descriptor in (*self._descriptors(), *self._keeper.descriptors, out_reader, err_reader):
                os.close(descriptor)
            self._selector.close()
            raise InMember(run(out, err))
        with contextlib.suppress(PermissionError, ProcessLookupError):  # it did so itself and went on, or is gone
            os.setpgid(pid, pid)  # here too: it may be stopped before its first instruction, and its group must be there to be killed
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        os.close(out)
        os.close(err)
        self._add(member, pid, out_reader, err_reader)

    def spawn(self, member: int, command: Sequence[str], environ: Mapping[str, str], told: bytes | None = None) -> None:
        """Start a member as a new program; `told` is written to its stdin, which then stays open as long as this gang."""
        (out_reader, out), (err_reader, err) = os.pipe(), os.pipe()
        stdin = subprocess.DEVNULL if told is None else subprocess.PIPE
        process = subprocess.Popen(command, env=dict(environ), stdin=stdin, stdout=out, stderr=err, process_group=0)
        os.close(out)
        os.close(err)
        if told is not None:
            assert process.stdin is not None
            self._inputs.append(os.dup(process.stdin.fileno()))
            os.write(self._inputs[-1], told)
            process.stdin.close()
        process.returncode = 0  # the gang waits for it, not the Popen object
        self._add(member, process.pid, out_reader, err_reader)

    def step(self, timeout_s: float) -> bool:
        """Wait for something to happen, and take it in; True if a descriptor of `listen` can be read."""
        called = False
        for event, _ in self._selector.select(max(0.0, timeout_s)):
            if event.data is None:
                called = True
            elif event.fd == self._members[event.data].pidfd:
                self._reap(event.data)
            else:
                self._read(event.data, event.fd)
        return called

    def stopped(self) -> list[int]:
        """Members that a signal has stopped (SIGSTOP) and nothing has continued."""
        found: list[int] = []
        for member in self.running:
            change = os.waitid(os.P_PID, self._members[member].pid, os.WSTOPPED | os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if change is not None and change.si_code == os.CLD_STOPPED:
                found.append(member)
        return found

    def send(self, number: int) -> None:
        """A signal to every running member itself, not to what it started."""
        for member in self.running:
            os.kill(self._members[member].pid, number)

    def end(self, grace_s: float) -> None:
        """End all: those that still run get `grace_s` to end by themselves; then their groups are killed."""
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
        self._keeper.watch(pid)
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
        for descriptor in list(member.streams):  # what it wrote last is in the pipes
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
            if not piece or len(rest) > 1_000_000:  # the end, or a program that writes no lines
                lines, rest = [*lines, *([rest] if rest else [])], bytearray()
            partial[:] = rest
            for line in lines:
                self._on_line(index, is_error, line.decode("utf-8", "replace"))
            if not piece:
                self._selector.unregister(descriptor)
                os.close(descriptor)
                del member.streams[descriptor]

    def _drain(self) -> None:
        """Take what is left in the pipes, and close them: a grandchild may hold the other end for ever."""
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
