"""How large the demo is: one object that every rank receives."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from evenstep.demo.greedy import GreedySampler
from evenstep.demo.tokens import Pieces, TokenStore, split_documents

__all__ = ["Settings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything a rank must know; plain values, so that it travels to new processes.

    Attributes:
        ranks: Data-parallel ranks of the comparison.
        out: Folder of the results; tokens and checkpoint lie in it too.
        seq_len: Tokens of a row.
        micro_batches: Micro-batches per rank and optimizer step; one row each.
        compared_steps: Optimizer steps trained in both layouts.
        resumed_steps: Optimizer steps trained after the stop, on `resumed_ranks`.
        keep_every: Every how many documents of the corpus one is read.
        learning_rate: Of AdamW.
        seed: Of the model and the order of samples.
        own_corpus: Whether the user brought the text; then nobody knows how much balance can gain.
        check_speed: Whether too small a speed-up is a failure; two steps are too few to tell.
    """

    ranks: int
    out: Path
    seq_len: int = 8192
    micro_batches: int = 4
    compared_steps: int = 5
    resumed_steps: int = 2
    keep_every: int = 1
    learning_rate: float = 1e-3
    seed: int = 0
    own_corpus: bool = False
    check_speed: bool = True

    @classmethod
    def quick(cls, *, ranks: int, out: Path, own_corpus: bool = False) -> Settings:
        """A smoke test: fewer, smaller and shorter steps."""
        return cls(
            ranks=ranks,
            out=out,
            own_corpus=own_corpus,
            seq_len=4096,
            compared_steps=2,
            resumed_steps=1,
            keep_every=4,
            check_speed=False,
        )

    @property
    def resumed_ranks(self) -> int:
        """Twice as many: the rows of a step divide by it whatever `ranks` is."""
        return 2 * self.ranks

    @property
    def rows_per_step(self) -> int:
        """Rows of one optimizer step over all ranks."""
        return self.ranks * self.micro_batches

    @property
    def tokens(self) -> Path:
        """Folder of the tokens."""
        return self.out / "tokens"

    @property
    def lengths(self) -> Path:
        """File of the tokens of each document, for ``evenstep simulate``."""
        return self.out / "lengths.npy"

    @property
    def checkpoint(self) -> Path:
        """File of the model, the optimizer and the loader where training stopped."""
        return self.out / "checkpoint.pt"

    def dataset(self) -> Pieces:
        """The samples, mapped from disk."""
        return split_documents(TokenStore.open(self.tokens), self.seq_len)

    def sampler(self, pieces: Pieces) -> GreedySampler:
        """The same stream of samples on any number of ranks."""
        return GreedySampler(
            pieces.lengths, rows_per_step=self.rows_per_step, seq_len=self.seq_len, seed=self.seed
        )
