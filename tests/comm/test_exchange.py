"""Payload arrives where the plan says, whoever holds it, and nothing else is ever taken for it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.comm import exchange as exchange_module
from evenstep.comm.buffers import BufferPool
from evenstep.comm.codec import PayloadCodec, PickleCodec
from evenstep.comm.exchange import Exchange, Moves, Stamp
from evenstep.comm.plane import DataPlane
from evenstep.comm.simulated import SimulatedGroup
from evenstep.errors import RemoteRankError, WireFormatError
from evenstep.testing import SimulatedWorld, assert_same

STAMP = Stamp(generation=1, step=2, micro_batch=3)


def sample(i: int) -> dict[str, Any]:
    ids = torch.arange(i % 7, dtype=torch.int64) + i
    return {"ids": ids, "name": f"sample {i}"} if i % 3 else {"ids": ids, "image": np.full((i % 4, 2), i)}


def make_moves(routes: list[tuple[int, int]]) -> Moves:
    """Sample ``3 * k`` goes along the k-th route, if that leads anywhere."""
    measured = [PayloadCodec().measure(sample(3 * k)) for k in range(len(routes))]
    kept = [k for k, (holder, target) in enumerate(routes) if holder != target]
    nbytes, structures = (np.array([measured[k][c] for k in kept], dtype=np.int64) for c in range(2))
    holders, targets = (np.array([routes[k][c] for k in kept], dtype=np.int32) for c in range(2))
    return Moves(np.array(kept, dtype=np.int64) * 3, holders, targets, nbytes, structures)


def exchange_of(
    plane: DataPlane, moves: Moves, stamp: Stamp = STAMP, held: Callable[[int], Any] = sample
) -> Exchange:
    assert plane.payload is not None

    def mine(i: int) -> Any:
        assert plane.payload is not None
        assert moves.holders[moves.ids == i] == plane.payload.position, "only the holder encodes"
        return held(i)

    return Exchange(plane.payload, PayloadCodec(), BufferPool(), stamp, moves, mine)


def check_arrivals(ranks: int, routes: list[tuple[int, int]]) -> SimulatedWorld:
    moves = make_moves([(h % ranks, t % ranks) for h, t in routes])
    world = SimulatedWorld(ranks)
    received = world.run(lambda plane: exchange_of(plane, moves).run())
    for rank, got in enumerate(received):
        assert sorted(got) == moves.ids[moves.targets == rank].tolist()
        for i, value in got.items():
            assert_same(value, sample(i))
    return world


def collectives(world: SimulatedWorld) -> int:
    return sum(group.collectives for group in world.groups)


def moved_bytes(world: SimulatedWorld) -> int:
    return sum(group.bytes_moved for group in world.groups)


ROUTES = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=24)


@settings(max_examples=40)
@given(ranks=st.integers(2, 4), routes=ROUTES)
def test_every_sample_arrives_once_where_it_must(ranks: int, routes: list[tuple[int, int]]) -> None:
    check_arrivals(ranks, routes)


@settings(max_examples=15)
@given(ranks=st.integers(2, 4), routes=ROUTES, chunk=st.integers(64, 4096))
def test_chunks_change_nothing(ranks: int, routes: list[tuple[int, int]], chunk: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange_module, "CHUNK_BYTES", chunk)
        check_arrivals(ranks, routes)


def segment_lengths(moves: Moves) -> dict[tuple[int, int], int]:
    lengths = {}
    for pair in set(zip(moves.holders.tolist(), moves.targets.tolist(), strict=True)):
        among = (moves.holders == pair[0]) & (moves.targets == pair[1])
        lengths[pair] = 64 + PayloadCodec().segment_bytes(moves.nbytes[among], moves.structures[among])
    return lengths


def test_large_segments_take_several_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    routes = [(0, 1)] * 20 + [(1, 0)]
    assert collectives(check_arrivals(2, routes)) == 1
    longest = max(segment_lengths(make_moves(routes)).values())
    monkeypatch.setattr(exchange_module, "CHUNK_BYTES", 256)
    assert collectives(check_arrivals(2, routes)) == -(-longest // 256) > 3


def test_too_much_at_once_goes_to_one_peer_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    routes = [(0, 1)] * 40 + [(1, 2)] + [(2, 1)] * 60
    longest = max(segment_lengths(make_moves(routes)).values())
    monkeypatch.setattr(exchange_module, "CHUNK_BYTES", longest)
    assert collectives(check_arrivals(3, routes)) == 2


@settings(max_examples=60)
@given(
    ranks=st.integers(2, 40),
    routes=st.lists(st.tuples(st.integers(0, 39), st.integers(0, 39)), max_size=60),
    chunk=st.integers(64, 4096),
)
def test_collectives_are_counted_by_the_longest_segment_of_each_distance(
    ranks: int, routes: list[tuple[int, int]], chunk: int
) -> None:
    moves = make_moves([(h % ranks, t % ranks) for h, t in routes])
    payload, whole = np.zeros((2, 2, ranks), dtype=np.int64)
    np.add.at(payload[0], moves.holders, moves.nbytes)
    np.add.at(payload[1], moves.targets, moves.nbytes)
    expected: dict[int, int] = {}
    for (holder, target), length in segment_lengths(moves).items():
        whole[0, holder] += length
        whole[1, target] += length
        distance = (target - holder) % ranks
        expected[distance] = max(expected.get(distance, 0), -(-length // chunk))
    at_once = payload.max() < chunk // 2 or whole.max() <= chunk
    communicator = SimulatedGroup(tuple(range(ranks))).communicator(0)
    exchange = Exchange(communicator, PayloadCodec(), BufferPool(), STAMP, moves, sample)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange_module, "CHUNK_BYTES", chunk)
        assert exchange._chunks() == (None if at_once else expected)


def test_bytes_on_the_wire_are_those_that_move() -> None:
    routes = [(0, 1)] * 8
    few = moved_bytes(check_arrivals(2, routes))
    assert few == moved_bytes(check_arrivals(2, routes + [(0, 0)] * 100))
    moves = make_moves(routes)
    assert moves.nbytes.sum() < few < moves.nbytes.sum() + 4096


def test_a_codec_may_make_segments_of_any_length() -> None:
    codec = PickleCodec()
    samples = {i: {"text": "x" * i} for i in range(12)}
    holders, targets = np.divmod(np.array([1, 2, 2, 3, 5, 6, 7, 1, 2, 3, 7, 5], dtype=np.int32), 3)
    measures = np.array([codec.measure(samples[i]) for i in range(12)])
    moves = Moves(np.arange(12), holders, targets, measures[:, 0], measures[:, 1])

    def work(plane: DataPlane) -> Any:
        assert plane.payload is not None
        return Exchange(plane.payload, codec, BufferPool(), STAMP, moves, samples.__getitem__).run()

    for rank, got in enumerate(SimulatedWorld(3).run(work)):
        assert got == {i: samples[i] for i in np.flatnonzero(targets == rank).tolist()}


def outcomes(work: Callable[[DataPlane], Any], ranks: int = 2) -> list[Any]:
    return SimulatedWorld(ranks, timeout=5).outcomes(work)


@pytest.mark.parametrize(
    "stale",
    [replace(STAMP, generation=0), replace(STAMP, step=9), replace(STAMP, micro_batch=4)],
    ids=lambda stamp: str(stamp),
)
def test_a_segment_of_another_exchange_is_refused(stale: Stamp) -> None:
    moves = make_moves([(0, 1)])

    def work(plane: DataPlane) -> Any:
        return exchange_of(plane, moves, stale if plane.topology.rank == 0 else STAMP).run()

    sender, receiver = outcomes(work)
    assert sender == {}
    assert isinstance(receiver, WireFormatError)
    length = 64 + PayloadCodec().segment_bytes(moves.nbytes, moves.structures)
    said, planned = (
        [0x7365_676D_656E_7431, stamp.generation, stamp.step, stamp.micro_batch, 1, length, 0, 0]
        for stamp in (stale, STAMP)
    )
    assert str(receiver) == (
        f"a segment from rank 0 begins with {said}, the plan says {planned} (magic, generation, step, micro-batch, "
        "samples, bytes, failed, bytes of error): it belongs to another exchange, and its bytes are not used"
    )


class _Liar(PayloadCodec):
    """Sends bytes that are no samples."""

    def encode(self, samples: Any, out: torch.Tensor) -> None:
        out.copy_(torch.arange(out.numel()) % 251 + len(samples))


def test_bytes_that_are_no_samples_are_refused() -> None:
    moves = make_moves([(0, 1), (1, 0)])

    def work(plane: DataPlane) -> Any:
        assert plane.payload is not None
        codec = _Liar() if plane.topology.rank == 0 else PayloadCodec()
        return Exchange(plane.payload, codec, BufferPool(), STAMP, moves, sample).run()

    honest, deceived = outcomes(work)
    assert_same(honest, {3: sample(3)})
    assert isinstance(deceived, WireFormatError)


def test_a_rank_that_cannot_encode_tells_its_receiver_and_nobody_waits() -> None:
    moves = make_moves([(0, 1)] * 40 + [(1, 2), (2, 0)])

    def changed(i: int) -> Any:
        return {"ids": object()} if i == 9 else sample(i)

    sender, receiver, other = outcomes(lambda plane: exchange_of(plane, moves, held=changed).run(), ranks=3)
    assert isinstance(sender, TypeError)
    assert isinstance(receiver, RemoteRankError)
    assert (receiver.rank, receiver.error_type, receiver.error_message) == (0, "TypeError", str(sender))
    assert str(receiver) == (
        f"rank 0 failed: TypeError: {sender} (every rank stops here; the traceback is on rank 0)"
    )
    assert_same(other, {40 * 3: sample(40 * 3)})


def test_an_error_that_does_not_fit_its_segment_is_told_without_words() -> None:
    moves = make_moves([(0, 1)])

    def changed(i: int) -> Any:
        raise ValueError("x" * 2000)

    sender, receiver = outcomes(lambda plane: exchange_of(plane, moves, held=changed).run())
    assert isinstance(sender, ValueError)
    with pytest.raises(
        RemoteRankError,
        match=re.escape("rank 0 failed and could not say why; its own error is in its output"),
    ):
        raise receiver
