"""Hypothesis strategies for what travels through evenstep, so that users can state laws about their own parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from evenstep.packing import collate_rows, pack_text, padding_row, truncate_sample
from evenstep.plan import PackingConstraints, Plan, plan_window

__all__ = ["batches", "plans", "rows", "sample_lists", "samples", "windows"]

Sample = Mapping[str, Any]
DEFAULT_SEQ_LEN = 16
IGNORED = -100


def samples(
    *,
    min_tokens: int = 1,
    max_tokens: int = DEFAULT_SEQ_LEN,
    vocab: int = 100,
    labels: bool | None = None,
    extras: Sequence[str] = ("loss_weights",),
) -> st.SearchStrategy[dict[str, Any]]:
    """One sample: ``input_ids`` (int64 ``[L]``), perhaps ``labels`` with some tokens masked, and other fields.

    Args:
        min_tokens: Least ``L``; 0 for empty samples too.
        max_tokens: Greatest ``L``.
        vocab: Tokens are in ``[1, vocab)``: 0 is left to padding.
        labels: Whether there are ``labels``; None: in some samples, the tokens themselves where not.
        extras: Other fields, of these: ``"loss_weights"`` (float32 ``[L]``), ``"token_type_ids"`` (int64 ``[L]``),
            ``"mrope"`` (int64 ``[3, L]``), ``"index"`` (an int, not per token).

    Raises:
        ValueError: ``extras`` names another field.
    """
    unknown = set(extras) - set(_EXTRAS)
    if unknown:
        raise ValueError(f"extras has {sorted(unknown)}; the strategy makes {', '.join(sorted(_EXTRAS))}")
    return _samples(min_tokens, max_tokens, vocab, labels, tuple(extras))


@st.composite
def _samples(
    draw: st.DrawFn,
    min_tokens: int,
    max_tokens: int,
    vocab: int,
    labels: bool | None,
    extras: tuple[str, ...],
) -> dict[str, Any]:
    ids = draw(st.lists(st.integers(1, vocab - 1), min_size=min_tokens, max_size=max_tokens))
    sample: dict[str, Any] = {"input_ids": torch.tensor(ids, dtype=torch.int64)}
    if labels if labels is not None else draw(st.booleans()):
        masked = draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))
        sample["labels"] = torch.tensor(
            [IGNORED if m else t for t, m in zip(ids, masked, strict=True)], dtype=torch.int64
        )
    for name in extras:
        sample[name] = _EXTRAS[name](draw, len(ids))
    return sample


_EXTRAS: dict[str, Callable[[st.DrawFn, int], Any]] = {
    "loss_weights": lambda draw, n: (
        torch.tensor(draw(st.lists(st.integers(0, 4), min_size=n, max_size=n)), dtype=torch.float32) / 4
    ),
    "token_type_ids": lambda draw, n: torch.tensor(
        draw(st.lists(st.integers(0, 1), min_size=n, max_size=n)), dtype=torch.int64
    ),
    "mrope": lambda draw, n: torch.arange(n).repeat(3, 1) + draw(st.integers(0, 3)),
    "index": lambda draw, _: draw(st.integers(0, 10**6)),
}


@st.composite
def sample_lists(
    draw: st.DrawFn,
    sample: st.SearchStrategy[Sample] | None = None,
    *,
    seq_len: int = DEFAULT_SEQ_LEN,
    min_size: int = 1,
    max_size: int = 4,
) -> list[Sample]:
    """The samples of one row, at most ``max_size``, which fit into ``seq_len`` tokens together.

    Fields that not all of them have are left out: a row has them for every sample or for none (``labels`` aside).
    """
    strategy = samples(max_tokens=seq_len) if sample is None else sample
    drawn = draw(st.lists(strategy, min_size=min_size, max_size=max_size))
    kept: list[Sample] = []
    left = seq_len
    for one in drawn:
        if sample is None and 0 < left < len(one["input_ids"]):
            one = truncate_sample(one, left)  # full rows are where bugs live, and rare by chance
        if len(one["input_ids"]) <= left:
            kept.append(one)
            left -= len(one["input_ids"])
    common = set.intersection(*(set(one) for one in kept)) if kept else set()
    return [{k: v for k, v in one.items() if k in common or k == "labels"} for one in kept]


@st.composite
def rows(
    draw: st.DrawFn,
    sample: st.SearchStrategy[Sample] | None = None,
    *,
    seq_len: int = DEFAULT_SEQ_LEN,
    pack: Callable[[Sequence[Sample], int], Any] = pack_text,
    padding: bool = True,
) -> Any:
    """One packed row: ``pack`` of samples that fit, or (with ``padding``, now and then) a padding row."""
    chosen = draw(sample_lists(sample, seq_len=seq_len, min_size=0 if padding else 1))
    return pack(chosen, seq_len) if chosen else padding_row(seq_len=seq_len)


@st.composite
def batches(
    draw: st.DrawFn,
    row: st.SearchStrategy[Any] | None = None,
    *,
    collate: Callable[[list[Any]], Any] = collate_rows,
    max_rows: int = 3,
) -> Any:
    """One micro-batch: ``collate`` of up to ``max_rows`` rows."""
    return collate(draw(st.lists(rows() if row is None else row, min_size=1, max_size=max_rows)))


@st.composite
def windows(
    draw: st.DrawFn,
    *,
    max_dp_size: int = 4,
    max_micro_batches: int = 3,
    max_rows: int = 3,
    max_samples_per_row: int = 3,
    seq_len: int = 64,
    max_stages: int = 1,
) -> dict[str, Any]:
    """The arguments of ``plan_window`` for a window that has a feasible plan: its reference layout.

    Every row of the reference layout has between 1 and ``max_samples_per_row`` samples and at most ``seq_len`` tokens.
    """
    dp_size = draw(st.integers(1, max_dp_size))
    micro_batches = draw(st.integers(1, max_micro_batches))
    per_rank = draw(st.integers(1, max_rows))
    tokens: list[int] = []
    reference: list[int] = []
    for row in range(micro_batches * dp_size * per_rank):
        count = draw(st.integers(1, max_samples_per_row))
        tokens += draw(st.lists(st.integers(1, seq_len // count), min_size=count, max_size=count))
        reference += [row] * count
    stages = draw(st.integers(1, max_stages))
    weights = [1.0, *draw(st.lists(st.integers(0, 8).map(float), min_size=stages - 1, max_size=stages - 1))]
    length = np.array(tokens, dtype=np.int64)
    cost = length * 16.0 + length.astype(np.float64) ** 2
    return {
        "tokens": length,
        "costs": cost if stages == 1 else np.outer(cost, weights),
        "dp_size": dp_size,
        "micro_batches": micro_batches,
        "rows": per_rank,
        "reference": np.array(reference, dtype=np.int32),
        "constraints": PackingConstraints(seq_len),
    }


def plans(window: st.SearchStrategy[dict[str, Any]] | None = None) -> st.SearchStrategy[Plan]:
    """One plan of a window."""
    return (windows() if window is None else window).map(lambda arguments: plan_window(**arguments))
