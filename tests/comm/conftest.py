"""A constructor and its peers on simulated ranks, for the tests of what they tell each other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from evenstep.comm.batch_spec import BatchSpec
from evenstep.comm.broadcast import BatchBroadcast, Message
from evenstep.comm.simulated import SimulatedCommunicator, SimulatedGroup
from evenstep.errors import RemoteRankError

STATE = {"consumed_samples": 5, "order": "é"}


class Counted:
    """Counts what goes over a communicator."""

    def __init__(self, inner: SimulatedCommunicator) -> None:
        self.inner = inner
        self.ranks, self.position = inner.ranks, inner.position
        self.device, self.launcher = inner.device, inner.launcher
        self.memory = inner.memory
        self.sizes: list[int] = []

    def all_gather(self, _: torch.Tensor) -> torch.Tensor:
        raise AssertionError("no gather is needed")

    def broadcast(self, buffer: torch.Tensor, source: int) -> None:
        assert buffer.dtype is torch.uint8
        assert buffer.dim() == 1
        assert buffer.is_contiguous()
        self.sizes.append(buffer.numel())
        self.inner.broadcast(buffer, source)

    def broadcast_all(self, buffers: Iterable[torch.Tensor | None], source: int) -> None:
        for buffer in buffers:
            if buffer is not None:
                self.broadcast(buffer, source)

    def all_to_all(self, *_: Any) -> None:
        raise AssertionError("no exchange is needed")

    def share_memory(self) -> None:
        raise AssertionError("nothing is shared here")

    def abandon(self) -> None:
        self.inner.abandon()


class Conversation:
    """What the constructor says and what its peers hear."""

    def talk(
        self,
        say: Callable[[BatchBroadcast], None],
        count: int,
        *,
        spec: BatchSpec | None = None,
        peer_spec: BatchSpec | None = None,
        ranks: tuple[int, ...] = (4, 6, 7),
    ) -> tuple[list[Message | Exception], list[int]]:
        """What the last peer hears when the constructor says ``count`` messages, and the sizes of all broadcasts."""
        group = SimulatedGroup(ranks, timeout=20)
        heard: dict[int, list[Message | Exception]] = {rank: [] for rank in ranks}

        def peer(rank: int) -> None:
            wire = BatchBroadcast(group.communicator(rank), spec if peer_spec is None else peer_spec)
            for _ in range(count):
                try:
                    heard[rank].append(wire.receive())
                except Exception as error:
                    heard[rank].append(error)
                    group.kill(rank)
                    return

        threads = [threading.Thread(target=peer, args=(rank,), daemon=True) for rank in ranks[1:]]
        for thread in threads:
            thread.start()
        counted = Counted(group.communicator(ranks[0]))
        try:
            say(BatchBroadcast(counted, spec))
        except RemoteRankError:
            if peer_spec is None:
                raise
        finally:
            for thread in threads:
                thread.join(20)
        assert [len(heard[rank]) for rank in ranks[1:]] == [count] * (len(ranks) - 1)
        return heard[ranks[-1]], counted.sizes

    def send_all(self, *batches: Any) -> Callable[[BatchBroadcast], None]:
        def say(wire: BatchBroadcast) -> None:
            for number, batch in enumerate(batches):
                wire.send(wire.prepare(batch, {**STATE, "step": number}))

        return say

    def received(self, *batches: Any, spec: BatchSpec | None = None) -> list[Any]:
        heard, _ = self.talk(self.send_all(*batches), len(batches), spec=spec)
        got = []
        for number, message in enumerate(heard):
            assert isinstance(message, Message), message
            assert message.state == {**STATE, "step": number}
            got.append(message.batch)
        return got


@pytest.fixture(scope="session")
def conversation() -> Conversation:
    return Conversation()
