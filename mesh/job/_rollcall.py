"""Roll call: before jax starts, every process of a job reports to process 0, which checks that they are compatible.

jax itself aborts a process whose wait times out, and two jobs can share a port without noticing. So process 0 first listens
on a port that it occupies for its whole life, and the others send a report of themselves. Once all have reported, all get the same
answer: the address of jax's service, or the text of an error. A process that connects after the start is told that it is too
late. A report is one line of JSON of at most `MAX_BYTES`, signed with the job's key if it has one. Anything else is discarded.

This module does not depend on jax.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import ipaddress
import json
import selectors
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from mesh._mesh_errors import JobError, message
from mesh.job._timeouts import DEFAULT_PORT

MAX_BYTES = 4096
_PEER_TIMEOUT_S = 5.0  # for one line from or to a connected peer
_RETRY_S = 0.05


@dataclass(frozen=True)
class Report:
    """Description of a process, which it sends to process 0.

    Attributes:
        index, count: its place in the job, as its own environment describes it.
        versions: versions of the packages that must be equal in all processes.
        where: host name and process id, for error messages.
    """

    index: int
    count: int
    versions: Mapping[str, str]
    where: str

    def to_line(self, key: str) -> bytes:
        """The report as a signed line of JSON."""
        text = json.dumps({"index": self.index, "count": self.count, "versions": dict(self.versions), "where": self.where})
        return json.dumps({"report": text, "mac": _mac(key, text)}).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes, key: str) -> Report | None:
        """Parse a line. None if it is not a report of this job."""
        outer = _json_dict(line)
        text, mac = outer.get("report"), outer.get("mac")
        if not isinstance(text, str) or not isinstance(mac, str) or not hmac.compare_digest(mac.encode(), _mac(key, text).encode()):
            return None
        inner = _json_dict(text.encode())
        index, count, versions, where = (inner.get(name) for name in ("index", "count", "versions", "where"))
        if type(index) is not int or type(count) is not int or not isinstance(versions, dict) or not isinstance(where, str):
            return None
        return cls(index, count, {str(k): str(v) for k, v in cast("dict[Any, Any]", versions).items()}, where)


def resolve(address: str, *, spans_machines: bool) -> tuple[str, int]:
    """Resolve "name:port" to an IP address and a port.

    Args:
        address: address of process 0.
        spans_machines: whether processes on other machines must reach it, so that a name must not resolve to loopback.

    Raises:
        JobError: the port is missing or out of range, the name cannot be resolved, or it resolves to loopback.
    """
    name, _, port = address.rpartition(":")
    if not name or not port.isdigit() or not 0 < int(port) < 65535:
        raise JobError(message(f"{address!r} is not a coordinator address", fix=f"write name:port, e.g. 'node1:{DEFAULT_PORT}'"))
    try:
        found = socket.getaddrinfo(name.strip("[]"), int(port), socket.AF_UNSPEC, socket.SOCK_STREAM)
    except socket.gaierror as error:
        fix = "use an IP address, or add the name to DNS or /etc/hosts on every host"
        raise JobError(message(f"the coordinator's name {name!r} cannot be resolved on this host", f"{error.strerror}", fix=fix)) from error
    ip = str(min(found, key=lambda entry: entry[0] != socket.AF_INET)[4][0])
    # A loopback address given as digits is accepted: it may be a tunnel, or several "hosts" on one machine.
    is_loopback = ipaddress.ip_address(ip.split("%")[0]).is_loopback and ip != name.strip("[]")
    if spans_machines and is_loopback:
        raise JobError(
            message(
                f"the coordinator's name {name!r} resolves to loopback ({ip}) on this host, where other hosts cannot reach it",
                "Debian writes '127.0.1.1 <own name>' into /etc/hosts",
                fix="use the host's IP address as coordinator, or remove the line from /etc/hosts",
            )
        )
    return ip, int(port)


def require_reachable_name(name: str) -> None:
    """Check that this host's own name does not resolve to loopback, since gloo announces the resolved address to the other processes.

    Raises:
        JobError: the name resolves to loopback, or cannot be resolved.
    """
    try:
        found = socket.gethostbyname(name)
    except OSError as error:
        raise JobError(
            message(
                f"this host's own name {name!r} cannot be resolved",
                str(error),
                "collectives between CPU processes announce its address",
                fix=f"add a line '<its IP address> {name}' to /etc/hosts",
            )
        ) from error
    if ipaddress.ip_address(found).is_loopback:
        raise JobError(
            message(
                f"this host's own name {name!r} resolves to loopback ({found}), where other hosts cannot reach it",
                "collectives between CPU processes announce its address; Debian writes '127.0.1.1 <own name>' into /etc/hosts",
                fix=f"replace that line in /etc/hosts with '<its IP address> {name}'",
            )
        )


def service_address(ip: str, port: int) -> str:
    """Address for jax's service, next to the roll call at `ip` and `port`.

    Its port is the one above, so that a firewall can allow it. On loopback it is any free port.

    Raises:
        JobError: that port is in use.
    """
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((ip, 0 if ip in ("127.0.0.1", "::1") else port + 1))
        except OSError as error:
            fix = f"use another port than {port} for the coordinator; that port and the one above must be free"
            raise JobError(message(f"port {port + 1} of {ip} is in use", "jax's service needs it", fix=fix)) from error
        return f"[{ip}]:{probe.getsockname()[1]}" if ":" in ip else f"{ip}:{probe.getsockname()[1]}"


@dataclass
class RollCall:
    """Process 0's side of the roll call: a listening socket that no other process can share.

    Args:
        ip, port: the only address on which it listens.
        own: report of process 0, with which the others must agree.
        key: secret of the job; reports with another signature are discarded.

    Raises:
        JobError: the port is in use, or the address does not belong to this host.
    """

    ip: str
    port: int
    own: Report
    key: str
    _listener: socket.socket = field(init=False)
    _verdict: bytes | None = field(init=False, default=None)
    _waiting: dict[int, tuple[Report, socket.socket]] = field(init=False, default_factory=dict[int, tuple[Report, socket.socket]])
    _problem: str | None = field(init=False, default=None)
    _is_over: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        family = socket.AF_INET6 if ":" in self.ip else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        # REUSEADDR lets a restarted job bind a port with connections in TIME_WAIT. If another process listens there, bind still fails.
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._listener.bind((self.ip, self.port))
            self._listener.listen(min(4096, 16 + self.own.count))
        except OSError as error:
            self._listener.close()
            raise JobError(_cannot_listen(self.ip, self.port, error)) from error
        self._listener.setblocking(False)

    def wait(self, timeout_s: float) -> None:
        """Wait until every process has reported, and check that all are compatible.

        Raises:
            JobError: some processes are incompatible, or did not report in time. The message names them; all get the same one.
        """
        deadline = time.monotonic() + timeout_s
        with _Lines(self._listener) as lines:
            while self._problem is None and len(self._waiting) < self.own.count - 1 and time.monotonic() < deadline:
                for peer, line in lines.received(min(0.2, max(0.0, deadline - time.monotonic()))):
                    self._take(peer, line)
        if self._problem is None and len(self._waiting) < self.own.count - 1:
            self._problem = self._absent(timeout_s)
        if self._problem is not None:
            self._answer({"problem": self._problem})
            self._listener.close()
            raise JobError(self._problem)

    def start(self, service: str) -> None:
        """Send the address of jax's service to all processes. From now on, later connections are refused."""
        self._answer({"service": service})
        others = f"its {self.own.count} processes run"
        text = message("the job has started without this process", others, fix="wait until that job has ended")
        self._verdict = json.dumps({"problem": text}).encode() + b"\n"
        threading.Thread(target=self._refuse_late_processes, name="roll call", daemon=True).start()

    def close(self) -> None:
        """Release the port."""
        self._is_over = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in `_refuse_late_processes`, which closes the socket

    def _take(self, peer: socket.socket, line: bytes) -> None:
        report = Report.from_line(line, self.key)
        if report is None:
            peer.close()
            return
        self._problem = self._problem or self._incompatibility(report)
        self._waiting[-1 - len(self._waiting) if self._problem else report.index] = (report, peer)

    def _incompatibility(self, report: Report) -> str | None:
        """Error text if the report contradicts those before it, else None."""
        own = self.own
        if report.count != own.count:
            return message(
                "the processes disagree on the number of processes",
                f"process {own.index} ({own.where}): {own.count}, process {report.index} ({report.where}): {report.count}",
                fix="start all of them with the same number of processes",
            )
        other = own if report.index == own.index else self._waiting[report.index][0] if report.index in self._waiting else None
        if other is not None or not 0 <= report.index < own.count:
            twice = "" if other is None else f" and {other.where}"
            what = f"process {report.index} reported twice" if other else f"there is no process {report.index} in a job of {own.count}"
            return message(what, f"from {report.where}{twice}", fix=f"give each process a different index from 0 to {own.count - 1}")
        for name in sorted({*own.versions, *report.versions}):
            ours, theirs = own.versions.get(name, "no version"), report.versions.get(name, "no version")
            if ours != theirs:
                return message(
                    f"the processes run different versions of {name}",
                    f"process {own.index} ({own.where}) has {ours}, process {report.index} ({report.where}) has {theirs}",
                    fix=f"install the same {name} on every host",
                )
        return None

    def _absent(self, timeout_s: float) -> str:
        missing = [i for i in range(1, self.own.count) if i not in self._waiting]
        named = ", ".join(map(str, missing[:20])) + (", ..." if len(missing) > 20 else "")
        return message(
            f"process {named} did not report within {timeout_s:g} s",
            f"{1 + len(self._waiting)} of {self.own.count} processes connected to {self.ip}:{self.port}",
            fix="check that it was started and can reach that address; a longer timeout: mesh.init(timeout_s=...)",
        )

    def _answer(self, verdict: Mapping[str, str]) -> None:
        line = json.dumps(verdict).encode() + b"\n"
        for _, peer in self._waiting.values():
            try:
                peer.settimeout(_PEER_TIMEOUT_S)
                peer.sendall(line)
            except OSError:  # the peer has ended and printed its own error
                continue
            finally:
                peer.close()

    def _refuse_late_processes(self) -> None:
        assert self._verdict is not None
        with _Lines(self._listener) as lines:
            while not self._is_over:
                for peer, _ in lines.received(60.0):
                    try:
                        peer.settimeout(_PEER_TIMEOUT_S)
                        peer.sendall(self._verdict)
                    except OSError:
                        continue
                    finally:
                        peer.close()
        self._listener.close()


