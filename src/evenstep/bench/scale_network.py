"""What collectives take on a network that nobody has at hand: the alpha-beta model, with its two constants."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Network"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Seconds by the alpha-beta model (Hockney, 1994): ``alpha`` a message and ``beta`` a byte, one port a rank.

    The number of messages is that of gloo's algorithms: a ring for gathers, a tree for broadcasts, and a message to
    each other rank in an all-to-all, whether or not there is anything to send.

    Attributes:
        alpha: Seconds a message.
        beta: Seconds a byte of a rank.
    """

    alpha: float
    beta: float

    def all_gather(self, ranks: int, nbytes: int) -> float:
        """Every rank hands its ``nbytes`` to all others."""
        return (ranks - 1) * (self.alpha + self.beta * nbytes)

    def broadcast(self, ranks: int, nbytes: int) -> float:
        """One rank hands ``nbytes`` to all others."""
        return math.ceil(math.log2(ranks)) * (self.alpha + self.beta * nbytes)

    def all_to_all(self, ranks: int, nbytes: float) -> float:
        """Each rank has something for each other; ``nbytes`` is what the busiest one sends or receives."""
        return (ranks - 1) * self.alpha + self.beta * nbytes
