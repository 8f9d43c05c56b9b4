"""Measures every policy with one worker behind a slow link, beside the simulator's prediction.

    python -m benchmarks.slow_link.measure [POLICY...]

Needs root, ip, unshare, nsenter and /dev/net/tun: each rank is a host of its own, a network namespace of this machine.
Prints the table of the README beside this file.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.network.hosts import missing
from tests.network.jobs import Setting

POLICIES = ("bsp", "bsp:1", "asp", "ssp:3", "ssp:15", "ssp-cached:3", "dssp:3:15", "dssp:3:15:paper")


def main() -> None:
    """Prints a row for each policy."""
    if problem := missing():
        sys.exit(f"no hosts can be made here: {problem}")
    setting = Setting()
    print("| policy | gradients/s | predicted | off | waiting | predicted | gap mean | predicted |")
    print("| --- |" + " ---: |" * 7)
    with setting.hosts() as hosts, tempfile.TemporaryDirectory() as folder:
        for label in sys.argv[1:] or POLICIES:
            real, played = setting.measure(label, hosts, Path(folder)), setting.predict(label)
            off = real.gradients_per_second / played.gradients_per_second - 1
            rates = f"{real.gradients_per_second:.2f} | {played.gradients_per_second:.2f} | {100 * off:+.1f}%"
            waits = f"{100 * real.wait_share:.0f}% | {100 * played.wait_share:.0f}%"
            gaps = f"{real.gap_mean:.1f} | {played.gap_mean:.1f}"
            print(f"| `{label}` | {rates} | {waits} | {gaps} |", flush=True)


if __name__ == "__main__":
    main()
