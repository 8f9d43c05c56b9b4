"""Makes several hosts of one machine: network namespaces with addresses and names of their own, joined by a bridge."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

__all__ = ["Cable", "Hosts", "missing"]

_RELAY = Path(__file__).with_name("relay.py")
_ROUTE = "initcwnd 1000 initrwnd 1000"  # a window of many frames at once: what is measured is the link, not slow start
_AGENT = """#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done  # options of ssh
host=$1
shift
case "$host" in
{cases}
esac
echo "no host $host" >&2
exit 255
"""


@dataclass(frozen=True)
class Cable:
    """How a host is joined to the bridge.

    Attributes:
        delay: seconds that a frame travels, each way.
        rate: bytes per second, each way.
        loss: share of the frames that are lost, each way.
    """

    delay: float = 0.0
    rate: float = 1e12
    loss: float = 0.0

    @property
    def is_plain(self) -> bool:
        """Returns whether this is just a cable."""
        return self == Cable()


def missing() -> str | None:
    """Returns why there can be no hosts here; None if there can."""
    for tool in ("ip", "unshare", "nsenter", "sysctl"):
        if not shutil.which(tool):
            return f"no {tool}"
    if not os.access("/dev/net/tun", os.W_OK):
        return "/dev/net/tun cannot be used"
    if subprocess.run(
        ["unshare", "-num", "ip", "link", "add", "type", "bridge"], capture_output=True, check=False
    ).returncode:
        return "no right to make network namespaces"
    return None


class Hosts:
    """Hosts named n0, n1, ... with the addresses 10.77.0.1, ...; they go when this is closed.

    Args:
        cables: how each is joined to the others.
    """

    def __init__(self, cables: Sequence[Cable]) -> None:
        self.names = [f"n{number}" for number in range(len(cables))]
        self._stack = ExitStack()
        self._pids: dict[str, int] = {}
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        lines = [f"10.77.0.{number} {name}" for number, name in enumerate(self.names, start=1)]
        (self._folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines]) + "\n")
        try:
            self._hub = self._hold("hub")
            self._in(self._hub, "ip link add bridge mtu 9000 type bridge", "ip link set bridge up")
            for number, cable in enumerate(cables):
                self._add(number, cable)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Ends the processes that hold the namespaces; with them go devices and addresses."""
        self._stack.close()

    def enter(self, name: str) -> list[str]:
        """Returns the words before a command that is to run on a host; it begins in the folder /."""
        return ["nsenter", "-t", str(self._pids[name]), "-n", "-u", "-m", "--"]

    def agent(self) -> Path:
        """Writes what mpirun calls in place of ssh: a script that takes a host and a command."""
        cases = "\n".join(f'    {name}) exec {" ".join(self.enter(name))} sh -c "$*" ;;' for name in self.names)
        path = self._folder / "agent"
        path.write_text(_AGENT.format(cases=cases))
        path.chmod(0o755)
        return path

    def _add(self, number: int, cable: Cable) -> None:
        name = self.names[number]
        host = self._pids[name] = self._hold(name)
        if cable.is_plain:
            self._in(self._hub, f"ip link add {name} type veth peer name eth0 netns {host}")
        else:
            words = ["nsenter", "-t", str(self._hub), "-n", "--", sys.executable, str(_RELAY), name, f"{name}far"]
            relay = self._start([*words, str(cable.delay), str(cable.rate), str(cable.loss)])
            assert relay.stdout is not None
            assert relay.stdout.readline() == "ready\n", "the relay did not start"
            self._in(self._hub, f"ip link set {name}far netns {host} name eth0")
        self._in(self._hub, f"ip link set {name} mtu 9000 master bridge up")
        self._in(
            host,
            "ip link set lo up",
            f"ip addr add 10.77.0.{number + 1}/24 dev eth0",
            "ip link set eth0 mtu 9000 up",
            f"ip route change 10.77.0.0/24 dev eth0 {_ROUTE}",
            "sysctl -q -w net.ipv4.tcp_slow_start_after_idle=0",
        )

    def _hold(self, name: str) -> int:
        """Starts a process that keeps the namespaces of a host, and returns its id."""
        script = f"mount --bind {self._folder}/hosts /etc/hosts && hostname {name} && echo ready && exec sleep infinity"
        holder = self._start(["unshare", "-n", "-u", "-m", "sh", "-c", script])
        assert holder.stdout is not None
        assert holder.stdout.readline() == "ready\n", "no namespace"
        return holder.pid

    def _start(self, command: Sequence[str]) -> subprocess.Popen[str]:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
        self._stack.callback(_end, process)
        return process

    @staticmethod
    def _in(pid: int, *commands: str) -> None:
        for command in commands:
            subprocess.run(["nsenter", "-t", str(pid), "-n", "--", *command.split()], check=True, timeout=20)


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    if process.stdout:
        process.stdout.close()
