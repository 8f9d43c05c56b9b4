"""Judges the GPUs of this node, and what of them torch can use."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch

from stalempi.bench.diagnose.finding import Finding, fail, ok
from stalempi.bench.diagnose.probe import ask

__all__ = ["judge_gpus"]


def judge_gpus(environment: Mapping[str, str]) -> tuple[Finding, bool]:
    """Says whether torch can use the GPUs of this node, and else why not; returns whether it can."""
    there = _count()
    if not there:
        return ok("GPUs", "none on this node: ranks compute on the CPU"), False
    if torch.version.cuda is None and torch.version.hip is None:
        return fail("GPUs", f"{there} here, but torch is built without CUDA", "install a torch with CUDA"), False
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        words = [word.strip() for word in visible.split(",") if word.strip()]
        wrong = [word for word in words if word.isdigit() and int(word) >= there]
        if wrong:
            said = f"CUDA_VISIBLE_DEVICES={visible}: GPU {wrong[0]} is not among the {there} of this node"
            return fail("GPUs", said, f"name 0 to {there - 1}, or unset it"), False
        if words in ([], ["-1"]):
            said = f"CUDA_VISIBLE_DEVICES={visible!r} hides all {there} GPUs of this node"
            return fail("GPUs", said, "unset it; the CPU on purpose is --device cpu"), False
    asked = ask([Path(__file__).with_name("ask_gpu.py")], timeout=60)
    usable = asked.facts.get("names", [])
    if not usable:
        said = f"{there} here, but torch can use none: {asked.last_words if asked.code else 'it gives no reason'}"
        cure = "compare nvidia-smi's CUDA version with torch's: the driver may be too old"
        return fail("GPUs", said, cure), False
    return ok("GPUs", f"{len(usable)} of {there} to be used: {', '.join(usable)}"), True


def _count() -> int:
    """Returns how many GPUs the driver has."""
    answer = ask(["nvidia-smi", "-L"], timeout=20) if shutil.which("nvidia-smi") else None
    there = len(re.findall(r"^GPU \d+:", answer.out, re.MULTILINE)) if answer else 0
    return there or len(list(Path("/dev").glob("nvidia[0-9]*")))
