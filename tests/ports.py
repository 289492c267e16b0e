"""Ports for tests that must name one before anybody listens there: no other test, in any process, gets the same."""

from __future__ import annotations

import atexit
import random
import socket

# Below the range from which systems hand out ports; a job takes the port and the next one.
_CANDIDATES = range(20_000, 30_000, 2)
_rng = random.Random()


def reserve_port() -> int:
    """An even port, free on 127.0.0.1 like the one after it, that is this process's as long as it lives.

    A socket bound to the port on another address of the loopback, which nobody asks, is the reservation.
    """
    for port in _rng.sample(_CANDIDATES, len(_CANDIDATES)):
        reservation = socket.socket()
        try:
            reservation.bind(("127.0.0.2", port))
            for number in (port, port + 1):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", number))
        except OSError:
            reservation.close()
            continue
        atexit.register(reservation.close)
        return port
    raise RuntimeError(f"no free port among {_CANDIDATES}")
