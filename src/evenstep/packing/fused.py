"""Packs and collates in one pass: every token is written once, straight into the batch."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from evenstep.packing.collate import collate_rows
from evenstep.packing.fields import INT32_MAX, as_tensor, round_up
from evenstep.packing.text import pack_text
from evenstep.packing.varlen import collate_varlen, flat_length, global_boundaries

__all__ = ["FusedPack", "fused", "fused_pack", "keywords_of"]

Sample = Mapping[str, Any]
_WHOLE = frozenset({torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8})
# Options that ask for more than tokens and labels; the two functions serve them one after the other.
_SLOW_PACK = ("documents", "pad_values", "label_fields", "token_dims")
_SLOW_COLLATE = ("pad_documents_to_multiple_of", "pad_values", "token_dims")


def fused(pack: Callable[..., Any], collate: Callable[..., Any]) -> FusedPack | None:
    """The one-pass form of a built-in pair, or None if one of them is the user's own.

    Args:
        pack: ``pack_text``, or a ``functools.partial`` of it with keywords only.
        collate: ``collate_rows`` or ``collate_varlen``, or such a partial of one.

    Returns:
        A callable ``(rows_of_samples, seq_len) -> batch``, equal bit for bit to
        ``collate([pack(samples, seq_len) for samples in rows_of_samples])``.
    """
    pack_keywords = keywords_of(pack, pack_text)
    if pack_keywords is None:
        return None
    for base, flat in ((collate_rows, False), (collate_varlen, True)):
        collate_keywords = keywords_of(collate, base)
        if collate_keywords is not None:
            return FusedPack(pack, collate, flat, pack_keywords, collate_keywords)
    return None


def fused_pack(
    rows_of_samples: Sequence[Sequence[Sample]],
    seq_len: int,
    *,
    pack: Callable[..., Any] = pack_text,
    collate: Callable[..., Any] = collate_rows,
) -> dict[str, Any]:
    """The batch of ``rows_of_samples``; a row without samples is a padding row.

    Raises:
        ValueError: ``pack`` and ``collate`` are not both built in (see ``fused``), or as they do.
    """
    one_pass = fused(pack, collate)
    if one_pass is None:
        raise ValueError(
            f"pack {pack!r} and collate {collate!r} are not both built in, so there is no one-pass form of them; "
            "call collate([pack(samples, seq_len) for samples in rows])"
        )
    return one_pass(rows_of_samples, seq_len)


def keywords_of(function: Callable[..., Any], base: Callable[..., Any]) -> dict[str, Any] | None:
    """The keywords with which ``function`` calls ``base``; None if it is no (partial of) ``base``."""
    keywords: dict[str, Any] = {}
    while isinstance(function, functools.partial):
        if function.args:
            return None
        keywords = {**function.keywords, **keywords}
        function = function.func
    return keywords if function is base else None


@dataclass(frozen=True, slots=True)
class FusedPack:
    """A built-in pack and collate as one function of ``(rows_of_samples, seq_len)``.

    Samples of ``input_ids`` and ``labels`` take one pass; any others go through the two functions.

    Attributes:
        pack: The pack it stands for.
        collate: The collate it stands for.
        flat: Whether the batch is one flat sequence.
        pack_keywords: Options of ``pack``.
        collate_keywords: Options of ``collate``.
    """

    pack: Callable[..., Any]
    collate: Callable[..., Any]
    flat: bool
    pack_keywords: Mapping[str, Any]
    collate_keywords: Mapping[str, Any]
    _simple: bool = field(init=False)

    def __post_init__(self) -> None:
        slow = any(_changed(pack_text, self.pack_keywords, name) for name in _SLOW_PACK)
        base = collate_varlen if self.flat else collate_rows
        slow = slow or any(_changed(base, self.collate_keywords, name) for name in _SLOW_COLLATE)
        object.__setattr__(self, "_simple", not slow)

    def __call__(self, rows_of_samples: Sequence[Sequence[Sample]], seq_len: int) -> dict[str, Any]:
        """Packs and collates; see ``fused``."""
        rows = _read(rows_of_samples, seq_len) if self._simple and type(seq_len) is int else None
        if rows is None:
            return dict(self.collate([self.pack(samples, seq_len) for samples in rows_of_samples]))
        return self._flat(rows) if self.flat else self._padded(rows, seq_len)

    def _padded(self, rows: list[_Row], seq_len: int) -> dict[str, Any]:
        pad_token_id = self.pack_keywords.get("pad_token_id", 0)
        ignore_index = self.pack_keywords.get("ignore_index", -100)
        multiple = self.collate_keywords.get("pad_to_multiple_of", 1)
        width = round_up(seq_len, "pad_to_multiple_of", multiple)
        batch = _Fields.empty(len(rows), width)
        for k, row in enumerate(rows):
            batch.write(k, 0, row)
            batch.input_ids[k, row.tokens : seq_len] = pad_token_id
            batch.position_ids[k, row.tokens :] = 0
            if width > seq_len:
                batch.input_ids[k, seq_len:] = self.collate_keywords.get("pad_token_id", 0)
        batch.write_labels(rows, bool(self.pack_keywords.get("shifted", False)), ignore_index)
        if width > seq_len:
            batch.labels[:, seq_len:] = self.collate_keywords.get("ignore_index", -100)
        return {
            **batch.as_dict(),
            "cu_seqlens": [torch.from_numpy(np.array(row.boundaries, dtype=np.int32)) for row in rows],
            "max_seqlen": max(max(row.lengths, default=0) for row in rows),
            "num_tokens": sum(row.tokens for row in rows),
        }

    def _flat(self, rows: list[_Row]) -> dict[str, Any]:
        ignore_index = self.pack_keywords.get("ignore_index", -100)
        joined = _Row.join(rows)
        options = self.collate_keywords
        total = flat_length(joined.tokens, options.get("pad_to_multiple_of", 1), options.get("pad_to"))
        batch = _Fields.empty(1, total)
        batch.write(0, 0, joined)
        batch.write_labels([joined], bool(self.pack_keywords.get("shifted", False)), ignore_index)
        batch.input_ids[0, joined.tokens :] = options.get("pad_token_id", 0)
        batch.labels[0, joined.tokens :] = options.get("ignore_index", -100)
        batch.position_ids[0, joined.tokens :] = 0
        lengths = np.array(joined.lengths, dtype=np.int64)
        return {**batch.as_dict(), **global_boundaries(lengths, np.array(joined.boundaries), total)}


def _changed(function: Callable[..., Any], keywords: Mapping[str, Any], name: str) -> bool:
    return name in keywords and keywords[name] != inspect.signature(function).parameters[name].default


@dataclass(slots=True)
class _Row:
    """What one row consists of; ``labels`` is None where the labels are the tokens."""

    input_ids: list[torch.Tensor] = field(default_factory=list)
    labels: list[torch.Tensor] | None = None
    lengths: list[int] = field(default_factory=list)
    boundaries: list[int] = field(default_factory=lambda: [0])

    @property
    def tokens(self) -> int:
        return self.boundaries[-1]

    @classmethod
    def join(cls, rows: list[_Row]) -> _Row:
        """All rows as one."""
        joined = cls()
        for row in rows:
            joined.input_ids += row.input_ids
            joined.lengths += row.lengths
            start = joined.tokens
            joined.boundaries += [start + end for end in row.boundaries[1:]]
        if any(row.labels is not None for row in rows):
            joined.labels = [
                part for row in rows for part in (row.input_ids if row.labels is None else row.labels)
            ]
        return joined


def _read(rows_of_samples: Sequence[Sequence[Sample]], seq_len: int) -> list[_Row] | None:
    """The rows, or None if they need the two functions: other fields, other types, or an error to tell."""
    rows: list[_Row] = []
    for samples in rows_of_samples:
        row = _Row()
        total = 0
        labelled = False
        labels: list[torch.Tensor] = []
        for sample in samples:
            if not isinstance(sample, dict) or "input_ids" not in sample:
                return None
            ids = sample["input_ids"]
            if type(ids) is not torch.Tensor:
                ids = as_tensor(ids)
                if ids is None:
                    return None
            if ids.dtype not in _WHOLE or ids.ndim != 1:
                return None
            length = ids.numel()
            if not length:
                continue
            own = as_tensor(sample["labels"]) if "labels" in sample else ids
            if own is None or own.dtype not in _WHOLE or own.shape != ids.shape:
                return None
            labelled = labelled or own is not ids
            if len(sample) != 1 + ("labels" in sample):
                return None
            total += length
            row.input_ids.append(ids)
            labels.append(own)
            row.lengths.append(length)
            row.boundaries.append(total)
        if total > seq_len:
            return None
        if labelled:
            row.labels = labels
        rows.append(row)
    # What is left to refuse, the two functions refuse in words.
    return rows if rows and 0 < seq_len <= INT32_MAX else None


@dataclass(frozen=True, slots=True)
class _Fields:
    """The three fields of a batch, int64 ``[rows, width]``, and the positions once more as an array."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor

    @classmethod
    def empty(cls, rows: int, width: int) -> _Fields:
        return cls(*(torch.empty((rows, width), dtype=torch.int64) for _ in range(3)))

    def as_dict(self) -> dict[str, Any]:
        return {"input_ids": self.input_ids, "labels": self.labels, "position_ids": self.position_ids}

    def write(self, k: int, start: int, row: _Row) -> None:
        """Tokens and positions of ``row`` into row ``k`` from ``start``."""
        if not row.tokens:
            return
        torch.cat(row.input_ids, out=self.input_ids[k, start : start + row.tokens])
        count = np.arange(max(row.lengths))
        out = self.position_ids.numpy()[k, start : start + row.tokens]
        np.concatenate([count[:length] for length in row.lengths], out=out)

    def write_labels(self, rows: list[_Row], shifted: bool, ignore_index: int) -> None:
        """The labels of all rows, written once; padding behind the tokens included."""
        array = self.labels.numpy()
        for k, row in enumerate(rows):
            tokens = row.tokens
            array[k, tokens:] = ignore_index
            if not tokens:
                continue
            if shifted:
                target = self.labels[k, : tokens - 1]
                if row.labels is None:
                    target.copy_(self.input_ids[k, 1:tokens])
                else:
                    torch.cat([row.labels[0][1:], *row.labels[1:]], out=target)
                array[k, np.array(row.boundaries[1:]) - 1] = ignore_index
            else:
                if row.labels is None:
                    self.labels[k, :tokens] = self.input_ids[k, :tokens]
                else:
                    torch.cat(row.labels, out=self.labels[k, :tokens])
                array[k, row.boundaries[:-1]] = ignore_index
