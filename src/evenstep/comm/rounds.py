"""The status-first protocol: every window begins with one small header from every rank of the data plane.

```
 rank 0   header(ok) ── exchanges of the window ── header(ok) ── ... ── header(exhausted)
 rank 1   header(ok) ── exchanges of the window ── header(failed)       -> RemoteRankError everywhere
```

What a rank has posted depends only on what was delivered, never on timing: who posted a window's header posts
all its exchanges, also when it leaves, then one last header, then nothing. A header carries the generation of
its stream, so that the windows of two streams never meet.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from evenstep.comm.communicator import Abandoned, Communicator
from evenstep.errors import RemoteRankError, SampleError

__all__ = [
    "CLOSING",
    "EXHAUSTED",
    "FAILED",
    "OK",
    "Header",
    "Rounds",
    "describe_error",
    "gather_bytes",
    "remote_error",
]

OK, EXHAUSTED, FAILED, CLOSING = range(4)
_MAGIC = 0x6576_656E_7374_6570  # "evenstep"
_ERROR_BYTES = 4096  # of an error message, so that a monstrous one cannot stop the ranks a second time

T = TypeVar("T", covariant=True)


class Owed(Protocol[T]):
    """Something that the other ranks wait for once a window's header is out."""

    def run(self) -> T:
        """Post it and return what came back."""


@dataclass(frozen=True, slots=True)
class Header:
    """What a rank says at the beginning of a window; every field is an int64 on the wire.

    Attributes:
        status: OK, EXHAUSTED, FAILED or CLOSING.
        epoch: Epoch of the window.
        step: Optimizer step of the window.
        consumed: Samples of the epoch used before this step.
        first: First micro-batch of the window inside the step.
        count: Micro-batches of the window; 0 if only the plan will tell.
        samples: Samples that this rank read.
        column_bytes: Size of this rank's metadata columns.
        schema: Digest of the names and number of those columns.
        dropped: Samples without tokens that are left out.
        skipped: Samples that could not be read and are left out under a named option.
        truncated: Samples that are cut to a row.
        plan: Digest of the previous window's plan; 0 if there was none.
        loss_tokens: Loss tokens of this rank's samples; -1 if unknown.
        error_bytes: Size of the error text that follows; 0 unless FAILED.
        generation: Which stream this header belongs to; filled in by `Rounds`.
    """

    status: int
    epoch: int = 0
    step: int = 0
    consumed: int = 0
    first: int = 0
    count: int = 0
    samples: int = 0
    column_bytes: int = 0
    schema: int = 0
    dropped: int = 0
    skipped: int = 0
    truncated: int = 0
    plan: int = 0
    loss_tokens: int = -1
    error_bytes: int = 0
    generation: int = 0

    @property
    def place(self) -> tuple[int, int, int, int, int]:
        """Where in the stream the window is: equal on all ranks."""
        return (self.epoch, self.step, self.consumed, self.first, self.count)

    def pack(self) -> torch.Tensor:
        """As uint8."""
        values = [_MAGIC] + [_signed(getattr(self, f.name)) for f in fields(self)]
        return torch.tensor(values, dtype=torch.int64).view(torch.uint8)

    @classmethod
    def unpack(cls, row: torch.Tensor, rank: int) -> Header:
        """From uint8; a row of another program is a RemoteRankError."""
        values = row.view(torch.int64).tolist()
        if values[0] != _MAGIC:
            raise RemoteRankError(
                f"rank {rank} sent no evenstep header: its program does other collectives here", rank=rank
            )
        return cls(*values[1:])


def _signed(value: int) -> int:
    """A digest is unsigned, the wire is int64; equality is all that matters."""
    return value - (1 << 64) if value >= 1 << 63 else value


