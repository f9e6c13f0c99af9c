"""A buffer is used again only when nothing can read it any more (law 12 for segments)."""

from __future__ import annotations

import gc
import random
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from torch import Tensor

from evenstep.comm.buffers import BufferPool, PoolStatistics
from evenstep.comm.codec import PayloadCodec

MIB = 1 << 20


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 4096, 4097, MIB + 1])
def test_buffers_are_aligned_bytes(nbytes: int) -> None:
    buffer = BufferPool().take(nbytes)
    assert buffer.dtype is torch.uint8
    assert buffer.shape == (nbytes,)
    assert buffer.is_contiguous()
    assert not nbytes or buffer.data_ptr() % 64 == 0
    buffer.fill_(1)


VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda buffer: buffer,
    "slice": lambda buffer: buffer[5:9],
    "other dtype": lambda buffer: buffer[:8].view(torch.int64),
    "split": lambda buffer: buffer.split(1000)[-1],
    "unsafe split": lambda buffer: torch.unsafe_split(buffer, 1000)[0][1:],
    "detached": lambda buffer: buffer[:4].view(torch.float32).detach().requires_grad_(),
    "array": lambda buffer: buffer.numpy(),
    "array slice": lambda buffer: buffer.numpy()[3:7].reshape(2, 2).T,
    "tensor on an array": lambda buffer: torch.from_numpy(buffer[10:].numpy()[2:]),
    "memoryview": lambda buffer: memoryview(buffer.numpy())[2:],  # type: ignore[arg-type]
    "storage": lambda buffer: buffer.untyped_storage(),
    "parameter": lambda buffer: torch.nn.Parameter(buffer[:8].view(torch.float32)),
    "in a graph": lambda buffer: buffer[:4].view(torch.float32) * torch.ones(1, requires_grad=True),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_keeps_the_buffer_from_being_used_again(name: str) -> None:
    pool = BufferPool()
    buffer = pool.take(4096)
    address = buffer.data_ptr()
    view = VIEWS[name](buffer)
    del buffer
    gc.collect()
    other = pool.take(4096)
    assert other.data_ptr() != address
    del view
    assert pool.take(4096).data_ptr() == address
    assert pool.statistics().hits == 1


def test_samples_that_a_pack_function_keeps_stay_as_they_are() -> None:
    codec = PayloadCodec()
    pool = BufferPool()
    kept: list[Tensor] = []

    def pack(samples: list[Any]) -> Tensor:
        kept.append(samples[0]["ids"][1:])  # a view
        return torch.cat([sample["ids"] for sample in samples])  # a copy

    for step in range(20):
        samples = [{"ids": torch.full((n + 2,), step)} for n in range(8)]
        measures = [codec.measure(sample) for sample in samples]
        size = codec.segment_bytes([m[0] for m in measures], [m[1] for m in measures])
        segment = pool.take(size)
        codec.encode(samples, segment)
        batch = pack(codec.decode(segment, len(samples)))
        assert (batch == step).all()
        del segment, batch
        if step % 5 == 4:
            kept = kept[-2:]
        assert [tensor.tolist() for tensor in kept] == [[step - back] for back in reversed(range(len(kept)))]
    assert pool.statistics().hits > 0


def test_statistics() -> None:
    pool = BufferPool(max_bytes=3 * 4096)
    assert pool.statistics() == PoolStatistics(0, 0, 0, 0, 0, 0)
    buffers = [pool.take(4000) for _ in range(4)]
    assert pool.statistics() == PoolStatistics(0, 4, 0, 0, 4 * 4096, 4 * 4096)
    del buffers
    assert pool.statistics() == PoolStatistics(0, 4, 1, 3 * 4096, 0, 4 * 4096)
    again = pool.take(10)
    assert pool.statistics() == PoolStatistics(1, 4, 1, 2 * 4096, 4096, 4 * 4096)
    pool.clear()
    del again
    assert pool.statistics() == PoolStatistics(1, 4, 1, 4096, 0, 4 * 4096)


def test_sizes_that_vary_a_little_share_buffers() -> None:
    pool = BufferPool()
    sizes = random.Random(0)
    for _ in range(200):
        held = [pool.take(int(MIB * sizes.uniform(0.8, 1.2))) for _ in range(2)]
        del held
    statistics = pool.statistics()
    assert statistics.hits >= 390
    assert statistics.peak_bytes <= 6 * MIB


