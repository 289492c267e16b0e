"""A slow cable between two network namespaces: what enters one end leaves the other some time later.

    python benchmarks/slow_link.py slow fault-a fault-b 0.05      # 50 ms each way, until it is killed

Each namespace gets a network device of that name (a TUN device); whoever wants the delay routes over it. For kernels without netem.
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
_LARGEST = 65_536  # bytes of a packet


def opened(device: str, namespace: str) -> int:
    """The near end of a new device in `namespace`, as a file: one packet for each read and write."""
    with open(f"/var/run/netns/{namespace}", encoding="utf-8") as entered:
        if ctypes.CDLL(None, use_errno=True).setns(entered.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), namespace)
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)  # it belongs to the namespace that this process is in
    fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH", device.encode(), _IFF_TUN | _IFF_NO_PI))
    return end


def carry(ends: tuple[int, int], delay_s: float) -> None:
    """Packets from each end to the other, in order, `delay_s` later; for ever."""
    other = dict(zip(ends, reversed(ends), strict=True))
    under_way: list[tuple[float, int, int, bytes]] = []
    count = 0
    while True:
        wait_s = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        for end in select.select(ends, (), (), wait_s)[0]:
            heapq.heappush(under_way, (time.monotonic() + delay_s, count, other[end], os.read(end, _LARGEST)))
            count += 1
        while under_way and under_way[0][0] <= time.monotonic():
            _, _, end, packet = heapq.heappop(under_way)
            os.write(end, packet)


def main(device: str, first: str, second: str, delay_s: str) -> None:
    ends = opened(device, first), opened(device, second)
    print("ready", flush=True)
    carry(ends, float(delay_s))


if __name__ == "__main__":
    main(*sys.argv[1:])
