"""Serves with any pack, the user's own included, what it need not know of, and tells what it does to a loss."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from evenstep.packing.collate import collate_rows
from evenstep.packing.documents import Oversized
from evenstep.packing.fields import as_tensor, token_dim
from evenstep.packing.fused import keywords_of
from evenstep.packing.loss import count_loss_tokens
from evenstep.packing.padding import padding_row
from evenstep.packing.text import pack_text
from evenstep.packing.varlen import collate_varlen
from evenstep.packing.vision import VISION_FIELDS, pack_vision

__all__ = [
    "LossCounter",
    "empty_row",
    "loss_counter",
    "pack_documents",
    "padded_alike",
    "slice_sample",
    "truncate_sample",
    "with_oversized",
]

Pack = Callable[[list[Any], int], Any]
LossCounter: TypeAlias = Callable[[Any, int | None], int | None]
"""``(sample, seq_len)`` to the labels of the sample that carry a loss once it is packed, cut to ``seq_len`` if given."""

BUILT_IN: tuple[Callable[..., Any], ...] = (pack_text, pack_vision)
_PADDING = ("pad_token_id", "ignore_index", "pad_values")


def with_oversized(pack: Pack, oversized: Oversized) -> Pack:
    """``pack`` that serves a sample longer than the row, alone in it.

    The built-in packs get ``oversized`` as their option, unless they were given one. For others ``"truncate"`` cuts
    the sample before, and ``"single"`` asks for a row as long as it.

    Raises:
        ValueError: ``oversized`` is no policy.
    """
    if oversized not in ("error", "single", "truncate"):
        raise ValueError(f'oversized is {oversized!r}; use "error", "single" or "truncate"')
    for base in BUILT_IN:
        keywords = keywords_of(pack, base)
        if keywords is not None:
            return (
                pack if "oversized" in keywords else functools.partial(base, **keywords, oversized=oversized)
            )
    if oversized == "error":
        return pack
    return functools.partial(_pack_oversized, pack, oversized)


def _pack_oversized(pack: Pack, oversized: Oversized, samples: list[Any], seq_len: int) -> Any:
    if len(samples) == 1 and isinstance(samples[0], Mapping) and "input_ids" in samples[0]:
        length = len(samples[0]["input_ids"])
        if length > seq_len and oversized == "truncate":
            return pack([truncate_sample(samples[0], seq_len)], seq_len)
        seq_len = max(seq_len, length)
    return pack(samples, seq_len)


def loss_counter(pack: Pack, oversized: Oversized = "error") -> LossCounter | None:
    """What counts the loss tokens of a sample as ``pack`` leaves them; None for a user's pack, which may mask any.

    Args:
        pack: What packs the rows; its ``ignore_index`` and ``documents`` are those that count.
        oversized: The policy that rows are planned by; a pack that was given another one counts for unknown.
    """
    for base in BUILT_IN:
        keywords = keywords_of(pack, base)
        if keywords is None:
            continue
        if oversized == "error" or keywords.get("oversized", oversized) in ("error", oversized):
            options = {name: keywords[name] for name in ("ignore_index", "documents") if name in keywords}
            return functools.partial(count_loss_tokens, **options)
    return None


def pack_documents(pack: Pack, oversized: Oversized, documents: Sequence[Any], seq_len: int) -> Any:
    """A row of the documents of one sample, or of several that fit: an oversized one is cut, or the row is longer.

    Args:
        pack: What packs the row.
        oversized: ``"truncate"`` keeps the first ``seq_len`` tokens, ``"single"`` makes the row as long as it needs.
        documents: In order; those that are no mapping with ``input_ids`` are left to ``pack``.
        seq_len: Tokens of a row.
    """
    told = all(isinstance(d, Mapping) and "input_ids" in d for d in documents)
    total = sum(len(d["input_ids"]) for d in documents) if told else 0
    if total <= seq_len or oversized == "error":
        return pack(list(documents), seq_len)
    if oversized == "single":
        return pack(list(documents), total)
    options = next((k for base in BUILT_IN if (k := keywords_of(pack, base)) is not None), {})
    vision = keywords_of(pack, pack_vision)
    fields = {} if vision is None else vision.get("patches", VISION_FIELDS)
    patches = [name for pair in fields.items() for name in pair]
    kept, left = [], seq_len
    for document in documents:
        length = len(document["input_ids"])
        if length > left and any(name in document for name in patches):
            raise ValueError(
                f"a document of {length} tokens and images would be cut to {left} tokens; that would leave patches without "
                'tokens; choose oversized="single", or shorten it in the dataset'
            )
        kept.append(document if length <= left else _cut_document(document, left, options))
        left -= min(length, left)
        if not left:
            break
    return pack(kept, seq_len)


def _cut_document(document: Mapping[str, Any], tokens: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """The first ``tokens`` tokens; its own documents, where ``pack`` looks for them, end there too."""
    inner, dims = options.get("documents"), options.get("token_dims") or {}
    if inner is None or inner not in document:
        return truncate_sample(document, tokens, token_dims=dims)
    cut = truncate_sample(document, tokens, token_dims={**dims, inner: None})
    ends = np.minimum(np.cumsum([0, *map(int, document[inner])]), tokens)
    return {**cut, inner: [int(n) for n in np.diff(ends) if n]}


def padded_alike(pack: Pack, collate: Callable[..., Any]) -> Callable[..., Any]:
    """``collate`` with the padding that ``pack`` was given, where both are built in and it was not told its own.

    Otherwise the labels of tokens that ``collate`` adds would be none that the loss ignores.
    """
    packs = [k for base in BUILT_IN if (k := keywords_of(pack, base)) is not None]
    collates = [k for base in (collate_rows, collate_varlen) if (k := keywords_of(collate, base)) is not None]
    if not packs or not collates:
        return collate
    told = {name: packs[0][name] for name in _PADDING if name in packs[0] and name not in collates[0]}
    return functools.partial(collate, **told) if told else collate


def empty_row(pack: Pack, seq_len: int, like: Any = None) -> Any:
    """The row of a rank without samples, as ``pack`` pads; a user's pack is not called for it.

    Args:
        pack: What makes the other rows.
        seq_len: Tokens of the row.
        like: Another row of the micro-batch, if there is one, which the row of a user's pack resembles.
    """
    if any(keywords_of(pack, base) is not None for base in BUILT_IN):
        return pack([], seq_len)
    alike = like if isinstance(like, Mapping) and "input_ids" in like else None
    return padding_row(alike, seq_len=seq_len)


def truncate_sample(
    sample: Mapping[str, Any], tokens: int, *, token_dims: Mapping[str, int | None] | None = None
) -> dict[str, Any]:
    """The first ``tokens`` tokens of ``sample``: every per-token field cut alike, all others as they are.

    Args:
        sample: What ``pack_text`` takes.
        tokens: How many tokens stay.
        token_dims: As in ``pack_text``.
    """
    return slice_sample(sample, 0, tokens, token_dims=token_dims)


def slice_sample(
    sample: Mapping[str, Any], begin: int, end: int, *, token_dims: Mapping[str, int | None] | None = None
) -> dict[str, Any]:
    """Tokens ``begin`` to ``end`` of ``sample``: every per-token field cut alike, all others as they are.

    Args:
        sample: What ``pack_text`` takes.
        begin: First token that stays.
        end: The one behind the last.
        token_dims: As in ``pack_text``.
    """
    length, kept = len(sample["input_ids"]), slice(begin, end)
    cut: dict[str, Any] = {}
    for name, value in sample.items():
        dim = token_dim(name, as_tensor(value), length, token_dims or {})
        cut[name] = value if dim is None else value[(slice(None),) * dim + (kept,)] if dim else value[kept]
    return cut
