"""A note in a group's store: who waits for a rank that left without a word in the group hears of it within seconds."""

from __future__ import annotations

import json
import threading
import time
from contextlib import suppress
from typing import Any

import torch.distributed as dist

__all__ = ["Goodbye"]

_KEY = "evenstep/left"
_FIRST_LOOK = 1.0  # seconds that a rank waits before it looks; then twice as long each time


class Goodbye:
    """The note of one group. A collective that nobody answers would stay behind for ever; a note does not.

    Args:
        group: The process group; its own part of the store holds the note.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._looking: threading.Thread | None = None
        self._found: list[bytes] = []

    def say(self, finished: int, rank: int) -> None:
        """``rank`` takes part in no collective of the group after the first ``finished``."""
        with suppress(Exception):  # without a store they wait until the timeout
            _store_of(self._group).set(_KEY, json.dumps([finished, rank]))

    def listen(self) -> Ear:
        """For one wait, from now on."""
        return Ear(self)

    def look(self) -> None:
        """In a thread: the store of a rank that hangs does not answer, and a wait has an end of its own."""
        if self._looking is None or not self._looking.is_alive():
            args = (self._group, self._found)
            self._looking = threading.Thread(target=_read, args=args, name="evenstep-look", daemon=True)
            self._looking.start()

    def found(self) -> tuple[int, int] | None:
        """What the last look has found: ``finished`` and ``rank`` of `say`."""
        if not self._found:
            return None
        finished, rank = json.loads(self._found.pop())
        return finished, rank


class Ear:
    """One wait, in which the note is looked for less and less often."""

    def __init__(self, goodbye: Goodbye) -> None:
        self._goodbye = goodbye
        self._pause = _FIRST_LOOK
        self._next = time.monotonic() + self._pause

    def heard(self) -> tuple[int, int] | None:
        """Look if it is time, and say what an earlier look has found."""
        if time.monotonic() > self._next:
            self._goodbye.look()
            self._pause *= 2
            self._next = time.monotonic() + self._pause
        return self._goodbye.found()


def _store_of(group: dist.ProcessGroup) -> Any:
    """The group's own part of the store; not kept, since on rank 0 it holds the port of the whole world."""
    return dist.distributed_c10d._get_process_group_store(group)


def _read(group: dist.ProcessGroup, found: list[bytes]) -> None:
    with suppress(Exception):  # the store is gone with its process, and then so is a connection
        store = _store_of(group)
        if store.check([_KEY]):
            found.append(store.get(_KEY))
