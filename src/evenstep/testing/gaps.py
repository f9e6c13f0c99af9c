"""Finds batches that a node left out, by what the others say of their place: a stream that skips any is no whole epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from evenstep.samples import BatchInfo

__all__ = ["info_of", "left_out"]


def info_of(item: Any) -> Any:
    """What a batch, or an item before the packer, tells the training loop; None if it tells nothing."""
    return item.get("info") if isinstance(item, Mapping) else getattr(item, "info", None)


def left_out(items: Sequence[Any]) -> str | None:
    """Which micro-batch is not where its neighbours say it must be; None if all are, or where items say nothing.

    Several items may be made of one micro-batch.

    Args:
        items: Of one epoch, or of several in a row.
    """
    infos = [info for item in items if isinstance(info := info_of(item), BatchInfo)]
    if len(infos) != len(items) or not infos:
        return None
    for before, after in pairwise(infos):
        here, right = (after.step, after.micro_batch), _following(before)
        if here not in (right, (before.step, before.micro_batch)):
            return f"after {_shown(before.step, before.micro_batch)} comes {_shown(*here)}, expected {_shown(*right)}"
    if not infos[-1].is_last_micro_batch:
        last = infos[-1]
        return (
            f"the epoch ends after {_shown(last.step, last.micro_batch)}, but step {last.step} has "
            f"{last.num_micro_batches} micro-batches"
        )
    return None


def _following(info: BatchInfo) -> tuple[int, int]:
    return (info.step + 1, 0) if info.is_last_micro_batch else (info.step, info.micro_batch + 1)


def _shown(step: int, micro_batch: int) -> str:
    return f"micro-batch {micro_batch} of step {step}"
