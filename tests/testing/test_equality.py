"""`assert_same` tells apart what differs in anything but its identity, and names the place."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from evenstep.testing import assert_same


@dataclass
class Record:
    ids: Any
    name: str = "a"


values = st.recursive(
    st.one_of(
        st.integers(),
        st.floats(),
        st.text(max_size=3),
        st.binary(max_size=3),
        st.none(),
        hnp.arrays(st.sampled_from([np.int64, np.float32]), st.integers(0, 3)),
        st.lists(st.integers(0, 9), max_size=3).map(torch.tensor),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.builds(Record, inner),
    ),
    max_leaves=8,
)


def copied(value: Any) -> Any:
    """Equal, and not the same object."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(copied(item) for item in value)
    return Record(copied(value.ids), value.name) if isinstance(value, Record) else value


@given(values)
def test_a_copy_is_the_same(value: Any) -> None:
    assert_same(copied(value), value)


@pytest.mark.parametrize(
    ("actual", "expected", "message"),
    [
        (1, 1.0, "value is int 1, expected float 1.0"),
        ({"a": [1, 2]}, {"a": [1, 3]}, "value['a'][1] is int 2, expected int 3"),
        ({"a": 1}, {"b": 1}, "value has the keys ['a'], expected ['b']"),
        ([1], [1, 2], "value has 1 entries, expected 2"),
        (Record((1, "x")), Record((1, "y")), "value.ids[1] is str 'x', expected str 'y'"),
        (float("nan"), 0.0, "value is float nan, expected float 0.0"),
        (torch.tensor([1]), torch.tensor([2]), "value is Tensor tensor([1]), expected Tensor tensor([2])"),
        (
            torch.tensor([1]),
            torch.tensor([1, 1]),
            "value is Tensor tensor([1]), expected Tensor tensor([1, 1])",
        ),
        (
            torch.tensor([0.0]),
            torch.tensor([-0.0]),
            "value is Tensor tensor([0.]), expected Tensor tensor([-0.])",
        ),
        (
            torch.tensor([1]),
            torch.tensor([1], dtype=torch.int32),
            "value is Tensor tensor([1]), expected Tensor tensor([1], dtype=torch.int32)",
        ),
        (np.array([1]), np.array([2]), "value is ndarray array([1]), expected ndarray array([2])"),
        ("a" * 300, "b", f"value is str '{'a' * 199} ..., expected str 'b'"),
    ],
)
def test_what_differs_is_named(actual: Any, expected: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=f"^{re.escape(message)}$"):
        assert_same(actual, expected)
