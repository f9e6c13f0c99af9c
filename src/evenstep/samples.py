"""What is known of a sample before it is packed, as one record or as columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["BatchInfo", "MetadataTable", "SampleMetadata"]

UNKNOWN = -1  # loss tokens that nobody told us


@dataclass(frozen=True, slots=True)
class SampleMetadata:
    """The light facts of one sample that planning needs.

    Attributes:
        tokens: What the sample takes of a row's capacity; >= 0.
        features: Named numbers for budgets and cost models, for example ``{"patches": 1024}``.
        loss_tokens: Tokens that carry a loss; None if unknown.
        documents: Lengths of the documents inside the sample (they attend only to themselves);
            None means one document of ``tokens`` tokens.
    """

    tokens: int
    features: Mapping[str, float] = field(default_factory=dict)
    loss_tokens: int | None = None
    documents: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class MetadataTable:
    """Metadata of ``n`` samples as columns.

    Attributes:
        tokens: int64 ``[n]``.
        features: One float64 ``[n]`` column per feature name; 0 where a sample did not have it.
        loss_tokens: int64 ``[n]``; -1 where unknown.
        documents: int64, the document lengths of all samples one after another.
        document_offsets: int64 ``[n + 1]``; sample i owns ``documents[offsets[i]:offsets[i + 1]]``.
    """

    tokens: npt.NDArray[np.int64]
    features: Mapping[str, npt.NDArray[np.float64]]
    loss_tokens: npt.NDArray[np.int64]
    documents: npt.NDArray[np.int64]
    document_offsets: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def from_tokens(cls, tokens: npt.ArrayLike) -> MetadataTable:
        """One document of ``tokens[i]`` tokens per sample and no features."""
        column = np.asarray(tokens, dtype=np.int64)
        return cls(
            tokens=column,
            features={},
            loss_tokens=np.full(len(column), UNKNOWN, dtype=np.int64),
            documents=column,
            document_offsets=np.arange(len(column) + 1, dtype=np.int64),
        )

    @classmethod
    def from_samples(cls, samples: Sequence[SampleMetadata]) -> MetadataTable:
        """Columns of a sequence of records, in its order."""
        tokens = np.fromiter((s.tokens for s in samples), dtype=np.int64, count=len(samples))
        loss = np.fromiter(
            (UNKNOWN if s.loss_tokens is None else s.loss_tokens for s in samples),
            dtype=np.int64,
            count=len(samples),
        )
        names = sorted({name for s in samples for name in s.features})
        features = {
            name: np.fromiter(
                (s.features.get(name, 0.0) for s in samples), dtype=np.float64, count=len(samples)
            )
            for name in names
        }
        if all(s.documents is None for s in samples):
            return cls(tokens, features, loss, tokens, np.arange(len(samples) + 1, dtype=np.int64))
        parts = [(s.tokens,) if s.documents is None else tuple(s.documents) for s in samples]
        offsets = np.zeros(len(samples) + 1, dtype=np.int64)
        np.cumsum([len(part) for part in parts], out=offsets[1:])
        documents = np.fromiter((d for part in parts for d in part), dtype=np.int64, count=int(offsets[-1]))
        return cls(tokens, features, loss, documents, offsets)

    def take(self, index: npt.NDArray[np.integer[Any]]) -> MetadataTable:
        """The rows ``index`` (int ``[m]``), in that order."""
        starts = self.document_offsets[index]
        counts = self.document_offsets[np.asarray(index) + 1] - starts
        offsets = np.zeros(len(counts) + 1, dtype=np.int64)
        np.cumsum(counts, out=offsets[1:])
        flat = np.repeat(starts - offsets[:-1], counts) + np.arange(offsets[-1])
        return MetadataTable(
            tokens=self.tokens[index],
            features={name: column[index] for name, column in self.features.items()},
            loss_tokens=self.loss_tokens[index],
            documents=self.documents[flat],
            document_offsets=offsets,
        )


@dataclass(frozen=True, slots=True)
class BatchInfo:
    """Facts of one micro-batch that a training loop needs; ``batch["info"]``.

    Attributes:
        step: Optimizer steps before this one since the start of training.
        micro_batch: Position inside the optimizer step, from 0.
        num_micro_batches: Micro-batches of this optimizer step on every rank.
        is_last_micro_batch: Whether ``optimizer.step()`` follows this micro-batch.
        num_samples: Samples in this rank's rows.
        num_tokens: Real tokens in this rank's rows.
        num_padding: Padding tokens in this rank's rows (``rows * seq_len - num_tokens``; with ``shard``, where rows grow to
            what divides them, those of the grown rows).
        num_loss_tokens: Tokens with a loss in this rank's rows, or None if unknown.
        step_loss_tokens: Tokens with a loss in the whole optimizer step over all ranks; None where the
            window is not the whole step or the number is unknown.
    """

    step: int
    micro_batch: int
    num_micro_batches: int
    is_last_micro_batch: bool
    num_samples: int
    num_tokens: int
    num_padding: int
    num_loss_tokens: int | None
    step_loss_tokens: int | None

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values (JSON-able)."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def to(self, *_args: Any, **_kwargs: Any) -> BatchInfo:
        """This record itself, on any device: trainers such as Lightning move what has ``to`` and leave it whole."""
        return self
