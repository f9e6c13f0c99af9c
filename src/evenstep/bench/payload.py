"""Moving the samples of one micro-batch beside the bare bytes, and one payload that no single collective carries."""

from __future__ import annotations

import pickle
import resource
import sys
from time import perf_counter
from typing import Any

import numpy as np
import torch

from evenstep.bench.turns import Turns
from evenstep.comm.buffers import BufferPool
from evenstep.comm.codec import PayloadCodec
from evenstep.comm.communicator import Communicator
from evenstep.comm.exchange import Exchange, Moves, Stamp

__all__ = ["measure_exchange", "measure_huge"]

_HUGE_SAMPLE = 1 << 20
_IN_A_ROW, _TURN_BYTES = 8, 64 << 20  # runs of a contender in a turn, fewer of those that take long


def measure_exchange(
    communicator: Communicator, sharing: Communicator, payload: int, size: int, repeats: int
) -> dict[str, Any]:
    """Exchange samples of ``size`` bytes, ``payload`` bytes from each rank in equal parts to all others.

    ``evenstep`` is what a loader does: over ``sharing``, where bytes go through memory if the ranks are on one host.
    ``wire`` is the same through ``communicator``, as all that follows. ``raw`` moves as many bytes from a send buffer, ``memcpy`` copies them into it, and ``memcpy_and_raw`` does both,
    one after the other: an exchange that costs nothing else. It takes longer than the sum where bytes that were
    just copied are slower to send. ``torch`` is the least that a program can do with samples: it knows that each is one
    tensor of one size, joins them, sends, splits, and checks nothing. The samples that arrive are dropped before the next run.
    """
    me, ranks = communicator.position, len(communicator.ranks)
    each = max(1, payload // size // max(1, ranks - 1))
    moves = _all_pairs(ranks, each, size)
    samples = {
        int(i): {"input_ids": torch.full((size // 8,), int(i), dtype=torch.int64)}
        for i in np.flatnonzero(moves.holders == me)
    }

    def exchange(group: Communicator, pool: BufferPool) -> Exchange:
        return Exchange(group, PayloadCodec(), pool, Stamp(1, 1, 1), moves, samples.__getitem__)

    sharing.share_memory()  # anew: what it holds is counted
    pool = BufferPool()
    evenstep = exchange(sharing, pool)
    splits = [0 if p == me else each * size for p in range(ranks)]
    total = sum(splits)
    flat, send, receive = (torch.ones(total, dtype=torch.uint8) for _ in range(3))
    by_target = [
        [samples[i] for i in np.flatnonzero((moves.holders == me) & (moves.targets == t)).tolist()]
        for t in range(ranks)
    ]

    def pickled() -> list[Any]:
        parts = [torch.frombuffer(bytearray(pickle.dumps(part)), dtype=torch.uint8) for part in by_target]
        out = [part.numel() for part in parts]
        told = communicator.all_gather(torch.tensor(out, dtype=torch.int64).view(torch.uint8))
        into = told.view(torch.int64)[:, me].tolist()
        arrived = torch.empty(sum(into), dtype=torch.uint8)
        communicator.all_to_all(torch.cat(parts), out, arrived, into)
        return [pickle.loads(part.numpy().data) for part in torch.split(arrived, into)]

    def raw() -> None:
        communicator.all_to_all(send, splits, receive, splits)

    def memcpy() -> None:
        send.copy_(flat)

    def memcpy_and_raw() -> None:
        memcpy()
        raw()

    tokens = [sample["input_ids"] for part in by_target for sample in part]
    send_tokens, receive_tokens = send.view(torch.int64), receive.view(torch.int64)

    def in_torch() -> list[dict[str, torch.Tensor]]:
        torch.cat(tokens, out=send_tokens)
        raw()
        return [{"input_ids": row} for row in receive_tokens.split(size // 8)]

    turns = Turns.take(
        communicator,
        repeats,
        max(1, min(_IN_A_ROW, _TURN_BYTES // total)),
        raw=raw,
        memcpy=memcpy,
        memcpy_and_raw=memcpy_and_raw,
        torch=in_torch,
        wire=exchange(communicator, BufferPool()).run,
        evenstep=evenstep.run,
    )
    rounds = min(repeats, 3)  # pickling takes up to seconds each
    beside_pickle = Turns.take(communicator, rounds, 1, pickled=pickled, evenstep=evenstep.run)
    # On memory of its own: a busy backend may let go of a buffer only after the next exchange has begun.
    sharing.share_memory()
    alone = BufferPool()
    received = exchange(sharing, alone).run()
    kept = alone.statistics().peak_bytes + (
        0 if sharing.memory is None else sharing.memory.statistics().peak_bytes
    )
    wrong = [i for i, sample in received.items() if not (sample["input_ids"] == i).all()]
    if wrong or sorted(received) != np.flatnonzero(moves.targets == me).tolist():
        raise AssertionError(f"rank {me} received samples that were not sent: {wrong[:8]}")
    return {
        "sample_bytes": size,
        "moved_bytes": total,
        "seconds": turns.seconds() | {"pickled": beside_pickle.seconds()["pickled"]},
        "of_sum": turns.ratio("raw", "memcpy", to="evenstep"),
        "wire_of_sum": turns.ratio("raw", "memcpy", to="wire"),
        "wire_of_both": turns.ratio("memcpy_and_raw", to="wire"),
        "wire_of_torch": turns.ratio("torch", to="wire"),
        "times_faster_than_pickle": beside_pickle.ratio("pickled", to="evenstep"),
        "memory_per_byte": kept / total,
    }


def _all_pairs(ranks: int, each: int, size: int) -> Moves:
    """``each`` samples of ``size`` bytes from every rank to every other."""
    pairs = [(h, t) for h in range(ranks) for t in range(ranks) if h != t]
    holders, targets = (np.repeat(np.array(pairs, dtype=np.int32)[:, k], each) for k in range(2))
    nbytes, structure = PayloadCodec().measure({"input_ids": torch.empty(size // 8, dtype=torch.int64)})
    ids = np.arange(len(holders), dtype=np.int64)
    return Moves(ids, holders, targets, np.full_like(ids, nbytes), np.full_like(ids, structure))


def measure_huge(communicator: Communicator, payload: int) -> dict[str, Any]:
    """One exchange of ``payload`` bytes from each rank, in more collectives than one; every sample is checked."""
    me, ranks = communicator.position, len(communicator.ranks)
    each = max(1, payload // _HUGE_SAMPLE // max(1, ranks - 1))
    moves = _all_pairs(ranks, each, _HUGE_SAMPLE)
    length = _HUGE_SAMPLE // 8
    values = torch.arange(len(moves.ids) + length)

    def sample(i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": values[i : i + length]}  # all different, and together no larger than one

    exchange = Exchange(communicator, PayloadCodec(), BufferPool(), Stamp(1, 1, 1), moves, sample)
    before = _peak_bytes()
    begin = perf_counter()
    received = exchange.run()
    seconds = perf_counter() - begin
    expected = np.flatnonzero(moves.targets == me).tolist()
    wrong = [i for i in expected if not torch.equal(received[i]["input_ids"], sample(i)["input_ids"])]
    if wrong or sorted(received) != expected:
        raise AssertionError(f"rank {me} received samples that were not sent: {wrong[:8]}")
    total = each * _HUGE_SAMPLE * (ranks - 1)
    return {
        "ranks": ranks,
        "moved_bytes": total,
        "samples": len(expected),
        "seconds": seconds,
        "memory_per_byte": (_peak_bytes() - before) / total,
    }


def _peak_bytes() -> int:
    """The most memory that this process held so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
