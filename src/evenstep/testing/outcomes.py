"""What became of the ranks of a multi-process run, as values and as the text that a person reads."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from signal import Signals
from typing import Any, Generic, TypeVar

__all__ = ["Outcome", "RankDied", "RanksFailed", "describe", "exit_name"]

T = TypeVar("T")


class RankDied(RuntimeError):  # noqa: N818 - it is what happened, as in RanksFailed
    """A rank's process ended without a result, or with an exit code other than 0 after its result."""


class RanksFailed(RuntimeError):  # noqa: N818 - plural of what happened
    """At least one rank raised, died, or was killed at the deadline.

    Attributes:
        outcomes: What became of each rank, by rank.
        errors: Exception of each failed rank.
        exit_codes: Exit code of each rank; negative is the number of the signal that ended it.
    """

    def __init__(self, message: str, outcomes: list[Outcome[Any]], errors: dict[int, BaseException]) -> None:
        super().__init__(message)
        self.outcomes = outcomes
        self.errors = errors
        self.exit_codes: list[int] = [outcome.exit_code for outcome in outcomes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome(Generic[T]):
    """What became of one rank.

    Attributes:
        value: What the function returned; None if it did not.
        error: What it raised; `RankDied` if its process ended by itself, `TimeoutError` if it was killed at
            the deadline; None if all went well. An exception that cannot be pickled arrives as a `RuntimeError`
            with its type and text.
        traceback: Where it raised, crashed or hung (a hang with the stacks of all its threads).
        exit_code: Exit code of its process; negative is the number of the signal that ended it.
        seconds: How long the rank ran.
    """

    value: T | None
    error: BaseException | None
    traceback: str
    exit_code: int
    seconds: float


def describe(outcomes: list[Outcome[Any]], errors: Mapping[int, BaseException]) -> str:
    """The message of `RanksFailed`: what each failed rank raised and where, causes before consequences."""

    def by_time(rank: int) -> tuple[bool, float]:  # a hang is a consequence more often than a cause
        return isinstance(errors[rank], TimeoutError), outcomes[rank].seconds

    parts = [f"{len(errors)} of {len(outcomes)} ranks failed"]
    for rank in sorted(errors, key=by_time):
        outcome, error = outcomes[rank], errors[rank]
        parts.append(f"--- rank {rank}, {exit_name(outcome.exit_code)}, after {outcome.seconds:.1f} s")
        text = outcome.traceback.rstrip()
        last = f"{type(error).__name__}: {error}"
        parts.append(text if str(error) in text else f"{text}\n{last}".lstrip())
    return "\n".join(parts)


def exit_name(code: int) -> str:
    """``"exit code -9 (SIGKILL)"``."""
    if code >= 0:
        return f"exit code {code}"
    with suppress(ValueError):
        return f"exit code {code} ({Signals(-code).name})"
    return f"exit code {code}"
