"""What it costs to hand a batch to a model-parallel peer, beside one raw broadcast of the same bytes."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from random import Random
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from evenstep.bench.machine import as_line, describe_machine
from evenstep.bench.options import KIB
from evenstep.bench.options import broadcast as add_arguments
from evenstep.comm.broadcast import BatchBroadcast
from evenstep.comm.process_group import ProcessGroupCommunicator
from evenstep.cursor import Cursor
from evenstep.testing import run_ranks

__all__ = ["add_arguments", "measure", "run"]

_TENSORS = 12
_WARM_UP = 3


def measure(*, ranks: int = 2, kib: tuple[int, ...] = KIB, repeats: int = 40) -> dict[str, Any]:
    """Median seconds until the last rank has a batch of 12 tensors, and three times without evenstep.

    ``batch`` goes through memory if the ranks are on one host, as a loader's does, and ``wire`` through gloo. ``raw`` is one broadcast of as many bytes into the same memory every time; ``joined`` copies the tensors into that
    and broadcasts it into memory other than the last time's, the least that a program can do for peers who know all about the
    batch; ``each`` is one broadcast per tensor into memory of the batch's own, as evenstep's. Each has a group of its own, and they take turns in every order, so that
    neither a busy machine nor what the one before left in the caches favours any.
    """
    sizes = []
    for rows in zip(*run_ranks(_rank, ranks, kib, repeats, timeout=300.0), strict=True):
        turns = [[max(seconds) for seconds in zip(*each, strict=True)] for each in zip(*rows, strict=True)]
        batch, wire, raw, joined, each = turns
        sizes.append(
            {
                "batch_seconds": median(batch),
                "wire_seconds": median(wire),
                "raw_seconds": median(raw),
                "joined_seconds": median(joined),
                "each_seconds": median(each),
                "to_raw": median(a / b for a, b in zip(batch, raw, strict=True)),
                "wire_to_raw": median(a / b for a, b in zip(wire, raw, strict=True)),
                "wire_to_joined": median(a / b for a, b in zip(wire, joined, strict=True)),
                "each_to_batch": median(b / a for a, b in zip(batch, each, strict=True)),
            }
        )
    return {
        "machine": describe_machine(),
        "ranks": ranks,
        "tensors": _TENSORS,
        "repeats": repeats,
        "sizes": {str(n): found for n, found in zip(kib, sizes, strict=True)},
    }


def _rank(rank: int, kib: tuple[int, ...], repeats: int) -> list[tuple[list[float], ...]]:
    """Seconds of every turn on this rank, by size and way."""
    groups = [dist.new_group(list(range(dist.get_world_size()))) for _ in range(6)]
    sharing, plain = (
        ProcessGroupCommunicator(
            group, timeout=timedelta(minutes=1), device=torch.device("cpu"), name="model"
        )
        for group in groups[:2]
    )
    sharing.share_memory()
    ends = [BatchBroadcast(sharing), BatchBroadcast(plain)]
    state = Cursor(order="shuffled").to_dict()
    results = []
    for size in kib:
        numel = size * 1024 // _TENSORS // 8
        batch = {f"field{i}": torch.arange(numel) for i in range(_TENSORS)}
        whole = torch.zeros(_TENSORS * numel * 8, dtype=torch.uint8)
        packed = [torch.zeros_like(whole) for _ in range(1 if rank == 0 else 2)]
        kept: list[Any] = [None, None, None]  # each way frees its own

        def ours(way: int, batch: Any = batch, kept: list[Any] = kept) -> None:
            if rank == 0:
                ends[way].send(ends[way].prepare(batch, state))
            else:
                kept[way] = ends[way].receive()

        def raw(whole: torch.Tensor = whole) -> None:
            dist.broadcast(whole, 0, group=groups[2])

        def joined(batch: Any = batch, packed: list[torch.Tensor] = packed) -> None:
            packed.reverse()
            if rank == 0:
                torch.cat(list(batch.values()), out=packed[0].view(torch.int64))
            dist.broadcast(packed[0], 0, group=groups[3])

        def each(batch: Any = batch, kept: list[Any] = kept) -> None:
            arrived = [tensor if rank == 0 else torch.empty_like(tensor) for tensor in batch.values()]
            for tensor in arrived:
                dist.broadcast(tensor, 0, group=groups[4])
            kept[2] = arrived

        ways = (partial(ours, 0), partial(ours, 1), raw, joined, each)
        results.append(_take_turns(ways, repeats, groups[5]))
    return results


def _take_turns(
    ways: tuple[Callable[[], None], ...], repeats: int, group: dist.ProcessGroup
) -> tuple[list[float], ...]:
    seconds: tuple[list[float], ...] = tuple([] for _ in ways)
    order = list(zip(ways, seconds, strict=True))
    draw = Random(0)  # alike on all ranks
    for turn in range(_WARM_UP + repeats):
        draw.shuffle(order)
        for way, found in order:
            dist.barrier(group=group)  # of nobody's: its connections and threads are awake
            begin = time.perf_counter()
            way()
            if turn >= _WARM_UP:
                found.append(time.perf_counter() - begin)
    return seconds


def run(args: argparse.Namespace) -> int:
    """Measure what ``args`` says, print it on stdout, and return the exit status."""
    result = measure(ranks=args.ranks, kib=tuple(args.kib), repeats=args.repeats)
    print(json.dumps(result, indent=2) if args.json else _as_text(result))
    return 0


def _as_text(result: dict[str, Any]) -> str:
    lines = [
        as_line(result["machine"]),
        f"{result['ranks']} ranks over gloo, batches of {result['tensors']} tensors, median of {result['repeats']}",
        "",
        "     KiB   evenstep ms   one raw broadcast ms   ratio   one broadcast per tensor ms   ratio   "
        "over the wire ms   to raw   joined and raw ms   ratio",
    ]
    for kib, r in result["sizes"].items():
        lines.append(
            f"{int(kib):8,}   {r['batch_seconds'] * 1e3:11.2f}   {r['raw_seconds'] * 1e3:20.2f}   {r['to_raw']:5.2f}   "
            f"{r['each_seconds'] * 1e3:27.2f}   {r['each_to_batch']:5.2f}   {r['wire_seconds'] * 1e3:16.2f}   "
            f"{r['wire_to_raw']:6.2f}   {r['joined_seconds'] * 1e3:17.2f}   {r['wire_to_joined']:5.2f}"
        )
    return "\n".join(lines)
