"""Checks that need an accelerator: correctness, overlap, host syncs and memory of the way to the device.

Run by hand, in under four minutes on one device (it ends itself, with the stacks of its threads, if it takes longer)::

    PYTHONPATH=src python tests/device/run_gpu.py [--device cuda] [--only NAME ...]

Prints a table and exits with 0 if every check held; without an accelerator it says so and exits with 0.
``test_rehearsal.py`` runs every line of it on the CPU.
"""

from __future__ import annotations

import argparse
import faulthandler
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torchdata.nodes import BaseNode

from evenstep import LoaderConfig, Shard, StepSampler, build_loader, collate_varlen
from evenstep.comm.process_group import ProcessGroupCommunicator
from evenstep.comm.simulated import SimulatedCommunicator, SimulatedGroup
from evenstep.nodes.device_prefetch import DevicePrefetch
from evenstep.nodes.host_prefetch import HostPrefetch
from evenstep.nodes.model_broadcast import ModelBroadcast
from evenstep.nodes.pin_memory import PinMemory
from evenstep.samples import BatchInfo
from evenstep.testing.accelerator import Accelerator
from evenstep.testing.positions import Positions

MIB = 1 << 20
STEPS = 1000  # batches over which memory must stay flat
LIMIT = 230  # seconds for all of it
BACKENDS = {"cuda": "nccl", "npu": "hccl", "xpu": "xccl"}
Row = tuple[str, bool, str]


class Pair(NamedTuple):
    x: Any
    note: str


@dataclass(frozen=True, slots=True)
class Plane:
    model: SimulatedCommunicator
    is_constructor: bool
    assists: bool = False


