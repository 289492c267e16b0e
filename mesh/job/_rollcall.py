"""Roll call: before jax starts, every process of a job reports to process 0, which says whether they fit together.

jax itself aborts a process that waits in vain, and two jobs can share a port without noticing. So process 0 listens first
on a port that it keeps for itself as long as it lives; the others report who they are; all get one answer, within seconds
once they are there: the address of jax's service, or one line that says what is wrong. After the start the port answers
late comers that they are too late. Bytes that are no report are dropped; a report is one line of JSON of at most
`MAX_BYTES`, signed with the job's key if it has one.

Knows nothing of jax.
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
_PATIENCE_S = 5.0  # for one line from a connected peer
_RETRY_S = 0.05


@dataclass(frozen=True)
class Report:
    """What a process says of itself.

    Attributes:
        index, count: its place in the job as it sees it.
        versions: of what must be equal everywhere.
        where: machine and process id, for messages.
    """

    index: int
    count: int
    versions: Mapping[str, str]
    where: str

    def to_line(self, key: str) -> bytes:
        """The report as it travels."""
        text = json.dumps({"index": self.index, "count": self.count, "versions": dict(self.versions), "where": self.where})
        return json.dumps({"report": text, "mac": _mac(key, text)}).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes, key: str) -> Report | None:
        """The report in a line, or None if it is not one of this job."""
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
    """IP and port of "name:port".

    Raises:
        JobError: no port, no such name, or the name leads back to this machine although others must use it.
    """
    name, _, port = address.rpartition(":")
    if not name or not port.isdigit() or not 0 < int(port) < 65535:
        raise JobError(message(f"{address!r} is not an address of a coordinator", fix=f"write name:port, e.g. 'node1:{DEFAULT_PORT}'"))
    try:
        found = socket.getaddrinfo(name.strip("[]"), int(port), socket.AF_UNSPEC, socket.SOCK_STREAM)
    except socket.gaierror as error:
        fix = "use an IP address, or add the name to DNS or /etc/hosts on every host"
        raise JobError(message(f"the coordinator's name {name!r} cannot be resolved on this host", f"{error.strerror}", fix=fix)) from error
    ip = str(min(found, key=lambda entry: entry[0] != socket.AF_INET)[4][0])
    # An address that was written as one is meant so (a tunnel, several "hosts" on one machine).
    is_loopback = ipaddress.ip_address(ip.split("%")[0]).is_loopback and ip != name.strip("[]")
    if spans_machines and is_loopback:
        raise JobError(
            message(
                f"the coordinator's name {name!r} resolves to loopback ({ip}) on this host, where other hosts cannot reach it",
                "Debian writes '127.0.1.1 <own name>' into /etc/hosts",
                fix="give the host's own IP address as coordinator, or take the line out of /etc/hosts",
            )
        )
    return ip, int(port)


def require_reachable_name(name: str) -> None:
    """gloo tells the other processes this host's own name as it resolves here: refuse one that leads back to this host.

    Raises:
        JobError: it does, or it does not resolve.
    """
    try:
        found = socket.gethostbyname(name)
    except OSError as error:
        raise JobError(
            message(
                f"this host's own name {name!r} cannot be resolved",
                str(error),
                "collectives between CPU processes announce it",
                fix=f"add a line '<its IP address> {name}' to /etc/hosts",
            )
        ) from error
    if ipaddress.ip_address(found).is_loopback:
        raise JobError(
            message(
                f"this host's own name {name!r} resolves to loopback ({found}), where other hosts cannot reach it",
                "collectives between CPU processes announce it; Debian writes '127.0.1.1 <own name>' into /etc/hosts",
                fix=f"replace that line in /etc/hosts by '<its IP address> {name}'",
            )
        )


@dataclass
class RollCall:
    """Process 0's side: a listening socket that belongs to this process alone.

    Args:
        ip, port: where to listen, and nowhere else.
        own: this process's report; the others are measured by it.
        key: the job's secret; reports signed otherwise are dropped.
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
        # REUSEADDR lets a restarted job take a port whose last connections linger; a port that is listened on stays refused.
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._listener.bind((self.ip, self.port))
            self._listener.listen(min(4096, 16 + self.own.count))
        except OSError as error:
            self._listener.close()
            raise JobError(_cannot_listen(self.ip, self.port, error)) from error
        self._listener.setblocking(False)

    def wait(self, timeout_s: float) -> None:
        """Until every process has reported and all fit.

        Raises:
            JobError: some do not fit, or did not come in time; the message names them. The others get the same message.
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
        """Tell everybody where jax's service is, and from now on turn late comers away."""
        self._answer({"service": service})
        text = message("the job has started without this process", f"{self.own.count} processes run", fix="wait until that job has ended")
        self._verdict = json.dumps({"problem": text}).encode() + b"\n"
        threading.Thread(target=self._refuse_late_comers, name="roll call", daemon=True).start()

    def close(self) -> None:
        """Give the port back."""
        self._is_over = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for late comers, which closes it

    def _take(self, peer: socket.socket, line: bytes) -> None:
        report = Report.from_line(line, self.key)
        if report is None:
            peer.close()
            return
        self._problem = self._problem or self._misfit(report)
        self._waiting[-1 - len(self._waiting) if self._problem else report.index] = (report, peer)

    def _misfit(self, report: Report) -> str | None:
        own = self.own
        if report.count != own.count:
            return message(
                "the processes disagree on their number",
                f"process {own.index} ({own.where}) says {own.count}, process {report.index} ({report.where}) says {report.count}",
                fix="start all of them with the same number of processes",
            )
        other = own if report.index == own.index else self._waiting[report.index][0] if report.index in self._waiting else None
        if other is not None or not 0 <= report.index < own.count:
            twice = "" if other is None else f" and {other.where}"
            what = f"process {report.index} reported twice" if other else f"there is no process {report.index} in a job of {own.count}"
            return message(what, f"from {report.where}{twice}", fix="give every process its own number from 0 on")
        for name in sorted({*own.versions, *report.versions}):
            ours, theirs = own.versions.get(name, "none"), report.versions.get(name, "none")
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
            fix="check that it was started and can reach that address; mesh.init(timeout_s=...) sets a longer timeout",
        )

    def _answer(self, verdict: Mapping[str, str]) -> None:
        line = json.dumps(verdict).encode() + b"\n"
        for _, peer in self._waiting.values():
            try:
                peer.settimeout(_PATIENCE_S)
                peer.sendall(line)
            except OSError:  # it is gone; its own end says why
                continue
            finally:
                peer.close()

    def _refuse_late_comers(self) -> None:
        assert self._verdict is not None
        with _Lines(self._listener) as lines:
            while not self._is_over:
                for peer, _ in lines.received(60.0):
                    try:
                        peer.settimeout(_PATIENCE_S)
                        peer.sendall(self._verdict)
                    except OSError:
                        continue
                    finally:
                        peer.close()
        self._listener.close()


