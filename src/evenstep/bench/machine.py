"""What a figure was measured on: printed beside every benchmark, as none means anything without it."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

__all__ = ["as_line", "describe_machine"]


def describe_machine(*packages: str) -> dict[str, str | int]:
    """Processor, usable cores and versions of Python, numpy, torch, torchdata and ``packages``."""
    versions = {"python": platform.python_version()}
    for name in ("numpy", "torch", "torchdata", *packages):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    return {"processor": _processor(), "cores": len(_usable_cores()), **versions}


def as_line(machine: dict[str, str | int]) -> str:
    """``machine`` in one line of text."""
    rest = (f"{key} {value}" for key, value in machine.items() if key not in ("processor", "cores"))
    return ", ".join([f"{machine['processor']}, {machine['cores']} usable cores", *rest])


def _usable_cores() -> range | set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return range(os.cpu_count() or 1)


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
