"""What a message shows of a wrong value."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from evenstep.shown import shown


def made() -> None: ...


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (3, "3"),
        ("cuda", "'cuda'"),
        ({"seq_len": 4}, "{'seq_len': 4}"),
        (list(range(10**6)), "[0, 1, 2, ...]"),
        (torch.arange(4).reshape(2, 2), "tensor([[0, 1], [2, 3]])"),
        (made, "the function made"),
        (ValueError, "the class ValueError"),
    ],
)
def test_short_values_are_whole_and_long_ones_cut(value: Any, expected: str) -> None:
    assert shown(value) == expected


@pytest.mark.parametrize(
    "value",
    [
        "x" * 500,
        [{"input_ids": torch.arange(500)} for _ in range(50)],
        np.random.default_rng(0).random(10**5),
        [[[["deep" * 30] * 30] * 30] * 30],
    ],
)
def test_whatever_it_is_it_is_one_line_of_at_most_80_characters(value: Any) -> None:
    text = shown(value)
    assert len(text) <= 80
    assert "\n" not in text
    assert "..." in text