class _Lines:
    """First lines of whoever connects; too many, too long or too slow ones are cut off."""

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
        """Connections whose first line is complete, with it; waits up to `timeout_s` for something to happen."""
        done: list[tuple[socket.socket, bytes]] = []
        for event, _ in self._selector.select(min(timeout_s, _PATIENCE_S) if self._partial else timeout_s):
            peer = cast("socket.socket", event.fileobj)
            if peer is self._listener:
                self._accept()
            else:
                line = self._read(peer)
                if line is not None:
                    done.append((peer, line))
        now = time.monotonic()
        for peer in [peer for peer, (_, since) in self._partial.items() if now - since > _PATIENCE_S]:
            self._drop(peer)
        return done

    def _accept(self) -> None:
        try:
            peer, _ = self._listener.accept()
        except OSError:  # gone before we looked, or no descriptors left: the next one may fare better
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
    """Report to process 0, and wait for its answer: the address of jax's service.

    Raises:
        JobError: process 0 cannot be reached or gives no answer in time, or says that the processes do not fit together.
    """
    deadline = time.monotonic() + timeout_s
    refusal = "no answer"
    while time.monotonic() < deadline:
        try:
            with socket.create_connection(address, timeout=min(_PATIENCE_S, timeout_s)) as connection:
                connection.sendall(own.to_line(key))
                connection.settimeout(max(0.1, deadline + _PATIENCE_S - time.monotonic()))  # process 0 names the absent first
                answer = _json_dict(_line_from(connection))
        except OSError as error:
            refusal = error.strerror or str(error)
            time.sleep(_RETRY_S)
            continue
        if isinstance(answer.get("problem"), str):
            raise JobError(answer["problem"])
        if isinstance(answer.get("service"), str):
            return answer["service"]
        refusal = "it hung up: another job's process, or another program, listens there"
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
            fix=f"choose another port, e.g. {port + 10}, or end the other program (ss -ltnp shows it)",
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return message(
            f"{ip} is not an address of this host, where process 0 runs",
            f"process 0 must listen on {ip}:{port}",
            fix="give the address of the host that runs process 0, or start process 0 there",
        )
    return message(f"process 0 cannot listen on {ip}:{port}", error.strerror or str(error), fix="choose another address or port")
