"""Contenders that take turns, so that a busy machine disturbs all alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import numpy.typing as npt
import torch

from evenstep.comm.communicator import Communicator

__all__ = ["Turns"]

_CLOCK = 1e-7  # seconds that can be told from none
_MEETINGS = 5  # measured in each turn, as they are short and vary


@dataclass(frozen=True, slots=True)
class Turns:
    """What a run of each contender took in each turn: seconds until all ranks were done, float64 ``[turns, contenders]``."""

    names: tuple[str, ...]
    times: npt.NDArray[np.float64]

    @classmethod
    def take(
        cls,
        communicator: Communicator,
        repeats: int,
        in_a_row: int = 1,
        **contenders: Callable[[], object],
    ) -> Turns:
        """Run all of them ``repeats`` times, one after the other; in its turn each runs ``in_a_row`` times.

        The time is taken from a common start of all ranks until the last one is done, less what meeting takes: ranks that
        share a core also wait for each other. Several runs in a row are what a loader does, and each contender finds its
        own memory in the caches, not only those that share buffers with the one before them.
        """
        times: list[list[float]] = []
        for turn in range(repeats + 1):
            row = [_timed(communicator, lambda: None, 1) for _ in range(_MEETINGS)]
            row += [_timed(communicator, contender, in_a_row) for contender in contenders.values()]
            if turn:  # the first one touches fresh memory
                times.append(row)
        mine = torch.tensor(times, dtype=torch.float64)
        everybody = communicator.all_gather(mine.view(torch.uint8).flatten()).view(torch.float64)
        slowest = everybody.view(-1, *mine.shape).amax(0).numpy()
        meeting = np.median(slowest[:, :_MEETINGS])
        return cls(tuple(contenders), np.maximum(slowest[:, _MEETINGS:] - meeting, _CLOCK) / in_a_row)

    def seconds(self) -> dict[str, float]:
        """The median of each contender."""
        return dict(zip(self.names, np.median(self.times, axis=0).tolist(), strict=True))

    def ratio(self, *parts: str, to: str) -> float:
        """The median over the turns of the sum of ``parts`` over ``to`` in the same turn."""
        column = {name: self.times[:, at] for at, name in enumerate(self.names)}
        return float(np.median(np.sum([column[name] for name in parts], axis=0) / column[to]))


def _timed(communicator: Communicator, contender: Callable[[], object], in_a_row: int) -> float:
    _meet(communicator)
    begin = perf_counter()
    for _ in range(in_a_row):
        contender()
    _meet(communicator)
    return perf_counter() - begin


def _meet(communicator: Communicator) -> None:
    communicator.all_gather(torch.zeros(1, dtype=torch.uint8))
