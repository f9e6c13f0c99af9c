"""Every line of the script for accelerators runs here, on a CPU that claims to be one; what it measures means nothing."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import evenstep.build
import evenstep.comm.batch_tensors
import evenstep.device.streams
import evenstep.nodes.caller_prefetch
import evenstep.nodes.device_prefetch
import evenstep.nodes.model_broadcast
import evenstep.nodes.pin_memory
import evenstep.testing.accelerator

SCRIPT = Path(__file__).with_name("run_gpu.py")
CPU = torch.device("cpu")


class Event:
    def record(self, _: Any) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class Stream:
    def __init__(self, device: Any = None) -> None:
        self.device = device

    def wait_event(self, _: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


class Context:
    def __init__(self, _: Any) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


class Module:
    """What the script and `evenstep.device` ask of `torch.cuda`, over the CPU."""

    Stream, Event, stream, device = Stream, Event, Context, Context

    def __getattr__(self, name: str) -> Any:
        if name in ("synchronize", "set_device", "set_sync_debug_mode", "empty_cache"):
            return lambda *_: None
        if name in ("memory_allocated", "memory_reserved"):
            return lambda _: 0
        if name == "get_device_name":
            return lambda _: "a rehearsal"
        raise AttributeError(name)

    def is_available(self) -> bool:
        return True

    def current_device(self) -> None:
        return None  # a tensor on the CPU has no index

    def current_stream(self, _: Any) -> Any:
        return self.Stream()


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, pins_without_device: None) -> ModuleType:
    module = Module()
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    for user in (
        evenstep.device.streams,
        evenstep.nodes.device_prefetch,
        evenstep.nodes.caller_prefetch,
        evenstep.nodes.model_broadcast,
        evenstep.nodes.pin_memory,
    ):
        monkeypatch.setattr(user, "is_accelerator", lambda _: True)
    spec = importlib.util.spec_from_file_location("run_gpu", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "run_gpu", loaded)
    spec.loader.exec_module(loaded)
    for name, small in (("MIB", 1 << 12), ("STEPS", 200)):
        monkeypatch.setattr(loaded, name, small)
    monkeypatch.setattr(evenstep.testing.accelerator, "SIZE", 128)
    monkeypatch.setattr(loaded.faulthandler, "dump_traceback_later", lambda *_, **__: None)
    return loaded


def test_every_check_runs_to_its_end(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["run_gpu.py", "--device", "cpu"])
    script.main()
    out = capsys.readouterr().out
    rows = [line for line in out.splitlines() if line[:6] in ("ok    ", "FAIL  ")]
    assert len(rows) == 13, out
    timings = ("copy hidden", "no sync in next()", "next() returns at once")  # no device, nothing to see
    wrong = [row for row in rows if row.startswith("FAIL") and not row[6:].startswith(timings)]
    assert wrong == [], out
    assert "Error" not in out
