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

import os
import threading
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from evenstep.comm.communicator import Abandoned, Communicator
from evenstep.comm.gather_bytes import gather_padded
from evenstep.comm.header import CLOSING, EXHAUSTED, FAILED, Header
from evenstep.comm.remote_errors import describe_error, remote_error
from evenstep.errors import RemoteRankError

__all__ = ["Owed", "Rounds"]

T = TypeVar("T", covariant=True)


class Owed(Protocol[T]):
    """Something that the other ranks wait for once a window's header is out."""

    def run(self) -> T:
        """Post it and return what came back."""


class Rounds:
    """One rank's side of the conversation of a data plane.

    Args:
        control: All ranks of the data plane.
    """

    def __init__(self, control: Communicator) -> None:
        self._control = control
        self._process = os.getpid()
        self._generation = 0
        self._open = False
        self._owed: deque[Owed[Any]] = deque()
        self._failure = (
            b""  # in words: an exception would hold the frames, and so the nodes, that it came through
        )
        self._changed = threading.Condition()
        self._inside: Counter[int] = Counter()  # how deep, by thread
        self._shut = False
        self._given_up = False

    @property
    def generation(self) -> int:
        """Streams begun on this data plane; equal on all ranks because all reset alike."""
        return self._generation

    @property
    def is_open(self) -> bool:
        """Whether the other ranks expect another header from this one."""
        return self._open

    @property
    def is_inherited(self) -> bool:
        """Whether this is a forked child, whose parent goes on with the conversation."""
        return os.getpid() != self._process

    def enter(self) -> None:
        """This thread begins to work on windows, for which it talks to the others; it may enter again inside.

        Raises:
            Abandoned: `shut`: nothing more is said.
        """
        me = threading.get_ident()
        with self._changed:
            if self._shut and me not in self._inside and len(self._control.ranks) > 1:
                raise Abandoned("this rank has left the others, and makes no more windows with them")
            self._inside[me] += 1

    def exit(self) -> None:
        """What the last `enter` of this thread began has ended."""
        me = threading.get_ident()
        with self._changed:
            self._inside[me] -= 1
            if not self._inside[me]:
                del self._inside[me]
                self._changed.notify_all()

    def shut(self, patience: float = 0.0) -> bool:
        """Let no thread enter any more, and wait for those inside: a window that is begun must be ended before `leave`.

        After `give_up` only for ``patience`` seconds.

        Returns:
            Whether no other thread is inside.
        """
        me = threading.get_ident()

        def alone() -> bool:
            return all(thread == me for thread in self._inside)

        with self._changed:
            self._shut = True
            if not self._given_up:
                self._changed.wait_for(lambda: alone() or self._given_up)
                self._changed.wait_for(alone, patience)
            return alone()

    def give_up(self) -> None:
        """Wait for nobody any more: the collectives of those inside have been abandoned."""
        with self._changed:
            self._given_up = True
            self._changed.notify_all()

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
        if self._shut:
            return  # it leaves anyway
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
        # Of this call: where one process has several streams on a plane, another of them may begin meanwhile.
        generation = self._generation
        header = replace(header, generation=generation, error_bytes=len(text))
        while True:
            rows = self._control.all_gather(header.pack())
            headers = [Header.unpack(row, rank) for row, rank in zip(rows, self._control.ranks, strict=True)]
            if any(h.error_bytes for h in headers):
                texts = gather_padded(self._control, text, [h.error_bytes for h in headers])
                if all(h.generation == generation for h in headers):
                    raise remote_error(
                        *next((t, r) for t, r in zip(texts, self._control.ranks, strict=True) if t)
                    )
            newer = [
                r for h, r in zip(headers, self._control.ranks, strict=True) if h.generation > generation
            ]
            if newer:
                raise RemoteRankError(
                    f"rank {newer[0]} has begun another stream (a new epoch or a loaded state) that this rank has not "
                    "begun: its data cannot arrive. Call iter(), load_state_dict() and set_epoch() on every rank.",
                    rank=newer[0],
                )
            if all(h.generation == generation for h in headers):
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
