"""Every line of the script for accelerators runs here, on a CPU that claims to be one; what it measures means nothing."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
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
from evenstep.nodes.context_shard import ContextShard
from evenstep.nodes.device_prefetch import DevicePrefetch

SCRIPT = Path(__file__).with_name("run_gpu.py")
CPU = torch.device("cpu")


def call(name: str) -> None:
    """Leave a call of the device's runtime in the profile."""
    with torch.profiler.record_function(name):
        pass


class Event:
    def record(self, _: Any) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        call("rehearsedEventSynchronize")


class Stream:
    def __init__(self, device: Any = None) -> None:
        self.device = device

    def wait_event(self, _: Any) -> None:
        pass

    def synchronize(self) -> None:
        call("rehearsedStreamSynchronize")


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
        if name in ("set_device", "set_sync_debug_mode", "empty_cache"):
            return lambda *_: None
        if name in ("memory_allocated", "memory_reserved"):
            return lambda _: 0
        if name == "get_device_name":
            return lambda _: "a rehearsal"
        raise AttributeError(name)

    def is_available(self) -> bool:
        return True

    def synchronize(self) -> None:
        call("rehearsedDeviceSynchronize")

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


Run = Callable[..., dict[str, tuple[bool, str]]]


@pytest.fixture
def run(script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the checks that are named, or all; the rows by their titles: whether they hold, and what they tell."""

    def rehearse(*only: str) -> dict[str, tuple[bool, str]]:
        monkeypatch.setattr(
            sys, "argv", ["run_gpu.py", "--device", "cpu", *(["--only", *only] if only else [])]
        )
        script.main()
        out = capsys.readouterr().out
        assert "Error" not in out
        rows = [line for line in out.splitlines() if line[:6] in ("ok    ", "FAIL  ")]
        parts = [(line[6:].split("  ")[0], line.startswith("ok"), line) for line in rows]
        return {title: (ok, line) for title, ok, line in parts}

    return rehearse


def test_every_check_runs_to_its_end(run: Run) -> None:
    rows = run()
    assert len(rows) == 18, rows
    timings = (
        "copy hidden",
        "next() returns at once",
        "the loader, collectives=",
    )  # no device, nothing to see
    wrong = {title: row for title, row in rows.items() if not row[0] and not title.startswith(timings)}
    assert wrong == {}


SIGHT, NEXT = "the profiler sees syncs", "no sync in next()"
LOADER = [f"no sync in the loader, collectives={way!r}" for way in ("producer", "caller")]


def failed(rows: dict[str, tuple[bool, str]]) -> list[str]:
    return [title for title, (ok, _) in rows.items() if not ok and "sync" in title]


def waits_for_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    real = DevicePrefetch.produce

    def produce(self: DevicePrefetch) -> Any:
        batch = real(self)
        self.wait_for_prefetch()
        return batch

    monkeypatch.setattr(DevicePrefetch, "produce", produce)


def waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ContextShard.produce

    def produce(self: ContextShard) -> Any:
        torch.get_device_module("cpu").synchronize()
        return real(self)

    monkeypatch.setattr(ContextShard, "produce", produce)


def is_blind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stream, "synchronize", lambda _: None)


def profiles_with_syncs_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for CUDA, where the profiler waits for the device as it starts and as it stops."""
    profile = torch.profiler.profile
    start, stop = profile.start, profile.stop

    def started(self: Any) -> None:
        start(self)
        call("cudaDeviceSynchronize")

    def stopped(self: Any) -> None:
        call("cudaDeviceSynchronize")
        stop(self)

    monkeypatch.setattr(profile, "start", started)
    monkeypatch.setattr(profile, "stop", stopped)


@pytest.mark.parametrize(
    ("plant", "expected"),
    [
        (profiles_with_syncs_of_its_own, []),
        (waits_for_an_event, [NEXT, *LOADER]),
        (waits_for_the_device, LOADER),
        (is_blind, [SIGHT]),
    ],
)
def test_planted_syncs_are_seen(
    plant: Callable[[pytest.MonkeyPatch], None],
    expected: list[str],
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
    assert failed(run("host_syncs", "loader_syncs")) == expected


def test_without_a_profiler_for_the_device_the_rows_say_so(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evenstep.testing.accelerator, "_activity", lambda _: None)
    rows = run("host_syncs", "loader_syncs")
    for title in (SIGHT, NEXT, *LOADER):
        assert rows[title][0]
        assert rows[title][1].endswith("  not run: torch.profiler records nothing of cpu")


def test_looking_for_syncs_that_cannot_be_seen_is_refused(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evenstep.testing.accelerator, "_activity", lambda _: None)
    message = "torch.profiler records nothing of cpu devices: look at sees_syncs first"
    with pytest.raises(ValueError, match=f"^{message}$"):
        script.Accelerator("cpu").syncs_in(lambda: None)
