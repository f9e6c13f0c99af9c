"""A pack as a user may write it, for the tests of what checks packs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest


def _plain_pack(batch: list[Any], seq_len: int) -> dict[str, Any]:
    """What a user may write by hand: only the fields of a Hugging Face model, with arrays."""
    ids = np.concatenate([s["input_ids"] for s in batch])
    labels = np.concatenate([s["input_ids"] for s in batch])
    starts = np.cumsum([0, *(len(s["input_ids"]) for s in batch)])[:-1]
    labels[starts] = -100
    positions = np.concatenate([np.arange(len(s["input_ids"])) for s in batch])
    width = (0, seq_len - len(ids))
    return {
        "input_ids": np.pad(ids, width),
        "labels": np.pad(labels, width, constant_values=-100),
        "position_ids": np.pad(positions, width),
    }


@pytest.fixture(scope="session")
def plain_pack() -> Callable[[list[Any], int], dict[str, Any]]:
    """Marks documents with ``position_ids`` alone."""
    return _plain_pack
