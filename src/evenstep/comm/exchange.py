"""Moving the payload of one micro-batch: one variable-split all-to-all, sized from the plan alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from evenstep.comm.codec import Codec
from evenstep.comm.communicator import Communicator
from evenstep.comm.rounds import describe_error, remote_error
from evenstep.errors import WireFormatError

__all__ = ["CHUNK_BYTES", "Exchange", "Moves", "Pool", "Stamp"]

CHUNK_BYTES = 1 << 30  # gloo and NCCL count in 32 bits somewhere below; stay clear of 2 GiB
_MAGIC = 0x7365_676D_656E_7431  # "segment1"
_PREAMBLE = 64
_FINE, _FAILED = 0, 1


class Pool(Protocol):
    """Where buffers come from; see `evenstep.comm.buffers`."""

    def take(self, nbytes: int) -> torch.Tensor:
        """A uint8 buffer that nobody else can see."""


@dataclass(frozen=True, slots=True)
class Moves:
    """The samples of one exchange that change their rank, in an order that all ranks share.

    Attributes:
        ids: Position of each sample in its window, int64 ``[k]``.
        holders: Group position that holds it, int32 ``[k]``.
        targets: Group position that needs it, int32 ``[k]``.
        nbytes: Its size by the codec, int64 ``[k]``.
        structures: Its structure by the codec, int64 ``[k]``.
    """

    ids: npt.NDArray[np.int64]
    holders: npt.NDArray[np.int32]
    targets: npt.NDArray[np.int32]
    nbytes: npt.NDArray[np.int64]
    structures: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Stamp:
    """What a segment says of itself, so that a stale or foreign one is recognised."""

    generation: int
    step: int
    micro_batch: int


class Exchange:
    """One all-to-all, ready to run: whoever owes it can post it without knowing anything else.

    Args:
        communicator: The group; all of it runs the same exchange.
        codec: How samples become bytes.
        pool: Where buffers come from.
        stamp: Where in the stream this is.
        moves: What moves.
        sample: The local sample with a given position in the window.
    """

    def __init__(
        self,
        communicator: Communicator,
        codec: Codec,
        pool: Pool,
        stamp: Stamp,
        moves: Moves,
        sample: Callable[[int], Any],
    ) -> None:
        self._communicator = communicator
        self._codec = codec
        self._pool = pool
        self._stamp = stamp
        self._moves = moves
        self._sample = sample

    def run(self) -> dict[int, Any]:
        """Send, receive and decode; the received samples by their position in the window.

        Raises:
            RemoteRankError: Another rank could not encode what it owed.
            WireFormatError: What arrived is not what the plan says.
        """
        moves, me = self._moves, self._communicator.position
        outgoing = self._segments(moves.holders == me, moves.targets)
        incoming = self._segments(moves.targets == me, moves.holders)
        sizes_out = [self._size(ids) for ids in outgoing]
        sizes_in = [self._size(ids) for ids in incoming]
        send = self._pool.take(sum(sizes_out))
        receive = self._pool.take(sum(sizes_in))
        failure: Exception | None = None
        for part, index in zip(torch.split(send, sizes_out), outgoing, strict=True):
            if len(index):
                failure = self._write(part, index) or failure
        self._transfer(send, sizes_out, receive, sizes_in)
        del send
        if failure is not None:
            raise failure
        received: dict[int, Any] = {}
        parts = torch.split(receive, sizes_in)
        for part, index, rank in zip(parts, incoming, self._communicator.ranks, strict=True):
            if len(index):
                received.update(zip(moves.ids[index].tolist(), self._read(part, index, rank), strict=True))
        return received

    def _segments(
        self, mine: npt.NDArray[np.bool_], peers: npt.NDArray[np.int32]
    ) -> list[npt.NDArray[np.int64]]:
        """Places in ``moves`` of the samples shared with each peer, by group position."""
        index = np.flatnonzero(mine)
        index = index[np.argsort(peers[index], kind="stable")]
        bounds = np.searchsorted(peers[index], np.arange(1, len(self._communicator.ranks)))
        return np.split(index, bounds)

    def _size(self, index: npt.NDArray[np.int64]) -> int:
        if not len(index):
            return 0
        moves = self._moves
        return _PREAMBLE + self._codec.segment_bytes(moves.nbytes[index], moves.structures[index])

    def _preamble(self, count: int, length: int, flag: int, text_bytes: int = 0) -> list[int]:
        stamp = self._stamp
        return [_MAGIC, stamp.generation, stamp.step, stamp.micro_batch, count, length, flag, text_bytes]

    def _write(self, part: torch.Tensor, index: npt.NDArray[np.int64]) -> Exception | None:
        """Encode one segment; a failure is told to its receiver, who would otherwise wait for ever."""
        failure: Exception | None = None
        preamble, body = self._preamble(len(index), part.numel(), _FINE), part[_PREAMBLE:]
        try:
            self._codec.encode([self._sample(i) for i in self._moves.ids[index].tolist()], body)
        except Exception as error:
            failure = error
            text = describe_error(error, self._communicator.ranks[self._communicator.position])
            text = text if len(text) <= body.numel() else b""
            body.numpy()[: len(text)] = np.frombuffer(text, dtype=np.uint8)
            preamble = self._preamble(len(index), part.numel(), _FAILED, len(text))
        part[:_PREAMBLE] = torch.tensor(preamble, dtype=torch.int64).view(torch.uint8)
        return failure

    def _read(self, part: torch.Tensor, index: npt.NDArray[np.int64], rank: int) -> list[Any]:
        told = part[:_PREAMBLE].view(torch.int64).tolist()
        if told[:-1] == self._preamble(len(index), part.numel(), _FAILED)[:-1]:
            raise remote_error(part[_PREAMBLE:].numpy()[: max(0, told[-1])].tobytes(), rank)
        expected = self._preamble(len(index), part.numel(), _FINE)
        if told != expected:
            raise WireFormatError(
                f"a segment from rank {rank} begins with {told}, the plan says {expected} (magic, generation, step, "
                "micro-batch, samples, bytes, failed, bytes of error): it belongs to another exchange, and its bytes are not used"
            )
        return self._codec.decode(part[_PREAMBLE:], len(index))

    def _transfer(
        self, send: torch.Tensor, sizes_out: list[int], receive: torch.Tensor, sizes_in: list[int]
    ) -> None:
        chunks = self._chunks()
        if chunks == 1:
            self._communicator.all_to_all(send, sizes_out, receive, sizes_in)
            return
        limit = CHUNK_BYTES // len(self._communicator.ranks)
        senders, receivers = torch.split(send, sizes_out), torch.split(receive, sizes_in)
        for start in range(0, chunks * limit, limit):
            out = [part[start : start + limit] for part in senders]
            into = [part[start : start + limit] for part in receivers]
            splits = [part.numel() for part in into]
            buffer = self._pool.take(sum(splits))
            self._communicator.all_to_all(torch.cat(out), [part.numel() for part in out], buffer, splits)
            for part, piece in zip(into, torch.split(buffer, splits), strict=True):
                part.copy_(piece)

    def _chunks(self) -> int:
        """In how many collectives: one, unless a rank would send or receive too much; equal on all ranks."""
        moves = self._moves
        if int(moves.nbytes.sum()) < CHUNK_BYTES // 2:
            return 1
        size = len(self._communicator.ranks)
        pairs, inverse = np.unique(moves.holders.astype(np.int64) * size + moves.targets, return_inverse=True)
        largest = max(self._size(np.flatnonzero(inverse == p)) for p in range(len(pairs)))
        return max(1, -(-largest // (CHUNK_BYTES // size)))
