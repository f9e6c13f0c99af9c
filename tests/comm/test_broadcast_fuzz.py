"""Whatever bytes come, a peer gives a batch or raises an error that says so; it never hangs, crashes or reads beyond."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.comm.broadcast import BatchBroadcast, Message
from evenstep.comm.communicator import SoloCommunicator
from evenstep.errors import RemoteRankError, WireFormatError

BATCH = {"ids": torch.arange(300), "sizes": [1, 2.5, None], "name": "é", "other": b"\x00\x01"}


class Tape(SoloCommunicator):
    """Records what a constructor broadcasts, or plays it to a peer."""

    def __init__(self, played: bytes | None = None) -> None:
        super().__init__()
        self.played = played
        self.recorded = b""

    def broadcast_all(self, buffers: Iterable[torch.Tensor | None], source: int) -> None:
        super().broadcast_all((), source)
        for buffer in buffers:
            if buffer is None:
                continue
            if self.played is None:
                self.recorded += buffer.numpy().tobytes()
                continue
            part, self.played = self.played[: buffer.numel()], self.played[buffer.numel() :]
            if len(part) < buffer.numel():
                raise RemoteRankError("no answer", rank=0)
            buffer.copy_(torch.frombuffer(bytearray(part), dtype=torch.uint8))


def recorded(batch: Any, count: int) -> bytes:
    tape = Tape()
    wire = BatchBroadcast(tape)
    for step in range(count):
        wire.send(wire.prepare(batch, {"step": step}))
    return tape.recorded


MESSAGES = recorded(BATCH, 3)


def heard(data: bytes) -> list[Message | Exception]:
    wire = BatchBroadcast(Tape(data))
    got: list[Message | Exception] = []
    for _ in range(3):
        try:
            got.append(wire.receive())
        except (WireFormatError, RemoteRankError) as error:
            got.append(error)
    return got


def test_the_recorded_messages_are_the_batches() -> None:
    got = heard(MESSAGES)
    assert [message.state for message in got if isinstance(message, Message)] == [
        {"step": n} for n in range(3)
    ]


@settings(deadline=None, max_examples=300)
@given(st.lists(st.tuples(st.integers(0, len(MESSAGES) - 1), st.integers(0, 255)), min_size=1, max_size=6))
def test_changed_bytes_give_a_batch_or_an_error_that_says_so(changes: list[tuple[int, int]]) -> None:
    data = bytearray(MESSAGES)
    for at, value in changes:
        data[at] = value
    assert len(heard(bytes(data))) == 3


@settings(deadline=None, max_examples=200)
@given(
    kind=st.integers(0, 4),
    stream=st.integers(0, 1),
    document=st.binary(max_size=40)
    | st.sampled_from([b"{}", b"[]", b"1", b'{"state":{},"scalars":[],"others":0}']),
    lengths=st.tuples(st.integers(0, 3000), st.integers(0, 3000), st.integers(0, 5000)),
)
def test_made_up_messages_are_refused(
    kind: int, stream: int, document: bytes, lengths: tuple[int, int, int]
) -> None:
    length, opaque, tail = lengths
    header = struct.pack("<4sB3xIIIQQ", b"evmb", kind, stream, length, opaque, 0, tail)
    first = heard((header + document).ljust(16384, b"\x00"))[0]
    if isinstance(first, Message):
        assert first.is_end or first.error is not None