def source(size: int, nbytes: int = 4 * MIB) -> Positions:
    """``size`` batches of ``nbytes`` bytes each, filled with their position."""

    def make(at: tuple[int, int]) -> dict[str, Any]:
        position = at[1]
        return {
            "ids": torch.full((nbytes // 8,), position),
            "pair": Pair(torch.full((3, 2), position, dtype=torch.bfloat16).T, "n"),
            "lengths": torch.tensor([position], dtype=torch.int32),
            "repeated": torch.full((5,), position).expand(3, 5),  # as position_ids often are
            "gaps": torch.full((3, 4), position)[:, ::2],
            "empty": torch.empty(0, 4),
            "info": BatchInfo(position, 0, 1, True, 1, 1, 0, None, None),
        }

    return Positions(make, size)


def resident(size: int, nbytes: int) -> Positions:
    """Batches that lie in pinned memory already: nothing but the copy is left to measure."""
    pinned = [torch.full((nbytes // 8,), i).pin_memory() for i in range(4)]
    return Positions(lambda at: {"ids": pinned[at[1] % 4]}, size)


def correctness(acc: Accelerator) -> Iterator[Row]:
    for depth in (0, 1, 3):
        host = HostPrefetch(PinMemory(source(20), acc.device, cpu_fields=("lengths",)), 2)
        node = DevicePrefetch(host, acc.device, depth, cpu_fields=("lengths",))
        kept, ok, work = [], True, acc.busy(0.002)
        for position, batch in enumerate(node):
            work()
            ok &= batch["ids"].device == acc.device and isinstance(batch["pair"], Pair)
            ok &= batch["lengths"].device.type == "cpu" and node.last_host_batch["ids"].is_pinned()
            kept.append((position, batch["ids"] * 1, batch))
        ok &= len(kept) == 20
        for position, product, batch in kept:  # kept batches stay valid, whatever was copied since
            for tensor in (product, batch["ids"], batch["pair"].x, batch["repeated"], batch["gaps"]):
                ok &= bool((tensor == position).all())
            ok &= batch["repeated"].shape == (3, 5) and batch["empty"].shape == (0, 4)
            ok &= batch["pair"].x.stride() == (1, 2)  # the strides of a transposed tensor are kept
        node.close()
        host.close()
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
            batches: BaseNode[Any] = source(6)
            if number == 0:
                batches = DevicePrefetch(PinMemory(batches, acc.device), acc.device, cpu_fields=("lengths",))
            got[number] = list(ModelBroadcast(batches, Plane(communicator, number == 0)))

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
                for tensor in (batch["ids"], batch["pair"].x, batch["repeated"]):
                    ok &= bool((tensor == position).all())
                ok &= batch["info"].step == position and batch["empty"].shape == (0, 4)
        yield f"broadcast {where}", ok, "3 ranks, 6 batches"


def whole_loader(acc: Accelerator) -> Iterator[Row]:
    """Whoever starts the collectives: on one rank there are none, but the streams are those of many."""
    documents = [{"input_ids": torch.arange(1 + (37 * i) % 1000)} for i in range(64)]

    def epoch(device: torch.device, collectives: Any) -> list[Any]:
        config = LoaderConfig(
            seq_len=1024, collectives=collectives, device_prefetch=2, cpu_fields=("labels",)
        )
        sampler = StepSampler(64, global_batch_size=8, seed=1)
        seen = []
        with build_loader(documents, None, config, sampler=sampler, device=device) as loader:
            for batch in loader:
                loader.prefetch_plan()
                assert batch["input_ids"].device == device or device.type == "cpu"
                assert batch["labels"].device.type == "cpu"
                assert loader.last_host_batch["input_ids"].device.type == "cpu"
                loader.prefetch()
                seen.append((batch["input_ids"] * 1, batch["info"], loader.state_dict()))
            loader.wait_for_prefetch()
        return [(ids.cpu(), info, state) for ids, info, state in seen]

    expected = epoch(torch.device("cpu"), "producer")
    for collectives in ("producer", "caller"):
        found = epoch(acc.device, collectives)
        ok = len(found) == len(expected) == 64
        for (ids, *rest), (right, *others) in zip(found, expected, strict=True):
            ok &= torch.equal(ids, right) and rest == others
        yield f"whole loader as on the CPU, collectives={collectives!r}", ok, f"{len(found)} batches"


def collectives(acc: Accelerator) -> Iterator[Row]:
    """The backend's own group, of one rank: that its waits end, in place and through the device."""
    backend = BACKENDS.get(acc.device.type, "gloo")
    try:
        store = dist.HashStore()  # type: ignore[attr-defined]  # it is public, and documented
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    except (RuntimeError, ValueError) as error:
        yield f"collectives of {backend}", True, f"not run: this build of torch has none ({error})"
        return
    try:
        group = dist.new_group([0])
        communicator = ProcessGroupCommunicator(
            group, timeout=timedelta(seconds=30), device=acc.device, name="test"
        )
        ok = True
        for where in (torch.device("cpu"), acc.device):
            sent = torch.arange(100, dtype=torch.uint8, device=where)
            whole = [sent.clone(), torch.zeros(5 * MIB, dtype=torch.uint8, device=where)]
            communicator.broadcast(sent, 0)
            communicator.broadcast_all(iter(whole), 0)
            ok &= torch.equal(whole[0].cpu(), torch.arange(100, dtype=torch.uint8))
        row = torch.arange(64, dtype=torch.uint8)
        ok &= torch.equal(communicator.all_gather(row), row[None])
        received = torch.empty_like(row)
        communicator.all_to_all(row, [64], received, [64])
        ok &= torch.equal(received, row)
        yield f"collectives of {backend}", ok, f"one rank, {sum(communicator.calls.values())} calls"
    finally:
        dist.destroy_process_group()


def overlap(acc: Accelerator) -> Iterator[Row]:
    nbytes, steps = 256 * MIB, 20
    batches = resident(steps, nbytes)  # made once: pinning a gigabyte takes its time

    def run(depth: int, compute: Callable[[], None] | None) -> float:
        node = DevicePrefetch(batches, acc.device, depth)
        acc.sync()
        begin = time.perf_counter()
        for _ in node:
            if compute is not None:
                compute()
        acc.sync()
        seconds = time.perf_counter() - begin
        node.close()
        return seconds / steps

    def alone(compute: Callable[[], None]) -> float:
        acc.sync()
        begin = time.perf_counter()
        for _ in range(steps):
            compute()
        acc.sync()
        return (time.perf_counter() - begin) / steps

    copy = min(run(1, None) for _ in range(3))
    work = acc.busy(2 * copy)
    # The least of turns: the clock of a device goes up and down with its temperature.
    turns = [(alone(work), run(1, work), run(0, work)) for _ in range(3)]
    compute, ahead, serial = (min(seconds) for seconds in zip(*turns, strict=True))
    hidden = 1 - (ahead - compute) / copy
    told = (
        f"copy {copy * 1e3:.2f} ms ({nbytes / copy / 1e9:.0f} GB/s), compute {compute * 1e3:.2f} ms, together "
        f"{ahead * 1e3:.2f} ms, depth 0 {serial * 1e3:.2f} ms"
    )
    yield "copy hidden behind compute (over 80%)", hidden > 0.8, f"{hidden:.0%}: {told}"


def host_syncs(acc: Accelerator) -> Iterator[Row]:
    yield sight(acc)
    host = HostPrefetch(PinMemory(source(60), acc.device), 4)
    node = DevicePrefetch(host, acc.device, 1)
    yield from watched(acc, node, "next()")
    node.close()
    host.close()


def loader_syncs(acc: Accelerator) -> Iterator[Row]:
    """The loader with all that it does on one rank, with hooks, and slices whose boundaries are on the host."""
    documents = [{"input_ids": torch.arange(1 + (37 * i) % 1000)} for i in range(64)]
    sampler = StepSampler(64, global_batch_size=2, seed=1)
    for shown in ("producer", "caller"):
        config = LoaderConfig(
            seq_len=1024,
            host_prefetch=8,
            device_prefetch=1,
            cpu_fields=("cu_seqlens_padded",),
            collectives=shown,
        )
        with build_loader(
            documents,
            None,
            config,
            sampler=sampler,
            collate=collate_varlen,
            shard={"input_ids": Shard("cp", mode="zigzag", unit="document")},
            device=acc.device,
        ) as loader:

            def batches(loader: Any = loader) -> Iterator[Any]:
                for batch in loader:
                    loader.prefetch_plan()
                    loader.prefetch()
                    yield batch

            yield from watched(acc, batches(), f"the loader, collectives={shown!r}")


def sight(acc: Accelerator) -> Row:
    """A profiler that sees no sync proves nothing unless it sees each kind that is there."""
    title = "the profiler sees syncs"
    if not acc.sees_syncs:
        return title, True, f"not run: torch.profiler records nothing of {acc.device.type}"
    stream, event = acc.module.current_stream(acc.device), acc.module.Event()
    event.record(stream)
    ways = {"stream": stream.synchronize, "event": event.synchronize, "device": acc.sync}
    seen = {name: acc.syncs_in(way) for name, way in ways.items()}
    return title, all(seen.values()), ", ".join(f"{name}: {found or 'NONE'}" for name, found in seen.items())


def watched(acc: Accelerator, batches: Iterator[Any], what: str) -> Iterator[Row]:
    """Whether anything waits for the device while batches come and work is queued."""
    work = acc.busy(0.01)
    for _ in range(10):  # streams and memory exist from here on
        next(batches)
        work()
    acc.sync()
    time.sleep(0.2)  # the host batches are there
    waits = []

    def steps() -> None:
        for _ in range(4):
            begin = time.perf_counter()
            batch = next(batches)
            waits.append(time.perf_counter() - begin)
            work()
        del batch

    title = f"no sync in {what}"
    with acc.refuse_syncs():  # what it knows of raises
        if acc.sees_syncs:
            found = acc.syncs_in(steps)
            yield title, not found, f"{found or 'none'} in 4 batches"
        else:
            steps()
            yield title, True, f"not run: torch.profiler records nothing of {acc.device.type}"
    acc.sync()
    slow = sorted(waits)[2]
    yield f"{what} returns at once", slow < 0.005, f"{slow * 1e6:.0f} us with 10 ms of work queued per step"


def memory(acc: Accelerator) -> Iterator[Row]:
    nbytes, steps = 32 * MIB, STEPS
    batches = resident(steps, nbytes)
    for title, busy in (("host far ahead of the device", 0.004), ("device faster than the host", 0.0)):
        work = acc.busy(busy) if busy else lambda: None
        acc.sync()
        acc.module.empty_cache()  # what other checks left behind would hide growth
        before = acc.module.memory_allocated(acc.device), acc.module.memory_reserved(acc.device)
        node = DevicePrefetch(batches, acc.device, 1)
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


CHECKS = (correctness, broadcast, whole_loader, collectives, overlap, host_syncs, loader_syncs, memory)


def check_all(acc: Accelerator, only: list[str] | None = None) -> list[Row]:
    """The rows of every check; one that raises has failed."""
    rows: list[Row] = []
    for check in CHECKS:
        if only and check.__name__ not in only:
            continue
        begin = time.perf_counter()
        try:
            rows.extend(check(acc))
        except Exception as error:
            traceback.print_exc()
            rows.append((check.__name__, False, f"{type(error).__name__}: {error}"))
        print(f"{check.__name__}: {time.perf_counter() - begin:.1f} s", file=sys.stderr, flush=True)
    return rows


def main() -> int:
    """Run every check."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", help="type of the accelerator (cuda, npu, xpu)")
    parser.add_argument("--only", nargs="+", choices=[check.__name__ for check in CHECKS], metavar="NAME")
    args = parser.parse_args()
    name = args.device
    try:
        available = torch.get_device_module(name).is_available()
    except (AttributeError, RuntimeError):
        available = False
    if not available:
        print(f"skipped: this machine has no {name} device, or this build of torch cannot use it")
        return 0
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    begin = time.perf_counter()
    acc = Accelerator(name)
    rows = check_all(acc, args.only)
    print(
        f"torch {torch.__version__}, {acc.module.get_device_name(acc.device)}, {time.perf_counter() - begin:.0f} s"
    )
    width = max(len(title) for title, _, _ in rows)
    for title, ok, told in rows:
        print(f"{'ok  ' if ok else 'FAIL'}  {title:<{width}}  {told}")
    return 0 if all(ok for _, ok, _ in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
