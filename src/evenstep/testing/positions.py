"""A source whose items are their positions: shows what a stage loses, doubles or takes out of order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchdata.nodes import BaseNode

from evenstep.cursor import Cursor

__all__ = ["Positions"]


class Positions(BaseNode[Any]):
    """Epochs of ``make((epoch, position))``, under a cursor; it may fail, or not be ready.

    Args:
        make: What the item at a position is.
        size: Items of an epoch.
        fail_at: The position at which it raises OSError.
        ready: What `ready` answers, one after the other, then True; None: it has no such method.

    Attributes:
        resets: What it was reset to.
        pulls: How often it was asked for an item.
    """

    def __init__(
        self,
        make: Callable[[tuple[int, int]], Any],
        size: int = 5,
        fail_at: int | None = None,
        ready: list[bool] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torchdata has no types
        self.make: Callable[[tuple[int, int]], Any] = make
        self.size: int = size
        self.fail_at: int | None = fail_at
        self.at: Cursor = Cursor(global_batch_size=1)
        self.resets: list[dict[str, Any] | None] = []
        self.pulls: int = 0
        if ready is not None:
            self.ready: Callable[[], bool] = lambda: ready.pop(0) if ready else True

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        """Go to ``initial_state``, or to the next epoch."""
        super().reset(initial_state)
        self.resets.append(initial_state)
        self.at = self.at.next_epoch() if initial_state is None else Cursor.from_dict(initial_state)

    def next(self) -> Any:
        """The item at the next position."""
        self.pulls += 1
        position = self.at.consumed_samples
        if position == self.fail_at:
            raise OSError("disk gone")
        if position >= self.size:
            raise StopIteration
        self.at = Cursor(epoch=self.at.epoch, consumed_samples=position + 1, global_batch_size=1)
        return self.make((self.at.epoch, position))

    def get_state(self) -> dict[str, Any]:
        """The cursor."""
        return self.at.to_dict()
