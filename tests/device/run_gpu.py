"""Checks that need an accelerator: correctness, overlap, host syncs and memory of the way to the device.

Run by hand, in under four minutes on one device::

    python tests/device/run_gpu.py [--device cuda]

Prints a table and exits with 0 if every check held; without an accelerator it says so and exits with 0.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torchdata.nodes import BaseNode

from evenstep.comm.simulated import SimulatedCommunicator, SimulatedGroup
from evenstep.cursor import Cursor
from evenstep.device import streams_of
from evenstep.nodes.device_prefetch import DevicePrefetch
from evenstep.nodes.host_prefetch import HostPrefetch
from evenstep.nodes.model_broadcast import ModelBroadcast
from evenstep.nodes.pin_memory import PinMemory
from evenstep.samples import BatchInfo

MIB = 1 << 20
Row = tuple[str, bool, str]


class Pair(NamedTuple):
    x: Any
    note: str


@dataclass(frozen=True, slots=True)
class Plane:
    model: SimulatedCommunicator
    is_constructor: bool
    assists: bool = False


class Source(BaseNode[Any]):
    """``size`` batches of ``nbytes`` bytes each, filled with their position."""

    def __init__(self, size: int, nbytes: int = 4 * MIB) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.size, self.nbytes = size, nbytes
        self.at = Cursor(global_batch_size=1)

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        self.at = self.at.next_epoch() if initial_state is None else Cursor.from_dict(initial_state)

    def next(self) -> Any:
        position = self.at.consumed_samples
        if position >= self.size:
            raise StopIteration
        self.at = Cursor(epoch=self.at.epoch, consumed_samples=position + 1, global_batch_size=1)
        return self.make(position)

    def make(self, position: int) -> Any:
        return {
            "ids": torch.full((self.nbytes // 8,), position),
            "pair": Pair(torch.full((3, 2), position, dtype=torch.bfloat16).T, "n"),
            "lengths": torch.tensor([position], dtype=torch.int32),
            "empty": torch.empty(0, 4),
            "info": BatchInfo(position, 0, 1, True, 1, 1, 0, None, None),
        }

    def get_state(self) -> dict[str, Any]:
        return self.at.to_dict()


class Resident(Source):
    """Batches that lie in pinned memory already: nothing but the copy is left to measure."""

    def __init__(self, size: int, nbytes: int) -> None:
        super().__init__(size, nbytes)
        self.pinned = [torch.full((nbytes // 8,), i).pin_memory() for i in range(4)]

    def make(self, position: int) -> Any:
        return {"ids": self.pinned[position % 4]}


class Accelerator:
    """The device under test and what the checks need of its module."""

    def __init__(self, name: str) -> None:
        self.module: Any = torch.get_device_module(name)
        self.device = torch.device(name, self.module.current_device())
        streams_of(self.device)

    def sync(self) -> None:
        self.module.synchronize()

    def busy(self, seconds: float) -> Callable[[], None]:
        """A launch of kernels that keep the device busy for about ``seconds``."""
        a = torch.randn(2048, 2048, device=self.device)
        out = torch.empty_like(a)

        def launch(times: int) -> float:
            self.sync()
            begin = time.perf_counter()
            for _ in range(times):
                torch.mm(a, a, out=out)
            self.sync()
            return time.perf_counter() - begin

        launch(10)
        times = max(1, round(seconds * 50 / launch(50)))

        def run() -> None:
            for _ in range(times):
                torch.mm(a, a, out=out)

        return run


def correctness(acc: Accelerator) -> Iterator[Row]:
    for depth in (0, 1, 3):
        source = HostPrefetch(PinMemory(Source(20), acc.device, cpu_fields=("lengths",)), 2)
        node = DevicePrefetch(source, acc.device, depth, cpu_fields=("lengths",))
        kept, ok, work = [], True, acc.busy(0.002)
        for position, batch in enumerate(node):
            work()
            ok &= batch["ids"].device == acc.device and isinstance(batch["pair"], Pair)
            ok &= batch["lengths"].device.type == "cpu" and node.last_host_batch["ids"].is_pinned()
            kept.append((position, batch["ids"] * 1, batch))
        ok &= len(kept) == 20
        for position, product, batch in kept:  # kept batches stay valid, whatever was copied since
            for tensor in (product, batch["ids"], batch["pair"].x):
                ok &= bool((tensor == position).all())
        node.close()
        source.close()
        yield f"values, types and kept batches, depth {depth}", ok, "20 batches of 4 MiB"


def broadcast(acc: Accelerator) -> Iterator[Row]:
    for through, where in ((acc.device, "on the device"), (torch.device("cpu"), "through the host")):
        group = SimulatedGroup((0, 1, 2), timeout=60)
        got: dict[int, list[Any]] = {}

        def rank(
            number: int,
            group: SimulatedGroup = group,
            through: torch.device = through,
            got: dict[int, list[Any]] = got,
        ) -> None:
            acc.module.set_device(acc.device)
            communicator = group.communicator(number)
            communicator.device = through
            source: BaseNode[Any] = Source(6)
            if number == 0:
                source = DevicePrefetch(PinMemory(source, acc.device), acc.device, cpu_fields=("lengths",))
            got[number] = list(ModelBroadcast(source, Plane(communicator, number == 0)))

        threads = [threading.Thread(target=rank, args=(number,), daemon=True) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        acc.sync()
        ok = sorted(got) == [0, 1, 2]
        for batches in got.values():
            ok &= len(batches) == 6
            for position, batch in enumerate(batches):
                ok &= batch["ids"].device == acc.device and batch["lengths"].device.type == "cpu"
                ok &= bool((batch["ids"] == position).all()) and bool((batch["pair"].x == position).all())
                ok &= batch["info"].step == position and batch["empty"].shape == (0, 4)
        yield f"broadcast {where}", ok, "3 ranks, 6 batches"


def overlap(acc: Accelerator) -> Iterator[Row]:
    nbytes, steps = 256 * MIB, 20

    def run(depth: int, compute: Callable[[], None] | None) -> float:
        node = DevicePrefetch(Resident(steps, nbytes), acc.device, depth)
        acc.sync()
        begin = time.perf_counter()
        for _ in node:
            if compute is not None:
                compute()
        acc.sync()
        seconds = time.perf_counter() - begin
        node.close()
        return seconds / steps

    run(1, None)
    copy = run(1, None)
    work = acc.busy(2 * copy)
    acc.sync()
    begin = time.perf_counter()
    for _ in range(steps):
        work()
    acc.sync()
    alone = (time.perf_counter() - begin) / steps
    ahead, serial = run(1, work), run(0, work)
    hidden = 1 - (ahead - alone) / copy
    told = f"copy {copy * 1e3:.2f} ms, compute {alone * 1e3:.2f} ms, together {ahead * 1e3:.2f} ms, depth 0 {serial * 1e3:.2f} ms"
    yield "copy hidden behind compute (over 80%)", hidden > 0.8, f"{hidden:.0%}: {told}"


def host_syncs(acc: Accelerator) -> Iterator[Row]:
    from torch.profiler import ProfilerActivity, profile

    node = DevicePrefetch(HostPrefetch(PinMemory(Source(60), acc.device), 4), acc.device, 1)
    work = acc.busy(0.005)
    for _ in range(10):  # streams and memory exist from here on
        next(node)
        work()
    time.sleep(0.2)  # the host batches are there
    waits = []
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(4):
            begin = time.perf_counter()
            batch = next(node)
            waits.append(time.perf_counter() - begin)
            work()
    found = sorted(
        {e.key for e in profiler.key_averages() if "ynchronize" in e.key and "Device" not in e.key}
    )
    acc.sync()
    del batch
    told = (
        f"{found or 'none'}; next() takes {sorted(waits)[2] * 1e6:.0f} us with 5 ms of work queued per step"
    )
    yield "no sync in next()", not found and sorted(waits)[2] < 0.003, told
    node.close()


def memory(acc: Accelerator) -> Iterator[Row]:
    nbytes = 32 * MIB
    for title, busy in (("host far ahead of the device", 0.004), ("device faster than the host", 0.0)):
        work = acc.busy(busy) if busy else lambda: None
        acc.sync()
        before = acc.module.memory_allocated(acc.device), acc.module.memory_reserved(acc.device)
        node = DevicePrefetch(Resident(1000, nbytes), acc.device, 1)
        peaks = []
        for position, batch in enumerate(node):
            batch["ids"].add_(0)
            work()
            if position % 100 == 99:
                peaks.append((acc.module.memory_reserved(acc.device) - before[1]) / nbytes)
        acc.sync()
        del batch
        node.close()
        left = acc.module.memory_allocated(acc.device) - before[0]
        ok = max(peaks) <= 4 and peaks[-1] <= peaks[0] and left < nbytes
        yield (
            f"memory flat over 1,000 batches, {title}",
            ok,
            f"at most {max(peaks):.1f} batches, {left / MIB:.0f} MiB left",
        )


def main() -> int:
    """Run every check."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", help="type of the accelerator (cuda, npu, xpu)")
    name = parser.parse_args().device
    try:
        available = torch.get_device_module(name).is_available()
    except (AttributeError, RuntimeError):
        available = False
    if not available:
        print(f"skipped: this machine has no {name} device, or this build of torch cannot use it")
        return 0
    acc = Accelerator(name)
    rows: list[Row] = []
    begin = time.perf_counter()
    for check in (correctness, broadcast, overlap, host_syncs, memory):
        try:
            rows.extend(check(acc))
        except Exception as error:
            rows.append((check.__name__, False, f"{type(error).__name__}: {error}"))
    print(
        f"torch {torch.__version__}, {acc.module.get_device_name(acc.device)}, {time.perf_counter() - begin:.0f} s"
    )
    width = max(len(title) for title, _, _ in rows)
    for title, ok, told in rows:
        print(f"{'ok  ' if ok else 'FAIL'}  {title:<{width}}  {told}")
    return 0 if all(ok for _, ok, _ in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
