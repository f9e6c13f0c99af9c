"""The errors a user can meet, so that each can be caught by name."""

from __future__ import annotations

__all__ = [
    "ConfigMismatch",
    "Infeasible",
    "RemoteRankError",
    "SampleError",
    "StateMismatch",
    "WireFormatError",
]


class RemoteRankError(RuntimeError):
    """A rank failed (or left); every rank that depends on it raises this instead of waiting for it.

    Attributes:
        rank: Global rank of the process that failed or left; -1 if it cannot be told.
        error_type: Name of the original exception's type, for example ``"OSError"``; empty if the rank left.
        error_message: Text of the original exception.
        sample: Dataset index of the sample that failed, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int = -1,
        error_type: str = "",
        error_message: str = "",
        sample: int | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.error_type = error_type
        self.error_message = error_message
        self.sample = sample


class SampleError(RemoteRankError):
    """One sample could not be read; the original exception is its ``__cause__``.

    Where the other ranks are told of it before they build on the sample, its own rank raises `RemoteRankError` as they do,
    from this error; where lengths are known ahead, its own rank raises this error, so that ``except RemoteRankError``
    is enough in both.

    Attributes:
        sample: Dataset index of the sample.
    """

    sample: int

    def __init__(
        self, message: str, sample: int, *, rank: int = -1, error_type: str = "", error_message: str = ""
    ) -> None:
        super().__init__(
            message, rank=rank, error_type=error_type, error_message=error_message, sample=sample
        )

    def __reduce__(self) -> tuple[type[SampleError], tuple[str, int], dict[str, object]]:
        """Whole across processes, where an exception keeps neither its keywords nor its cause by itself."""
        state = dict(self.__dict__)
        if self.__cause__ is not None and not self.error_type:
            state.update(error_type=type(self.__cause__).__name__, error_message=str(self.__cause__))
        return type(self), (str(self), self.sample), state


class StateMismatch(ValueError):  # noqa: N818 - the name is public API
    """A saved state does not belong to this dataset, order, seed or layout."""


class ConfigMismatch(ValueError):  # noqa: N818 - the name is public API
    """Ranks were built with different configurations."""


class WireFormatError(ValueError):
    """Bytes received from another rank are not what the plan says they must be."""


class Infeasible(ValueError):  # noqa: N818 - the name is public API
    """No packing obeys the hard constraints; the message names the sample and the constraint."""
