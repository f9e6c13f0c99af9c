"""What a rank says at the beginning of a window: a row of int64, of one size, from every rank."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from evenstep.errors import RemoteRankError

__all__ = ["CLOSING", "EXHAUSTED", "FAILED", "OK", "Header"]

OK, EXHAUSTED, FAILED, CLOSING = range(4)
_MAGIC = 0x6576_656E_7374_6570  # "evenstep"


@dataclass(frozen=True, slots=True)
class Header:
    """What a rank says at the beginning of a window; every field is an int64 on the wire.

    Attributes:
        status: OK, EXHAUSTED, FAILED or CLOSING.
        epoch: Epoch of the window.
        step: Optimizer step of the window.
        consumed: Samples of the epoch used before this step.
        first: First micro-batch of the window inside the step.
        count: Micro-batches of the window; 0 if only the plan will tell.
        samples: Samples that this rank read.
        column_bytes: Size of this rank's metadata columns.
        schema: Digest of the names and number of those columns.
        dropped: Samples without tokens that are left out.
        skipped: Samples that could not be read and are left out under a named option.
        truncated: Samples that are cut to a row.
        plan: Digest of the previous window's plan; 0 if there was none.
        loss_tokens: Loss tokens of this rank's samples; -1 if unknown.
        error_bytes: Size of the error text that follows; 0 unless FAILED.
        generation: Which stream this header belongs to; filled in by `Rounds`.
    """

    status: int
    epoch: int = 0
    step: int = 0
    consumed: int = 0
    first: int = 0
    count: int = 0
    samples: int = 0
    column_bytes: int = 0
    schema: int = 0
    dropped: int = 0
    skipped: int = 0
    truncated: int = 0
    plan: int = 0
    loss_tokens: int = -1
    error_bytes: int = 0
    generation: int = 0

    @property
    def place(self) -> tuple[int, int, int, int, int]:
        """Where in the stream the window is: equal on all ranks."""
        return (self.epoch, self.step, self.consumed, self.first, self.count)

    def pack(self) -> torch.Tensor:
        """As uint8."""
        values = [_MAGIC] + [_signed(getattr(self, f.name)) for f in fields(self)]
        return torch.tensor(values, dtype=torch.int64).view(torch.uint8)

    @classmethod
    def unpack(cls, row: torch.Tensor, rank: int) -> Header:
        """From uint8; a row of another program is a RemoteRankError."""
        values = row.view(torch.int64).tolist()
        if values[0] != _MAGIC:
            raise RemoteRankError(
                f"rank {rank} sent no evenstep header: its program does other collectives here", rank=rank
            )
        return cls(*values[1:])


def _signed(value: int) -> int:
    """A digest is unsigned, the wire is int64; equality is all that matters."""
    return value - (1 << 64) if value >= 1 << 63 else value
