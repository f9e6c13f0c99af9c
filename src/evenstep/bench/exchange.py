"""What moving samples costs beside the bare collectives: run it under torchrun on your own cluster."""

from __future__ import annotations

import argparse
import json
import pickle
from collections.abc import Callable
from datetime import timedelta
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from evenstep.bench.machine import as_line, describe_machine
from evenstep.bench.windows import count_collectives
from evenstep.comm.buffers import BufferPool
from evenstep.comm.codec import PayloadCodec
from evenstep.comm.columns import Columns, as_bytes
from evenstep.comm.communicator import Communicator
from evenstep.comm.exchange import Exchange, Moves, Stamp
from evenstep.comm.groups import world_communicator
from evenstep.comm.rounds import OK, Header, Rounds
from evenstep.samples import SampleMetadata
from evenstep.testing import run_ranks

__all__ = ["add_arguments", "as_text", "measure", "run"]

_TIMEOUT = timedelta(minutes=5)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``evenstep bench exchange``."""
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[2, 4], metavar="N",
        help="local ranks to start, one run for each number; under torchrun its ranks are used",
    )  # fmt: skip
    parser.add_argument("--mib", type=float, default=8.0, metavar="N", help="MiB that each rank sends")
    parser.add_argument(
        "--sample-kib", type=int, nargs="+", default=[128, 16, 2], metavar="N", help="sizes of a sample"
    )
    parser.add_argument("--metadata", type=int, default=2000, metavar="N", help="samples a rank in a gather")
    parser.add_argument("--repeats", type=int, default=25, metavar="N", help="runs of each measurement")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(args: argparse.Namespace) -> int:
    """Measure what ``args`` says, print it on stdout, and return the exit status."""
    sizes = [kib * 1024 for kib in args.sample_kib]
    options = (int(args.mib * (1 << 20)), sizes, args.metadata, args.repeats)
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
        result = measure(dist.get_rank(), *options)
        if dist.get_rank() == 0:
            _print([result], args.json)
        dist.destroy_process_group()
        return 0
    _print([run_ranks(measure, ranks, *options, timeout=600.0)[0] for ranks in args.ranks], args.json)
    return 0


def measure(_rank: int, payload_bytes: int, sizes: list[int], metadata: int, repeats: int) -> dict[str, Any]:
    """Seconds (the slowest rank's, best of ``repeats``), bytes and ratios; on every rank of the default group.

    Each rank sends ``payload_bytes`` of samples, in equal parts to all others. The contenders take turns, so that
    a busy machine disturbs all alike.
    """
    communicator = world_communicator(_TIMEOUT)
    return {
        "machine": describe_machine(),
        "ranks": len(communicator.ranks),
        "payload_bytes": payload_bytes,
        "exchanges": [_measure_exchange(communicator, payload_bytes, size, repeats) for size in sizes],
        "gather": _measure_gather(communicator, metadata, repeats),
        "collectives": count_collectives(),
    }


def _measure_exchange(communicator: Communicator, payload: int, size: int, repeats: int) -> dict[str, Any]:
    me, ranks = communicator.position, len(communicator.ranks)
    each = max(1, payload // size // max(1, ranks - 1))
    pairs = [(h, t) for h in range(ranks) for t in range(ranks) if h != t]
    holders, targets = (np.repeat(np.array(pairs, dtype=np.int32)[:, k], each) for k in range(2))
    codec, pool = PayloadCodec(), BufferPool()
    samples = {
        int(i): {"input_ids": torch.full((size // 8,), int(i), dtype=torch.int64)}
        for i in np.flatnonzero(holders == me)
    }
    nbytes, structure = codec.measure(next(iter(samples.values())))
    ids = np.arange(len(holders), dtype=np.int64)
    moves = Moves(ids, holders, targets, np.full_like(ids, nbytes), np.full_like(ids, structure))
    exchange = Exchange(communicator, codec, pool, Stamp(1, 1, 1), moves, samples.__getitem__)
    splits = [0 if p == me else each * size for p in range(ranks)]
    total = sum(splits)
    send, receive, copy = (torch.ones(total, dtype=torch.uint8) for _ in range(3))
    by_target = [
        [samples[i] for i in np.flatnonzero((holders == me) & (targets == t)).tolist()] for t in range(ranks)
    ]

    def pickled() -> None:
        parts = [torch.frombuffer(bytearray(pickle.dumps(part)), dtype=torch.uint8) for part in by_target]
        out = [part.numel() for part in parts]
        told = communicator.all_gather(torch.tensor(out, dtype=torch.int64).view(torch.uint8))
        into = told.view(torch.int64)[:, me].tolist()
        arrived = torch.empty(sum(into), dtype=torch.uint8)
        communicator.all_to_all(torch.cat(parts), out, arrived, into)
        for part in torch.split(arrived, into):
            pickle.loads(part.numpy().data)

    seconds = _take_turns(
        communicator,
        repeats,
        raw=lambda: communicator.all_to_all(send, splits, receive, splits),
        memcpy=lambda: copy.copy_(receive),
        evenstep=exchange.run,
    )
    seconds |= _take_turns(communicator, min(repeats, 3), pickled=pickled)  # up to a second each
    received = exchange.run()
    wrong = [i for i, sample in received.items() if not (sample["input_ids"] == i).all()]
    if wrong or sorted(received) != np.flatnonzero(targets == me).tolist():
        raise AssertionError(f"rank {me} received samples that were not sent: {wrong[:8]}")
    return {
        "sample_bytes": size,
        "moved_bytes": total,
        "seconds": seconds,
        "of_raw_and_memcpy": (seconds["raw"] + seconds["memcpy"]) / seconds["evenstep"],
        "of_raw": seconds["raw"] / seconds["evenstep"],
        "times_faster_than_pickle": seconds["pickled"] / seconds["evenstep"],
        "memory_per_byte": pool.statistics().peak_bytes / total,
    }


def _measure_gather(communicator: Communicator, count: int, repeats: int) -> dict[str, Any]:
    chance = np.random.default_rng(communicator.position)
    tokens = chance.integers(1, 4096, count)
    order = np.arange(count, dtype=np.int64) * len(communicator.ranks) + communicator.position
    columns = Columns(
        order=order,
        rows=order.astype(np.int32),
        tokens=tokens,
        loss_tokens=tokens - 1,
        nbytes=tokens * 8,
        structures=np.full(count, 7, dtype=np.int64),
        costs=tokens[:, None].astype(np.float64),
        features=np.empty((count, 0)),
    )
    rounds = Rounds(communicator)
    row = as_bytes(columns, columns.packed_bytes)
    objects = [
        SampleMetadata(t, features={"image_tokens": t // 2}, loss_tokens=t - 1) for t in tokens.tolist()
    ]
    tuples = [(i, t, t - 1, 8 * t, 7, 1.5 * t) for i, t in zip(order.tolist(), tokens.tolist(), strict=True)]

    def gather() -> None:
        headers = rounds.begin(Header(OK, samples=count, column_bytes=columns.packed_bytes))
        rows = communicator.all_gather(as_bytes(columns, columns.packed_bytes)).numpy()
        parts = [
            Columns.unpack(rows[p, : headers[rank].column_bytes], headers[rank].samples, 1, ())
            for p, rank in enumerate(communicator.ranks)
        ]
        Columns.gather(parts)

    def gather_objects(mine: list[Any]) -> None:
        everybody: list[Any] = [None] * len(communicator.ranks)
        dist.all_gather_object(everybody, mine)

    seconds = _take_turns(
        communicator,
        repeats,
        raw=lambda: communicator.all_gather(row),
        evenstep=gather,
        all_gather_object=lambda: gather_objects(objects),
        all_gather_tuples=lambda: gather_objects(tuples),
    )
    rounds.leave()
    return {
        "samples": count,
        "column_bytes": columns.packed_bytes,
        "seconds": seconds,
        "times_faster_than_objects": seconds["all_gather_object"] / seconds["evenstep"],
        "times_faster_than_tuples": seconds["all_gather_tuples"] / seconds["evenstep"],
    }


def _take_turns(
    communicator: Communicator, repeats: int, **contenders: Callable[[], object]
) -> dict[str, float]:
    """What each took on the slowest rank, in the turn that was disturbed least."""
    times: list[list[float]] = []
    for turn in range(repeats + 1):
        row = []
        for contender in contenders.values():
            communicator.all_gather(torch.zeros(1, dtype=torch.uint8))
            begin = perf_counter()
            contender()
            row.append(perf_counter() - begin)
        if turn:  # the first one touches fresh memory
            times.append(row)
    mine = torch.tensor(times, dtype=torch.float64)
    everybody = communicator.all_gather(mine.view(torch.uint8).flatten()).view(torch.float64)
    slowest = everybody.view(-1, *mine.shape).amax(0)
    return {name: float(slowest[:, k].min()) for k, name in enumerate(contenders)}


def _print(results: list[dict[str, Any]], as_json: bool) -> None:
    text = json.dumps(results, indent=2) if as_json else "\n\n".join(map(as_text, results))
    print(text, flush=True)


def as_text(r: dict[str, Any]) -> str:
    """One result as a table and two lines."""
    lines = [
        as_line(r["machine"]),
        "",
        f"{r['ranks']} ranks, {r['payload_bytes'] / 2**20:g} MiB sent by each; milliseconds",
    ]
    lines.append(
        "  sample      raw   memcpy  evenstep   pickled   of raw+memcpy  of raw  x pickle  memory/byte"
    )
    for e in r["exchanges"]:
        ms = {name: 1e3 * seconds for name, seconds in e["seconds"].items()}
        lines.append(
            f"{e['sample_bytes'] // 1024:4d} KiB {ms['raw']:8.2f} {ms['memcpy']:8.2f} {ms['evenstep']:9.2f} "
            f"{ms['pickled']:9.2f}   {e['of_raw_and_memcpy']:13.2f} {e['of_raw']:7.2f} "
            f"{e['times_faster_than_pickle']:9.1f} {e['memory_per_byte']:12.2f}"
        )
    g = r["gather"]
    ms = {name: 1e3 * seconds for name, seconds in g["seconds"].items()}
    c = r["collectives"]
    return "\n".join(
        [
            *lines,
            "",
            f"metadata of {g['samples']:,} samples a rank ({g['column_bytes']:,} bytes): raw gather {ms['raw']:.2f} ms, "
            f"evenstep {ms['evenstep']:.2f} ms with its status header, all_gather_object {ms['all_gather_object']:.2f} ms "
            f"of SampleMetadata ({g['times_faster_than_objects']:.1f}x), {ms['all_gather_tuples']:.2f} ms of tuples "
            f"({g['times_faster_than_tuples']:.1f}x)",
            f"a loader over {c['windows']} windows, {c['micro_batches']} micro-batches: "
            f"{c['control_per_window']:.2f} control collectives and {c['control_bytes_per_window']:,.0f} bytes a window, "
            f"{c['exchanges_per_micro_batch']:.2f} exchanges a micro-batch; rank 0 read {c['read_bytes']:,} bytes of "
            f"samples and sent {c['exchanged_bytes']:,}",
        ]
    )
