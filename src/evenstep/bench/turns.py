"""Contenders that take turns, so that a busy machine disturbs all alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from evenstep.comm.communicator import Communicator

__all__ = ["Turns"]


@dataclass(frozen=True, slots=True)
class Turns:
    """What each contender took in each turn: seconds of the slowest rank, float64 ``[turns, contenders]``."""

    names: tuple[str, ...]
    times: npt.NDArray[np.float64]

    @classmethod
    def take(cls, communicator: Communicator, repeats: int, **contenders: Callable[[], object]) -> Turns:
        """Run all of them ``repeats`` times, one after the other, each from a common start of all ranks."""
        times: list[list[float]] = []
        for turn in range(repeats + 1):
            row: list[float] = []
            for contender in contenders.values():
                communicator.all_gather(torch.zeros(1, dtype=torch.uint8))
                begin = perf_counter()
                result: Any = contender()
                row.append(perf_counter() - begin)
                del result  # its end belongs to whoever uses it
            if turn:  # the first one touches fresh memory
                times.append(row)
        mine = torch.tensor(times, dtype=torch.float64)
        everybody = communicator.all_gather(mine.view(torch.uint8).flatten()).view(torch.float64)
        return cls(tuple(contenders), everybody.view(-1, *mine.shape).amax(0).numpy())

    def seconds(self) -> dict[str, float]:
        """The median of each contender."""
        return dict(zip(self.names, np.median(self.times, axis=0).tolist(), strict=True))

    def ratio(self, *parts: str, to: str) -> float:
        """The median over the turns of the sum of ``parts`` over ``to`` in the same turn."""
        column = {name: self.times[:, at] for at, name in enumerate(self.names)}
        return float(np.median(np.sum([column[name] for name in parts], axis=0) / column[to]))
