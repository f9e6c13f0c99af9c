"""Bytes that go through memory arrive as those that go over the wire, and a letter is believed only if it fits."""

from __future__ import annotations

import gc
import os
import re
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.comm import introduction
from evenstep.comm.buffers import BufferPool
from evenstep.comm.host_memory import HostMemory, Memory
from evenstep.comm.shared_memory import WORTH_SHARING, SharedMemory
from evenstep.comm.simulated import SimulatedCommunicator, SimulatedGroup
from evenstep.errors import RemoteRankError, WireFormatError

End = Callable[[SimulatedCommunicator], Any]


def on_ranks(ranks: int, function: End, timeout: float = 20.0) -> tuple[list[Any], SimulatedGroup]:
    """What ``function`` returns or raises on every rank of a group that shares memory."""
    group = SimulatedGroup(tuple(range(10, 10 + ranks)), timeout)
    results: list[Any] = [None] * ranks

    def main(position: int) -> None:
        communicator = group.communicator(10 + position)
        try:
            communicator.share_memory()
            results[position] = function(communicator)
        except Exception as error:
            results[position] = error
            group.kill(10 + position)

    threads = [threading.Thread(target=main, args=(p,), daemon=True) for p in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a rank hangs"
    return results, group


def raise_first(results: list[Any]) -> list[Any]:
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def memory_of(communicator: SimulatedCommunicator) -> SharedMemory:
    assert communicator.memory is not None
    return communicator.memory


def content(turn: int, sender: int, receiver: int, nbytes: int) -> torch.Tensor:
    return (torch.arange(nbytes) * 31 + turn * 7 + sender * 3 + receiver).to(torch.uint8)


@st.composite
def traffic(draw: st.DrawFn) -> tuple[int, list[list[list[int]]]]:
    """Ranks, and for each all-to-all the bytes from each to each."""
    ranks = draw(st.integers(2, 4))
    nbytes = st.one_of(st.just(0), st.integers(1, 300), st.integers(4000, 9000))
    matrix = st.lists(st.lists(nbytes, min_size=ranks, max_size=ranks), min_size=ranks, max_size=ranks)
    return ranks, draw(st.lists(matrix, min_size=1, max_size=5))


@settings(max_examples=40)
@given(traffic=traffic(), pooled=st.booleans())
def test_every_part_of_an_all_to_all_arrives(
    traffic: tuple[int, list[list[list[int]]]], pooled: bool
) -> None:
    ranks, matrices = traffic

    def run(communicator: SimulatedCommunicator) -> list[torch.Tensor]:
        me, received = communicator.position, []
        private = BufferPool()
        pool = memory_of(communicator) if pooled else private
        for turn, matrix in enumerate(matrices):
            out, into = matrix[me], [row[me] for row in matrix]
            send = pool.take(sum(out))
            torch.cat([content(turn, me, p, n) for p, n in enumerate(out)], out=send)
            receive = private.take(sum(into))
            communicator.all_to_all(send, out, receive, into)
            del send
            received.append(receive)  # and kept, while the others are on their way
        return received

    results, group = on_ranks(ranks, run)
    for me, received in enumerate(raise_first(results)):
        for turn, (matrix, found) in enumerate(zip(matrices, received, strict=True)):
            expected = torch.cat([content(turn, p, me, matrix[p][me]) for p in range(ranks)])
            assert torch.equal(found, expected)
    letters = sum(
        matrix[a][b] > 0 for matrix in matrices for a in range(ranks) for b in range(ranks) if a != b
    )
    assert group.bytes_moved == letters * 64


SIZES = st.one_of(
    st.integers(1, 100),
    st.sampled_from([WORTH_SHARING - 1, WORTH_SHARING, WORTH_SHARING + 77, 3 * WORTH_SHARING]),
)


@settings(max_examples=30)
@given(
    ranks=st.integers(2, 4),
    source=st.integers(0, 1),
    plan=st.lists(st.lists(st.one_of(SIZES, st.none()), max_size=8), min_size=1, max_size=3),
)
def test_every_buffer_of_a_broadcast_arrives_in_its_place(
    ranks: int, source: int, plan: list[list[int | None]]
) -> None:
    def run(communicator: SimulatedCommunicator) -> list[list[torch.Tensor]]:
        everything = []
        for turn, sizes in enumerate(plan):
            buffers: list[torch.Tensor] = []

            def made(
                turn: int = turn, sizes: list[int | None] = sizes, buffers: list[torch.Tensor] = buffers
            ) -> Iterator[torch.Tensor | None]:
                waited = 0
                for nbytes in sizes:
                    if nbytes is None:
                        yield None
                        if communicator.position != source and waited < len(buffers):
                            first = buffers[waited]  # what was asked for first is here
                            assert first[0] == content(turn, 0, first.numel(), 1)[0]
                            waited += 1
                        continue
                    mine = communicator.position == source
                    sent = content(turn, 0, nbytes, nbytes)
                    buffers.append(sent if mine else torch.zeros(nbytes, dtype=torch.uint8))
                    yield buffers[-1]

            communicator.broadcast_all(made(), source)
            everything.append(buffers)
        return everything

    results, _ = on_ranks(ranks, run)
    for everything in raise_first(results):
        for turn, (sizes, buffers) in enumerate(zip(plan, everything, strict=True)):
            expected = [content(turn, 0, n, n) for n in sizes if n is not None]
            assert all(map(torch.equal, buffers, expected))
            assert len(buffers) == len(expected)


def test_what_a_slow_reader_has_not_read_is_not_written_over() -> None:
    """Without its note the sender has no way to know: the collective is over for it at once."""
    nbytes, turns = 5000, 12

    def run(communicator: SimulatedCommunicator) -> list[bool]:
        memory: Any = memory_of(communicator)
        pool = memory
        if communicator.position == 1:
            inner = memory._fetch

            def slowly(*letter: Any) -> None:
                time.sleep(0.01)
                inner(*letter)

            memory._fetch = slowly
        right = []
        for turn in range(turns):
            out = [0, nbytes] if communicator.position == 0 else [0, 0]
            into = [nbytes, 0] if communicator.position == 1 else [0, 0]
            send, receive = pool.take(sum(out)), pool.take(sum(into))
            send.fill_(turn)
            communicator.all_to_all(send, out, receive, into)
            right.append(bool((receive == turn).all()))
        return right

    results, _ = on_ranks(2, run)
    assert raise_first(results)[1] == [True] * turns


def test_buffers_that_were_read_are_used_again() -> None:
    def run(communicator: SimulatedCommunicator) -> int:
        pool, nbytes = memory_of(communicator), [0, 8000]
        splits = nbytes if communicator.position == 0 else nbytes[::-1]
        for _ in range(50):
            communicator.all_to_all(pool.take(8000), splits, pool.take(8000), splits)
            communicator.all_gather(torch.zeros(1, dtype=torch.uint8))
        return pool.statistics().misses

    assert max(raise_first(on_ranks(2, run)[0])) <= 3


def test_the_last_words_of_a_rank_that_has_left_are_still_heard() -> None:
    heard = threading.Event()

    def run(communicator: SimulatedCommunicator) -> bool:
        if communicator.position == 0:
            pool = memory_of(communicator)
            send = pool.take(9000)
            send.fill_(8)
            communicator.all_to_all(send, [0, 9000], torch.empty(0, dtype=torch.uint8), [0, 0])
            del send, pool
            communicator.memory = None
            gc.collect()
            heard.set()
            return True
        memory: Any = memory_of(communicator)
        inner = memory._fetch

        def late(*letter: Any) -> None:
            assert heard.wait(10)
            inner(*letter)

        memory._fetch = late
        receive = torch.zeros(9000, dtype=torch.uint8)
        communicator.all_to_all(torch.empty(0, dtype=torch.uint8), [0, 0], receive, [9000, 0])
        return bool((receive == 8).all())

    assert raise_first(on_ranks(2, run)[0]) == [True, True]


def tampered(change: Callable[[list[int]], object], nbytes: int = 300) -> Any:
    """What a reader says to a letter whose numbers were changed."""

    def run(communicator: SimulatedCommunicator) -> Any:
        memory: Any = memory_of(communicator)
        if communicator.position == 0:
            inner = memory._letter

            def written(*args: Any) -> bytes:
                numbers = list(struct.unpack("<8q", inner(*args)))
                change(numbers)
                return struct.pack("<8q", *numbers)

            memory._letter = written
            send = torch.ones(nbytes, dtype=torch.uint8)
            return communicator.all_to_all(send, [0, nbytes], torch.empty(0, dtype=torch.uint8), [0, 0])
        receive = torch.zeros(nbytes, dtype=torch.uint8)
        try:
            communicator.all_to_all(torch.empty(0, dtype=torch.uint8), [0, 0], receive, [nbytes, 0])
        except (WireFormatError, RemoteRankError) as error:
            assert not receive.any(), "nothing of it is used"
            return error
        return receive

    return on_ranks(2, run)[0][1]


WORDS = ("magic", "collective", "sender", "start", "size", "at", "nbytes")


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("value", [-1, 1 << 40, -(1 << 62), 12345])
def test_a_letter_of_another_exchange_is_refused(word: str, value: int) -> None:
    def change(numbers: list[int]) -> None:
        numbers[WORDS.index(word)] = value

    said = tampered(change)
    if (word, value) == ("nbytes", -1):
        assert isinstance(said, RemoteRankError)
    else:
        assert isinstance(said, WireFormatError), said


@settings(max_examples=60)
@given(
    numbers=st.lists(st.integers(-(1 << 63), (1 << 63) - 1), min_size=8, max_size=8), kept=st.integers(0, 7)
)
def test_no_letter_makes_a_reader_look_where_it_must_not(numbers: list[int], kept: int) -> None:
    def change(told: list[int]) -> None:
        told[kept:] = numbers[kept:]

    said = tampered(change)
    assert isinstance(said, (WireFormatError, RemoteRankError)) or (kept == 7 and (said == 1).all())


def test_the_message_of_a_wrong_letter_names_both_exchanges() -> None:
    def change(numbers: list[int]) -> None:
        numbers[1] += 4

    assert str(tampered(change)) == (
        "a letter of rank 10 is of 300 bytes at 0 of 4096 in its collective 5, the plan says 300 bytes in collective 1: it "
        "belongs to another exchange, and nothing of it is used"
    )


def no_memory(self: HostMemory, nbytes: int) -> Memory:
    if nbytes > 1000:
        raise OSError(28, "no memory left")
    return allocate(self, nbytes)


allocate = HostMemory.allocate


def test_a_rank_without_memory_to_share_tells_its_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostMemory, "allocate", no_memory)

    def run(communicator: SimulatedCommunicator) -> None:
        out, into = ([0, 5000], [0, 0]) if communicator.position == 0 else ([0, 0], [5000, 0])
        communicator.all_to_all(
            memory_of(communicator).take(sum(out)), out, torch.empty(sum(into), dtype=torch.uint8), into
        )

    first, second = on_ranks(2, run)[0]
    assert type(first) is MemoryError
    assert str(first) == "there is no memory for 5000 bytes that other ranks wait for"
    assert type(second) is RemoteRankError
    assert str(second) == (
        "rank 10 has no memory left to share 5000 bytes from; look at its own error, or build the loader with "
        "shared_memory=False"
    )


