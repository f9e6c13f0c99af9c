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
from evenstep.packing.fields import round_up
from evenstep.packing.parts import Fields, RowParts, read_rows
from evenstep.packing.text import pack_text
from evenstep.packing.varlen import collate_varlen, flat_length, global_boundaries

__all__ = ["FusedPack", "fused", "fused_pack", "keywords_of"]

Sample = Mapping[str, Any]
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
        rows = read_rows(rows_of_samples, seq_len) if self._simple and type(seq_len) is int else None
        if rows is None:
            return dict(self.collate([self.pack(samples, seq_len) for samples in rows_of_samples]))
        return self._flat(rows) if self.flat else self._padded(rows, seq_len)

    def _padded(self, rows: list[RowParts], seq_len: int) -> dict[str, Any]:
        pad_token_id = self.pack_keywords.get("pad_token_id", 0)
        ignore_index = self.pack_keywords.get("ignore_index", -100)
        shifted = bool(self.pack_keywords.get("shifted", False))
        width = round_up(seq_len, "pad_to_multiple_of", self.collate_keywords.get("pad_to_multiple_of", 1))
        batch = Fields(len(rows), width)
        for k, row in enumerate(rows):
            batch.write(k * width, row, shifted, ignore_index)
            batch.pad(k * width + row.tokens, k * width + seq_len, pad_token_id, ignore_index)
            if width > seq_len:
                batch.pad(k * width + seq_len, (k + 1) * width, *self._collate_padding())
        return {
            **batch.as_dict(),
            "cu_seqlens": [torch.from_numpy(np.array(row.boundaries, dtype=np.int32)) for row in rows],
            "max_seqlen": max(max(row.lengths, default=0) for row in rows),
            "num_tokens": sum(row.tokens for row in rows),
        }

    def _flat(self, rows: list[RowParts]) -> dict[str, Any]:
        joined = RowParts.join(rows)
        options = self.collate_keywords
        total = flat_length(joined.tokens, options.get("pad_to_multiple_of", 1), options.get("pad_to"))
        batch = Fields(1, total)
        shifted = bool(self.pack_keywords.get("shifted", False))
        batch.write(0, joined, shifted, self.pack_keywords.get("ignore_index", -100))
        batch.pad(joined.tokens, total, *self._collate_padding())
        lengths = np.array(joined.lengths, dtype=np.int64)
        return {**batch.as_dict(), **global_boundaries(lengths, np.array(joined.boundaries), total)}

    def _collate_padding(self) -> tuple[int, int]:
        return self.collate_keywords.get("pad_token_id", 0), self.collate_keywords.get("ignore_index", -100)


def _changed(function: Callable[..., Any], keywords: Mapping[str, Any], name: str) -> bool:
    return name in keywords and keywords[name] != inspect.signature(function).parameters[name].default