def gather_bytes(communicator: Communicator, data: bytes) -> list[bytes]:
    """Every rank's bytes by position: the lengths first, then one padded gather."""
    size = torch.tensor([len(data)], dtype=torch.int64).view(torch.uint8)
    sizes = communicator.all_gather(size).view(torch.int64).flatten().tolist()
    return _gather_padded(communicator, data, sizes)


def _gather_padded(communicator: Communicator, data: bytes, sizes: Sequence[int]) -> list[bytes]:
    row = torch.zeros(max(max(sizes), 1), dtype=torch.uint8)
    row.numpy()[: len(data)] = np.frombuffer(data, dtype=np.uint8)
    rows = communicator.all_gather(row).numpy()
    return [rows[p, :size].tobytes() for p, size in enumerate(sizes)]


class Rounds:
    """One rank's side of the conversation of a data plane.

    Args:
        control: All ranks of the data plane.
    """

    def __init__(self, control: Communicator) -> None:
        self._control = control
        self._generation = 0
        self._open = False
        self._owed: deque[Owed[Any]] = deque()
        self._failure = (
            b""  # in words: an exception would hold the frames, and so the nodes, that it came through
        )

    @property
    def generation(self) -> int:
        """Streams begun on this data plane; equal on all ranks because all reset alike."""
        return self._generation

    @property
    def is_open(self) -> bool:
        """Whether the other ranks expect another header from this one."""
        return self._open

    def restart(self) -> None:
        """Leave the stream under way, if any, and begin the next generation."""
        self.leave()
        self._generation += 1
        self._failure = b""

    def begin(
        self, header: Header, error: BaseException | None = None, *, uneven: str = "error"
    ) -> dict[int, Header]:
        """Post this rank's header and return everybody's by global rank.

        The stream ends here, for every rank alike, if any of them is EXHAUSTED: under ``uneven="stop"`` also
        where others still have a window.

        Raises:
            RemoteRankError: A rank failed, left, or stands somewhere else; on every rank alike.
        """
        self._open = True
        try:
            headers = self._talk(header, b"" if error is None else self._describe(error))
            self._judge(headers, uneven)
        except BaseException:
            self._close()
            raise
        if any(h.status == EXHAUSTED for h in headers):
            self._close()
        return dict(zip(self._control.ranks, headers, strict=True))

    def owe(self, exchanges: Sequence[Owed[Any]]) -> None:
        """Promise the exchanges of the window whose header is out, in order."""
        self._owed.extend(exchanges)

    def pay(self, exchange: Owed[T]) -> T:
        """Post the next promised exchange."""
        first = self._owed.popleft()
        assert first is exchange, "exchanges are posted in the order they were promised"
        return exchange.run()

    def fail(self, error: BaseException) -> None:
        """Remember why this rank is going to leave, for the header that tells the others."""
        self._failure = self._failure or self._describe(error)

    def leave(self) -> None:
        """Post what is owed, tell the others that this rank leaves, then post nothing more.

        Waits for the others to reach their next header. Errors of theirs do not matter any more.
        """
        if not self._open:
            return
        try:
            while self._owed:
                # What it brought is dropped, whatever is wrong with it; the ranks behind it still wait for the next.
                with suppress(Exception):
                    self._owed.popleft().run()
            status = FAILED if self._failure else CLOSING
            self._talk(Header(status), self._failure)
        except (RemoteRankError, Abandoned):
            pass
        finally:
            self._close()

    def _close(self) -> None:
        self._open = False
        self._owed.clear()

    def _describe(self, error: BaseException) -> bytes:
        return describe_error(error, self._control.ranks[self._control.position])

    def _talk(self, header: Header, text: bytes) -> list[Header]:
        header = replace(header, generation=self._generation, error_bytes=len(text))
        while True:
            rows = self._control.all_gather(header.pack())
            headers = [Header.unpack(row, rank) for row, rank in zip(rows, self._control.ranks, strict=True)]
            if any(h.error_bytes for h in headers):
                texts = _gather_padded(self._control, text, [h.error_bytes for h in headers])
                if all(h.generation == self._generation for h in headers):
                    raise remote_error(
                        *next((t, r) for t, r in zip(texts, self._control.ranks, strict=True) if t)
                    )
            newer = [
                r
                for h, r in zip(headers, self._control.ranks, strict=True)
                if h.generation > self._generation
            ]
            if newer:
                raise RemoteRankError(
                    f"rank {newer[0]} has begun another stream (a new epoch or a loaded state) that this rank has not "
                    "begun: its data cannot arrive. Call iter(), load_state_dict() and set_epoch() on every rank.",
                    rank=newer[0],
                )
            if all(h.generation == self._generation for h in headers):
                return headers
            # A rank answered with the header of a stream that it had already posted and is about to leave.

    def _judge(self, headers: list[Header], uneven: str) -> None:
        by_rank = dict(zip(self._control.ranks, headers, strict=True))
        if {h.status for h in headers} <= {EXHAUSTED, CLOSING}:
            return  # who left had taken the last batch: nothing is missing
        closing = [rank for rank, h in by_rank.items() if h.status == CLOSING]
        if closing:
            raise RemoteRankError(
                f"rank {closing[0]} left the loader before the end of the epoch (a break, close() or an exit); the "
                "remaining batches of this epoch cannot be built without it. Leave the loop on the same step on "
                "every rank.",
                rank=closing[0],
            )
        ended = [rank for rank, h in by_rank.items() if h.status == EXHAUSTED]
        if ended and uneven == "stop":
            return
        if ended and len(ended) < len(headers):
            going = [rank for rank in by_rank if rank not in ended]
            raise RemoteRankError(
                f"the stream of rank {ended[0]} has ended while rank {going[0]} still has data: the ranks would take "
                "different numbers of steps. Give every rank the same number of steps, or choose uneven='stop'.",
                rank=ended[0],
            )
        first = headers[0]
        for rank, h in by_rank.items():
            if h.place != first.place or h.schema != first.schema:
                raise RemoteRankError(
                    f"rank {rank} is at (epoch, step, consumed samples, micro-batch, count) {h.place} with columns "
                    f"{h.schema:#x}, rank {self._control.ranks[0]} at {first.place} with {first.schema:#x}: their "
                    "windows do not belong together. Load the same state on every rank.",
                    rank=rank,
                )