class _Lines:
    """First line of each connection. A connection whose line is too long or too slow is closed."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._partial: dict[socket.socket, tuple[bytes, float]] = {}

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *_: object) -> None:
        for peer in list(self._partial):
            self._drop(peer)
        self._selector.close()

    def received(self, timeout_s: float) -> list[tuple[socket.socket, bytes]]:
        """Wait up to `timeout_s` for an event. Returns the connections whose first line is complete, each with its line."""
        done: list[tuple[socket.socket, bytes]] = []
        for event, _ in self._selector.select(min(timeout_s, _PEER_TIMEOUT_S) if self._partial else timeout_s):
            peer = cast("socket.socket", event.fileobj)
            if peer is self._listener:
                self._accept()
            else:
                line = self._read(peer)
                if line is not None:
                    done.append((peer, line))
        now = time.monotonic()
        for peer in [peer for peer, (_, since) in self._partial.items() if now - since > _PEER_TIMEOUT_S]:
            self._drop(peer)
        return done

    def _accept(self) -> None:
        try:
            peer, _ = self._listener.accept()
        except OSError:  # the peer is gone, or no file descriptors are left: later connections may succeed
            return
        peer.setblocking(False)
        self._partial[peer] = (b"", time.monotonic())
        self._selector.register(peer, selectors.EVENT_READ)

    def _read(self, peer: socket.socket) -> bytes | None:
        try:
            data = peer.recv(MAX_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        so_far, since = self._partial[peer]
        whole = so_far + data
        if not data or len(whole) > MAX_BYTES:
            self._drop(peer)
            return None
        if b"\n" not in whole:
            self._partial[peer] = (whole, since)
            return None
        self._selector.unregister(peer)
        del self._partial[peer]
        return whole.partition(b"\n")[0]

    def _drop(self, peer: socket.socket) -> None:
        self._selector.unregister(peer)
        del self._partial[peer]
        peer.close()


def report(address: tuple[str, int], own: Report, key: str, timeout_s: float) -> str:
    """Send a report to process 0, and wait for its answer.

    Args:
        address: IP address and port of process 0.
        own: report of this process.
        key: secret of the job, to sign the report.
        timeout_s: seconds to retry until process 0 answers.

    Returns:
        The address of jax's service.

    Raises:
        JobError: process 0 did not answer in time, or the processes are incompatible.
    """
    deadline = time.monotonic() + timeout_s
    refusal = "no answer"
    while time.monotonic() < deadline:
        try:
            with socket.create_connection(address, timeout=min(_PEER_TIMEOUT_S, timeout_s)) as connection:
                connection.sendall(own.to_line(key))
                # Longer than process 0 waits, so that its answer with the names of the missing processes arrives.
                connection.settimeout(max(0.1, deadline + _PEER_TIMEOUT_S - time.monotonic()))
                answer = _json_dict(_line_from(connection))
        except OSError as error:
            refusal = error.strerror or str(error)
            time.sleep(_RETRY_S)
            continue
        if isinstance(answer.get("problem"), str):
            raise JobError(answer["problem"])
        if isinstance(answer.get("service"), str):
            return answer["service"]
        refusal = "it closed the connection: another job's process, or another program, listens there"
        time.sleep(_RETRY_S)
    raise JobError(
        message(
            f"process 0 did not answer at {address[0]}:{address[1]} within {timeout_s:g} s",
            f"process {own.index} of {own.count} ({own.where}) tried; the last attempt: {refusal}",
            fix="check that process 0 was started, and that no firewall blocks this port",
        )
    )


def _line_from(connection: socket.socket) -> bytes:
    data = b""
    while b"\n" not in data and len(data) <= 16 * MAX_BYTES:
        piece = connection.recv(MAX_BYTES)
        if not piece:
            break
        data += piece
    return data.partition(b"\n")[0]


def _json_dict(text: bytes) -> dict[str, Any]:
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _mac(key: str, text: str) -> str:
    return hmac.new(key.encode(), text.encode(), hashlib.sha256).hexdigest()


def _cannot_listen(ip: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return message(
            f"port {port} of {ip} is in use: another job or program listens there",
            "process 0 needs this port",
            fix=f"use another port, e.g. {port + 10}, or end the other program (ss -ltnp shows it)",
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return message(
            f"{ip} is not an address of this host, where process 0 runs",
            f"process 0 must listen on {ip}:{port}",
            fix="pass the address of the host that runs process 0, or start process 0 there",
        )
    return message(f"process 0 cannot listen on {ip}:{port}", error.strerror or str(error), fix="use another address or port")
