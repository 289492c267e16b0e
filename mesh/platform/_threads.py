"""XLA:CPU's threads: enough of them for programs on many virtual devices.

Note [Threads of XLA:CPU]
A CPU client has one pool of max(cores, devices) threads, on which programs are both launched and executed. At a collective each
device waits in a thread for the others. Up to 32 programs may be in flight: if those that wait hold every thread, none is left for
the device that they wait for, and after 40 s XLA ends the process (jax's own loops too: 300 dot products with an all-reduce on 8
devices of a machine with 2 cores). With four threads for each device three threads may dispatch at once. `PJRT_NPROC` is read
when the client is created; a larger value set by the user is kept.
"""

from __future__ import annotations

import os
import re

_PER_DEVICE = 4
_VARIABLE = "PJRT_NPROC"


def provide_threads(num_devices: int) -> None:
    """Make the CPU client that is created next start enough threads for `num_devices` devices of this process."""
    if num_devices > 1 and not has_threads(num_devices):
        os.environ[_VARIABLE] = str(_PER_DEVICE * num_devices)


def has_threads(num_devices: int) -> bool:
    """Whether `PJRT_NPROC` already gives a new client enough threads for `num_devices` devices."""
    given = os.environ.get(_VARIABLE, "")
    return given.isdecimal() and int(given) >= _PER_DEVICE * num_devices


def count_in_flags() -> int:
    """Number of CPU devices that `XLA_FLAGS` asks for; 1 if it does not say."""
    found = re.findall(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    return int(found[-1]) if found else 1
