"""How a stage that is ahead of its consumer brings its source to the consumer's next epoch."""

from __future__ import annotations

from typing import Any

from evenstep.cursor import find_cursor, next_epoch_state

__all__ = ["epoch_after"]


def epoch_after(handed: dict[str, Any] | None) -> tuple[dict[str, Any] | None, ...]:
    """The resets, in order, that bring a source to the epoch after the state ``handed``.

    One where the state holds a cursor: ranks count resets, so all must make the same number of them.
    """
    if handed is None:
        return (None,)
    try:
        find_cursor(handed)
    except ValueError:
        return (handed, None)
    following: dict[str, Any] = next_epoch_state(handed)
    return (following,)