def describe_error(error: BaseException, rank: int) -> bytes:
    """An error as the others will tell it: where it first happened, in its own words."""
    sample = None
    if isinstance(error, SampleError):
        sample, error = error.sample, error.__cause__ or error
    told = {"rank": rank, "type": type(error).__name__, "message": str(error), "sample": sample}
    if isinstance(error, RemoteRankError) and error.error_type:
        told = {
            "rank": error.rank,
            "type": error.error_type,
            "message": error.error_message,
            "sample": error.sample,
        }
    message = str(told["message"])
    while len(text := json.dumps(told).encode()) > _ERROR_BYTES:
        message = message[: len(message) // 2]
        told["message"] = message + " [...]"
    return text


def remote_error(text: bytes, sender: int = -1) -> RemoteRankError:
    """What a rank raises that was told of another's error, in ``text``, by the rank ``sender`` if known."""
    try:
        told = json.loads(text)
        told = {key: told[key] for key in ("rank", "type", "message", "sample")}
    except (ValueError, TypeError, KeyError):
        return RemoteRankError(
            f"{'another rank' if sender < 0 else f'rank {sender}'} failed and could not say why; its own error is in "
            "its output",
            rank=sender,
        )
    where = "" if told["sample"] is None else f" at sample {told['sample']}"
    return RemoteRankError(
        f"rank {told['rank']} failed{where}: {told['type']}: {told['message']} (every rank stops here; the traceback "
        f"is on rank {told['rank']})",
        rank=told["rank"],
        error_type=told["type"],
        error_message=told["message"],
        sample=told["sample"],
    )
