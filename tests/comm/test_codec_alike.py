"""The fast check of samples that look alike never says so of samples that do not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evenstep.comm.codec.scan import Unsupported, alike_columns, scan

ONE = {"a": torch.zeros(3), "b": 1}
VALUES: list[Any] = [
    torch.zeros(3),
    torch.ones(5),
    torch.zeros(3, dtype=torch.int32),
    torch.zeros(2, 2),
    torch.zeros(3).to_sparse(),
    torch.empty(3, device="meta"),
    torch.nn.Parameter(torch.zeros(3)),
    np.zeros(3),
    np.zeros((3, 1)),
    np.zeros(3, dtype=np.float32),
    np.float64(1),
    1,
    True,
    1.0,
    1 << 70,
    "text",
    b"bytes",
    None,
    [1, 2],
    (1, 2),
    {"a": 1},
    object(),
]


def signature(sample: Any) -> tuple[Any, ...] | None:
    found: list[Any] = []
    try:
        scan(sample, found)
    except Unsupported:
        return None
    return tuple(found)


KEYS = st.sampled_from([("a",), ("a", "b"), ("b", "a"), (1,), (), (True,)])


@st.composite
def samples(draw: st.DrawFn) -> list[Any]:
    few = draw(st.lists(st.sampled_from(VALUES), min_size=1, max_size=2))
    keys = draw(st.lists(KEYS, min_size=1, max_size=2))
    many: list[Any] = []
    for _ in range(draw(st.integers(1, 4))):
        many.append({key: draw(st.sampled_from(few)) for key in draw(st.sampled_from(keys))})
    return many


@given(many=samples())
def test_alike_samples_have_the_signature_of_the_first(many: list[Any]) -> None:
    columns = alike_columns(many)
    if columns is not None:
        first = signature(many[0])
        assert all(signature(sample) == first for sample in many)
        for column, key in zip(columns, many[0], strict=True):
            assert all(value is sample[key] for value, sample in zip(column, many, strict=True))


@pytest.mark.parametrize("value", VALUES[:2] + VALUES[7:8] + [3, 1.5, True, "text", b"bytes"])
def test_the_usual_samples_are_found_alike(value: Any) -> None:
    assert alike_columns([{"ids": value, "b": 1}] * 3) == [[value] * 3, [1] * 3]


@pytest.mark.parametrize(
    "other", [{"b": 1, "a": torch.zeros(3)}, {"a": torch.zeros(3)}, {**ONE, "c": 1}, [1], 3]
)
def test_other_samples_are_not(other: Any) -> None:
    assert alike_columns([ONE, other]) is None
    assert alike_columns([other, ONE]) is None