def test_a_shortage_that_has_passed_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(communicator: SimulatedCommunicator) -> SharedMemory:
        return memory_of(communicator)

    memory, _ = raise_first(on_ranks(2, run)[0])
    with monkeypatch.context() as patch:
        patch.setattr(HostMemory, "allocate", no_memory)
        assert memory._own.find(memory.take(5000)) is None
    assert memory._own.find(memory.take(5000)) is not None


def test_a_broadcast_without_memory_to_share_ends_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostMemory, "allocate", no_memory)

    def run(communicator: SimulatedCommunicator) -> None:
        communicator.broadcast_all(iter([torch.zeros(WORTH_SHARING, dtype=torch.uint8)]), 0)

    first, *others = on_ranks(3, run)[0]
    assert type(first) is MemoryError
    assert [type(error) for error in others] == [RemoteRankError] * 2


def alone(self: HostMemory) -> None:
    raise OSError("there is none here")


@pytest.mark.parametrize("who", [{0}, {1, 2}, {0, 1, 2}])
def test_ranks_share_all_or_nothing(who: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    inner = HostMemory.__init__

    def some(self: HostMemory) -> None:
        if int(threading.current_thread().name) in who:
            alone(self)
        inner(self)

    monkeypatch.setattr(HostMemory, "__init__", some)

    def run(communicator: SimulatedCommunicator) -> bool:
        threading.current_thread().name = str(communicator.position)
        communicator.share_memory()
        splits = [3 * (p != communicator.position) for p in range(3)]
        receive = torch.zeros(6, dtype=torch.uint8)
        communicator.all_to_all(torch.ones(6, dtype=torch.uint8), splits, receive, splits)
        return communicator.memory is None and bool(receive.all())

    group = SimulatedGroup((0, 1, 2), 20)
    results = [False] * 3

    def main(position: int) -> None:
        results[position] = run(group.communicator(position))

    threads = [threading.Thread(target=main, args=(p,)) for p in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == [True] * 3


def test_a_stranger_of_the_same_number_is_not_taken_for_a_peer() -> None:
    """As in another container, where the process and the descriptor of that number are somebody else's."""
    stranger = HostMemory()
    first = stranger.allocate(100)
    told = struct.pack("<qq16s", os.getpid(), stranger.descriptor, b"x" * 16)
    assert not first.any()
    assert introduction._open([told], 2) is None
    assert introduction._open([struct.pack("<qq16s", 0, 0, b"")], 2) is None
    first[:16] = np.frombuffer(b"x" * 16, np.uint8)
    opened = introduction._open([told], 2)
    assert opened is not None
    opened[0][1][1] = 77
    assert first[24:32].view(np.int64)[0] == 77


def test_a_rank_that_dies_ends_the_others() -> None:
    def run(communicator: SimulatedCommunicator) -> None:
        if communicator.position == 1:
            raise RuntimeError("gone")
        splits = [0, 500, 500] if communicator.position == 0 else [500, 500, 0]
        communicator.all_to_all(
            torch.zeros(1000, dtype=torch.uint8), splits, torch.zeros(1000, dtype=torch.uint8), splits
        )

    results, _ = on_ranks(3, run)
    assert [type(error) for error in results] == [RemoteRankError, RuntimeError, RemoteRankError]
    assert re.search("rank 11 broke", str(results[0]))
