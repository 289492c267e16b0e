"""A network link with a delay between two network namespaces, for kernels without netem.

    python benchmarks/slow_link.py slow fault-a fault-b 0.05      # 50 ms each way, until it is killed

Each namespace gets a TUN device of that name. Traffic that is routed over it is delayed.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import select
import struct
import sys
import time

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000
_LARGEST = 65_536  # maximum packet size, in bytes


def opened(device: str, namespace: str) -> int:
    """Create a TUN device in `namespace`, and return its file descriptor. Each read or write is one packet."""
    with open(f"/var/run/netns/{namespace}", encoding="utf-8") as entered:
        if ctypes.CDLL(None, use_errno=True).setns(entered.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), namespace)
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)  # the device belongs to the current namespace of the process
    fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH", device.encode(), _IFF_TUN | _IFF_NO_PI))
    return end


def carry(ends: tuple[int, int], delay_s: float) -> None:
    """Forward packets from each end to the other in order, after `delay_s` seconds. Does not return."""
    other = dict(zip(ends, reversed(ends), strict=True))
    in_flight: list[tuple[float, int, int, bytes]] = []
    count = 0
    while True:
        wait_s = max(0.0, in_flight[0][0] - time.monotonic()) if in_flight else None
        for end in select.select(ends, (), (), wait_s)[0]:
            heapq.heappush(in_flight, (time.monotonic() + delay_s, count, other[end], os.read(end, _LARGEST)))
            count += 1
        while in_flight and in_flight[0][0] <= time.monotonic():
            _, _, end, packet = heapq.heappop(in_flight)
            os.write(end, packet)


def main(device: str, first: str, second: str, delay_s: str) -> None:
    ends = opened(device, first), opened(device, second)
    print("ready", flush=True)
    carry(ends, float(delay_s))


if __name__ == "__main__":
    main(*sys.argv[1:])
