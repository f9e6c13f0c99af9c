"""What planning needs to know of one sample: measured, and the policies for odd ones applied."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from evenstep.config import LoaderConfig
from evenstep.packing import LossCounter, count_loss_tokens
from evenstep.samples import SampleMetadata

__all__ = ["EMPTY", "Described", "Describer", "cut_documents", "oversized_message", "tells_length"]

EMPTY = "it has no tokens, and empty='error' refuses that; use empty='drop' to leave such samples out"


@dataclass(frozen=True, slots=True)
class Described:
    """A sample as it will be planned.

    Attributes:
        metadata: Its facts; cut to a row where the policy cuts.
        truncated: Whether it was cut.
    """

    metadata: SampleMetadata
    truncated: bool


class Describer:
    """Measures samples.

    Args:
        config: ``seq_len`` and the policies for oversized and empty samples.
        metadata_fn: ``sample -> int | SampleMetadata``; default ``len(sample["input_ids"])``.
        explode: Where packed samples stay whole: what finds the documents in one; ``metadata_fn`` then
            measures documents.
        loss_tokens: Counts what ``metadata_fn`` does not tell, as the packer will leave it (see
            `evenstep.packing.loss_counter`); None: nobody knows.
    """

    def __init__(
        self,
        config: LoaderConfig,
        metadata_fn: Callable[[Any], Any] | None = None,
        explode: Callable[[Any], Iterable[Any]] | None = None,
        loss_tokens: LossCounter | None = count_loss_tokens,
    ) -> None:
        self._config = config
        self._metadata_fn = metadata_fn
        self._explode = explode
        self._loss_tokens = loss_tokens

    def __call__(self, sample: Any) -> Described:
        """Measure one sample.

        Raises:
            TypeError: ``metadata_fn`` returned something else than tokens or `SampleMetadata`.
            ValueError: The sample is oversized or empty, and the policy refuses that.
        """
        told, cut = self._checked(sample)
        limit, documents, loss = self._config.seq_len, told.documents, told.loss_tokens
        if cut:
            if self._explode is None:
                loss = self._count(sample, limit)
            documents = None if documents is None else cut_documents(documents, limit)
            return Described(SampleMetadata(limit, told.features, loss, documents), True)
        if loss is None and self._explode is None:
            loss = self._count(sample)
            told = SampleMetadata(told.tokens, told.features, loss, documents)
        return Described(told, False)

    def _count(self, sample: Any, limit: int | None = None) -> int | None:
        return None if self._loss_tokens is None else self._loss_tokens(sample, limit)

    def tokens(self, sample: Any) -> int:
        """What one sample takes of a row; raises as a call does."""
        told, cut = self._checked(sample)
        return self._config.seq_len if cut else told.tokens

    def _checked(self, sample: Any) -> tuple[SampleMetadata, bool]:
        """What is told of a sample that the policies let pass, and whether it is to be cut."""
        told = self._measure(sample) if self._explode is None else self._sum(self._explode(sample))
        tokens, limit, policy = told.tokens, self._config.seq_len, self._config.oversized
        if tokens == 0 and self._config.empty == "error":
            raise ValueError(EMPTY)
        if tokens > limit and policy == "error":
            raise ValueError(oversized_message(int(tokens), limit))
        return told, tokens > limit and policy == "truncate"

    def _measure(self, sample: Any) -> SampleMetadata:
        told: Any = _default_tokens(sample) if self._metadata_fn is None else self._metadata_fn(sample)
        if self._metadata_fn is None:
            return SampleMetadata(told)
        if isinstance(told, (int, np.integer)) and not isinstance(told, bool):
            told = SampleMetadata(int(told))
        if not isinstance(told, SampleMetadata):
            raise TypeError(
                f"metadata_fn returned {told!r} ({type(told).__name__}), expected the number of tokens (int) or a "
                "SampleMetadata"
            )
        tokens = told.tokens
        if isinstance(tokens, bool) or not isinstance(tokens, (int, np.integer)) or tokens < 0:
            raise TypeError(
                f"metadata_fn returned tokens={tokens!r} ({type(tokens).__name__}), expected an int >= 0"
            )
        _check_loss(told.loss_tokens, int(tokens))
        _check_features(told.features)
        if told.documents is not None:
            _check_documents(told.documents, int(tokens))
        return told

    def _sum(self, documents: Iterable[Any]) -> SampleMetadata:
        """A packed row as one sample, whose documents attend only to themselves; its loss is that of a cut row."""
        features: Counter[str] = Counter()
        lengths: list[int] = []
        loss: int | None = 0
        left = self._config.seq_len if self._config.oversized == "truncate" else None
        for document in documents:
            told = self._measure(document)
            features.update(told.features)
            lengths += [d for d in (told.documents or (told.tokens,)) if d]
            own = told.loss_tokens
            if left is not None and told.tokens > left:
                own = self._count(document, left) if left else 0
            elif own is None:
                own = self._count(document)
            left = None if left is None else max(0, left - told.tokens)
            loss = None if loss is None or own is None else loss + own
        return SampleMetadata(sum(lengths), dict(features), loss, lengths)


def _check_loss(loss: Any, tokens: int) -> None:
    if loss is None:
        return
    if isinstance(loss, bool) or not isinstance(loss, (int, np.integer)):
        raise TypeError(
            f"metadata_fn returned loss_tokens={loss!r} ({type(loss).__name__}), expected an int, or None if unknown"
        )
    if not 0 <= loss <= tokens:
        raise ValueError(
            f"metadata_fn returned loss_tokens={loss} for a sample of {tokens} tokens, expected 0 to {tokens}: the loss "
            "would be divided by a wrong number"
        )


def _check_features(features: Any) -> None:
    if not isinstance(features, Mapping):
        raise TypeError(
            f"metadata_fn returned features={features!r} ({type(features).__name__}), expected a mapping of names to "
            "numbers, such as {'patches': 256}"
        )
    for name, value in features.items():
        if not isinstance(value, (int, float, np.number, np.bool_)):
            raise TypeError(
                f"metadata_fn returned the feature {name!r} as {value!r} ({type(value).__name__}), expected a number"
            )


def _check_documents(documents: Sequence[int], tokens: int) -> None:
    lengths = np.asarray(documents)
    if lengths.ndim != 1 or (lengths.size and lengths.dtype.kind not in "iu"):
        raise TypeError(
            f"metadata_fn returned documents={documents!r}, expected the lengths of the documents as ints"
        )
    if lengths.size and int(lengths.min()) < 0:
        raise ValueError(
            f"metadata_fn returned documents={lengths.tolist()}, expected lengths that are not negative"
        )
    if int(lengths.sum()) != tokens:
        raise ValueError(
            f"metadata_fn returned documents of {int(lengths.sum())} tokens in a sample of {tokens} tokens"
        )


def _default_tokens(sample: Any) -> int:
    if not isinstance(sample, Mapping) or "input_ids" not in sample:
        raise TypeError(
            f"a sample of type {type(sample).__name__} without 'input_ids' says nothing of its length; pass "
            "metadata_fn=lambda sample: number_of_tokens"
        )
    return len(sample["input_ids"])


def tells_length(sample: Any) -> bool:
    """Whether a sample says how long it is without a ``metadata_fn``."""
    return isinstance(sample, Mapping) and "input_ids" in sample


def oversized_message(tokens: int, limit: int) -> str:
    """Why a sample of ``tokens`` tokens is refused."""
    return (
        f"it has {tokens} tokens, seq_len is {limit}: it fits no row. Raise seq_len, split it (evenstep.datasets."
        "SplitDocuments), or choose oversized='truncate' or 'single'"
    )


def cut_documents(documents: Sequence[int], limit: int) -> tuple[int, ...]:
    """The lengths of ``documents`` after the first ``limit`` tokens of all were kept."""
    ends = np.minimum(np.cumsum(documents), limit)
    return tuple(int(d) for d in np.diff(ends, prepend=0) if d > 0)
