"""Serves with any pack, the user's own included, what it need not know of: oversized samples and empty rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from evenstep.packing.documents import Oversized
from evenstep.packing.fields import as_tensor, token_dim
from evenstep.packing.fused import keywords_of
from evenstep.packing.padding import padding_row
from evenstep.packing.text import pack_text
from evenstep.packing.vision import pack_vision

__all__ = ["empty_row", "truncate_sample", "with_oversized"]

Pack = Callable[[list[Any], int], Any]
BUILT_IN: tuple[Callable[..., Any], ...] = (pack_text, pack_vision)


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
    length = len(sample["input_ids"])
    cut: dict[str, Any] = {}
    for name, value in sample.items():
        dim = token_dim(name, as_tensor(value), length, token_dims or {})
        cut[name] = (
            value
            if dim is None
            else value[(slice(None),) * dim + (slice(tokens),)]
            if dim
            else value[:tokens]
        )
    return cut
