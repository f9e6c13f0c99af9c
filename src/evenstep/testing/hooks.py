"""A training loop with the hooks of `collectives="caller"` at places that differ from rank to rank."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

from evenstep.loader import Loader
from evenstep.testing.jobs import Seen

__all__ = ["Hooks", "train"]


class Hooks:
    """Calls the hooks of ``loader`` now and then, in any order and number."""

    def __init__(self, loader: Loader[Any], seed: int) -> None:
        self.calls: list[Callable[[], None]] = [loader.prefetch_plan, loader.prefetch]
        self.random: random.Random = random.Random(seed)

    def maybe(self) -> None:
        """Call none, one or some of them."""
        for _ in range(self.random.choice([0, 0, 1, 1, 2, 5])):
            self.random.choice(self.calls)()
            if self.random.random() < 0.3:
                time.sleep(0.0002)  # as a training step would, so that the thread gets somewhere


def train(loader: Loader[Any], seed: int, meet: Callable[[], Any], batches: int | None = None) -> list[Seen]:
    """An epoch, or the next ``batches`` of it; ``meet`` is what the training step has for a collective."""
    hooks, seen = Hooks(loader, seed), []
    for batch in loader:
        seen.append(Seen.of(batch, loader))
        hooks.maybe()
        meet()
        hooks.maybe()
        if len(seen) == batches:
            break
    return seen
