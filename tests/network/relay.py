"""Is a slow cable: carries frames between two TAP devices, late, at a limited rate, and loses some.

    python relay.py HUB_DEVICE HOST_DEVICE DELAY_S BYTES_PER_S LOSS

Makes both devices, prints "ready" and runs until it is killed; a device stays this process's own when it is moved to
another network namespace. In user space, since not every kernel has netem; at a real-time priority where that is
allowed, since a late relay is a slower link.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import select
import struct
import sys
import time
from collections import deque

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
FRAME = 65536
QUEUE = 4 << 20  # bytes that wait at most in each direction; then frames are lost, as in a switch


def open_tap(name: str) -> int:
    """Makes a TAP device and returns the file that its frames come from and go to."""
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TAP | IFF_NO_PI))
    return file


class Direction:
    """Frames on their way from one device to another."""

    def __init__(self, source: int, target: int, delay: float, rate: float, loss: float) -> None:
        self.source, self._target = source, target
        self._delay, self._rate, self._loss = delay, rate, loss
        self._queue: deque[tuple[float, bytes]] = deque()
        self._free = 0.0
        self._draw = random.Random(1)

    def take(self, now: float) -> None:
        """Reads what has come and notes when it will arrive."""
        with contextlib.suppress(BlockingIOError):
            while True:
                frame = os.read(self.source, FRAME)
                begin = max(self._free, now)
                if self._draw.random() < self._loss or (begin - now) * self._rate > QUEUE:
                    continue
                self._free = begin + len(frame) / self._rate
                self._queue.append((self._free + self._delay, frame))

    def deliver(self, now: float) -> float:
        """Writes what is due and returns the seconds until something is again, at most 1."""
        while self._queue and self._queue[0][0] <= now:
            with contextlib.suppress(OSError):  # a device that is down, or full, loses frames
                os.write(self._target, self._queue[0][1])
            self._queue.popleft()
        return min(1.0, self._queue[0][0] - now) if self._queue else 1.0


def main() -> None:
    """Carries frames for ever."""
    hub, host = open_tap(sys.argv[1]), open_tap(sys.argv[2])
    delay, rate, loss = (float(word) for word in sys.argv[3:6])
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(10))
    ways = [Direction(hub, host, delay, rate, loss), Direction(host, hub, delay, rate, loss)]
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while True:
        wait = min(way.deliver(time.monotonic()) for way in ways)
        ready, _, _ = select.select([way.source for way in ways], [], [], max(0.0, wait))
        now = time.monotonic()
        for way in ways:
            if way.source in ready:
                way.take(now)


if __name__ == "__main__":
    main()