def test_a_small_request_does_not_hold_a_large_buffer() -> None:
    pool = BufferPool()
    large = pool.take(MIB)
    del large
    small = pool.take(5000)
    assert pool.statistics().used_bytes == 8192
    assert len(small) == 5000


def test_of_like_buffers_the_one_used_last_is_taken_first() -> None:
    pool = BufferPool()
    first, last = pool.take(4096), pool.take(4096)
    addresses = [first.data_ptr(), last.data_ptr()]
    del first
    del last
    again = [pool.take(4096), pool.take(4096)]
    assert [buffer.data_ptr() for buffer in again] == addresses[::-1]


def test_a_full_pool_frees_the_buffer_that_waits_longest() -> None:
    pool = BufferPool(max_bytes=2 * 4096)
    buffers = [pool.take(4096) for _ in range(3)]
    addresses = [buffer.data_ptr() for buffer in buffers]
    while buffers:
        buffers.pop(0)
    again = [pool.take(4096), pool.take(4096)]
    assert [buffer.data_ptr() for buffer in again] == [addresses[2], addresses[1]]


def test_a_pool_of_nothing_keeps_nothing() -> None:
    pool = BufferPool(max_bytes=0)
    for _ in range(3):
        pool.take(100)
    assert pool.statistics() == PoolStatistics(0, 3, 3, 0, 0, 4096)


def test_buffers_outlive_their_pool() -> None:
    pool = BufferPool()
    buffer = pool.take(100)
    del pool
    gc.collect()
    buffer.fill_(3)
    assert buffer.sum() == 300


def test_a_buffer_that_dies_while_the_pool_is_locked_comes_back() -> None:
    pool = BufferPool()
    buffer = pool.take(100)
    with pool._lock:  # as when the garbage collector runs inside take()
        del buffer
    assert pool.statistics().idle_bytes == 4096


def test_threads_never_share_a_buffer() -> None:
    pool = BufferPool(max_bytes=MIB)
    wrong: list[int] = []

    def work(number: int) -> None:
        sizes = random.Random(number)
        held: list[Tensor] = []
        for _ in range(300):
            held.append(pool.take(sizes.choice([100, 5000, 20_000])).fill_(number))
            if len(held) > 4:
                held.pop(sizes.randrange(len(held)))
            if any(bool((tensor != number).any()) for tensor in held):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    statistics = pool.statistics()
    assert statistics.used_bytes == 0
    assert statistics.idle_bytes <= MIB
    assert statistics.hits + statistics.misses == 6 * 300


class Pool(RuleBasedStateMachine):
    """Any order of taking, viewing and dropping: contents stay, sums hold."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BufferPool(max_bytes=64 * 1024)
        self.held: list[tuple[Tensor, int]] = []
        self.stamp = 0

    @rule(nbytes=st.sampled_from([1, 64, 4096, 5000, 12_000, 40_000, 100_000]))
    def take(self, nbytes: int) -> None:
        self.stamp = (self.stamp + 1) % 256
        self.held.append((self.pool.take(nbytes).fill_(self.stamp), self.stamp))

    @rule(at=st.integers(0, 50))
    def drop(self, at: int) -> None:
        if self.held:
            self.held.pop(at % len(self.held))

    @rule(at=st.integers(0, 50), start=st.integers(0, 10))
    def keep_a_view(self, at: int, start: int) -> None:
        if self.held:
            tensor, stamp = self.held[at % len(self.held)]
            self.held[at % len(self.held)] = (tensor[min(start, len(tensor) - 1) :], stamp)

    @invariant()
    def contents_stay(self) -> None:
        assert all(bool((tensor == stamp).all()) for tensor, stamp in self.held)

    @invariant()
    def sums_hold(self) -> None:
        statistics = self.pool.statistics()
        assert statistics.idle_bytes <= 64 * 1024
        assert statistics.used_bytes >= sum(tensor.numel() for tensor, _ in self.held)
        if not self.held:
            assert statistics.used_bytes == 0


Pool.TestCase.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
test_any_order = Pool.TestCase


@pytest.mark.parametrize("max_bytes", [-1, 1.5, True])
def test_limits_are_checked(max_bytes: Any) -> None:
    message = (
        f"max_bytes is {max_bytes!r}; the pool needs a number of bytes >= 0; 0 keeps no buffer for reuse"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        BufferPool(max_bytes=max_bytes)
    with pytest.raises(ValueError, match=r"^nbytes is -1; a buffer cannot have less than 0 bytes$"):
        BufferPool().take(-1)
