"""Moving the payload of one micro-batch: one variable-split all-to-all, sized from the plan alone."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from evenstep.comm.buffers import Pool
from evenstep.comm.codec import Codec
from evenstep.comm.communicator import Communicator
from evenstep.comm.remote_errors import describe_error, remote_error
from evenstep.errors import WireFormatError

__all__ = ["CHUNK_BYTES", "Exchange", "Moves", "Stamp"]

CHUNK_BYTES = 1 << 30  # gloo and NCCL count in 32 bits somewhere below; stay clear of 2 GiB
_MAGIC = 0x7365_676D_656E_7431  # "segment1"
# Magic, generation, step, micro-batch, samples, bytes, failed, bytes of error.
_PREAMBLE = struct.Struct("<8q")
_HEAD = _PREAMBLE.size
_FINE, _FAILED = 0, 1


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
        moves = self._moves
        outgoing, sizes_out = self._segments(moves.holders, moves.targets)
        incoming, sizes_in = self._segments(moves.targets, moves.holders)
        memory = getattr(self._communicator, "memory", None)
        send = (self._pool if memory is None else memory).take(sum(sizes_out))
        receive = self._pool.take(sum(sizes_in))
        failure: Exception | None = None
        for part, index in zip(_parts(send, sizes_out), outgoing, strict=True):
            if len(index):
                failure = self._write(part, index) or failure
        self._transfer(send, sizes_out, receive, sizes_in)
        del send
        if failure is not None:
            raise failure
        received: dict[int, Any] = {}
        parts = _parts(receive, sizes_in)
        for part, index, rank in zip(parts, incoming, self._communicator.ranks, strict=True):
            if len(index):
                received.update(zip(moves.ids[index].tolist(), self._read(part, index, rank), strict=True))
        return received

    def _segments(
        self, mine: npt.NDArray[np.int32], peers: npt.NDArray[np.int32]
    ) -> tuple[list[npt.NDArray[np.int64]], list[int]]:
        """Places in ``moves`` of the samples shared with each peer, by group position, and bytes of their segments."""
        moves = self._moves
        index = (mine == self._communicator.position).nonzero()[0]
        theirs = peers[index]
        counts = np.bincount(theirs, minlength=len(self._communicator.ranks)).tolist()
        if max(counts) < len(index):
            index = index[theirs.argsort(kind="stable")]
        nbytes, structures = moves.nbytes[index], moves.structures[index]
        bounds = list(pairwise([0, *accumulate(counts)]))
        sizes = [
            _HEAD + self._codec.segment_bytes(nbytes[a:b], structures[a:b]) if a < b else 0 for a, b in bounds
        ]
        return [index[a:b] for a, b in bounds], sizes

    def _size(self, index: npt.NDArray[np.int64]) -> int:
        return _HEAD + self._codec.segment_bytes(self._moves.nbytes[index], self._moves.structures[index])

    def _preamble(self, count: int, length: int, flag: int, text_bytes: int = 0) -> list[int]:
        stamp = self._stamp
        return [_MAGIC, stamp.generation, stamp.step, stamp.micro_batch, count, length, flag, text_bytes]

    def _write(self, part: torch.Tensor, index: npt.NDArray[np.int64]) -> Exception | None:
        """Encode one segment; a failure is told to its receiver, who would otherwise wait for ever."""
        failure: Exception | None = None
        preamble, body = self._preamble(len(index), part.numel(), _FINE), part[_HEAD:]
        try:
            self._codec.encode(list(map(self._sample, self._moves.ids[index].tolist())), body)
        except Exception as error:
            failure = error
            text = describe_error(error, self._communicator.ranks[self._communicator.position])
            text = text if len(text) <= body.numel() else b""
            body.numpy()[: len(text)] = np.frombuffer(text, dtype=np.uint8)
            preamble = self._preamble(len(index), part.numel(), _FAILED, len(text))
        _PREAMBLE.pack_into(part.numpy().data, 0, *preamble)
        return failure

    def _read(self, part: torch.Tensor, index: npt.NDArray[np.int64], rank: int) -> list[Any]:
        told = list(_PREAMBLE.unpack_from(part.numpy().data))
        if told[:-1] == self._preamble(len(index), part.numel(), _FAILED)[:-1]:
            raise remote_error(part[_HEAD:].numpy()[: max(0, told[-1])].tobytes(), rank)
        expected = self._preamble(len(index), part.numel(), _FINE)
        if told != expected:
            raise WireFormatError(
                f"a segment from rank {rank} begins with {told}, the plan says {expected} (magic, generation, step, "
                "micro-batch, samples, bytes, failed, bytes of error): it belongs to another exchange, and its bytes are not used"
            )
        return self._codec.decode(part[_HEAD:], len(index))

    def _transfer(
        self, send: torch.Tensor, sizes_out: list[int], receive: torch.Tensor, sizes_in: list[int]
    ) -> None:
        chunks = self._chunks()
        if chunks is None:
            self._communicator.all_to_all(send, sizes_out, receive, sizes_in)
            return
        # One peer at a time: what a collective moves then lies in one piece, and is not copied once more.
        me, size = self._communicator.position, len(self._communicator.ranks)
        senders, receivers = _parts(send, sizes_out), _parts(receive, sizes_in)
        for shift, count in chunks.items():
            target, source = (me + shift) % size, (me - shift) % size
            for start in range(0, count * CHUNK_BYTES, CHUNK_BYTES):
                out = senders[target][start : start + CHUNK_BYTES]
                into = receivers[source][start : start + CHUNK_BYTES]
                splits_out, splits_in = [0] * size, [0] * size
                splits_out[target], splits_in[source] = out.numel(), into.numel()
                self._communicator.all_to_all(out, splits_out, into, splits_in)

    def _chunks(self) -> dict[int, int] | None:
        """None: one collective moves all. Else in how many to send to the peer so many positions on, by distance.

        Equal on all ranks, as the moves are.
        """
        moves, size = self._moves, len(self._communicator.ranks)
        if int(moves.nbytes.sum()) < CHUNK_BYTES // 2:  # all ranks together: the usual case, seen at once
            return None
        busiest = max(np.bincount(peers, moves.nbytes).max() for peers in (moves.holders, moves.targets))
        if busiest < CHUNK_BYTES // 2:  # what else is in a rank's segments is less than that
            return None
        pairs, inverse = np.unique(moves.holders.astype(np.int64) * size + moves.targets, return_inverse=True)
        order = inverse.argsort(kind="stable")
        bounds = np.cumsum(np.bincount(inverse))[:-1]
        lengths = np.array([self._size(index) for index in np.split(order, bounds)])
        holders, targets = np.divmod(pairs, size)
        if max(np.bincount(holders, lengths).max(), np.bincount(targets, lengths).max()) <= CHUNK_BYTES:
            return None
        shifts = (targets - holders) % size
        longest = {shift: int(lengths[shifts == shift].max()) for shift in np.unique(shifts).tolist()}
        return {shift: -(-length // CHUNK_BYTES) for shift, length in longest.items()}


def _parts(buffer: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    return [buffer[end - size : end] for end, size in zip(accumulate(sizes), sizes, strict=True)]
