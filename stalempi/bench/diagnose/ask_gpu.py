"""Asks torch for the GPUs that it can use, in a process of its own: a sick driver hangs or crashes.

python ask_gpu.py
"""

from __future__ import annotations

import json
import sys

import torch


def main() -> None:
    """Prints one JSON object, once each GPU has computed something."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = []
    for number in range(count):
        torch.ones(8, device=f"cuda:{number}").sum().item()
        names.append(torch.cuda.get_device_name(number))
    sys.stdout.write(json.dumps({"names": names}) + "\n")


if __name__ == "__main__":
    main()
