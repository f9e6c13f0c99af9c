"""Columns arrive as they were sent, in window order, with their owners."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.comm.columns import Columns, as_bytes


@st.composite
def columns(draw: st.DrawFn) -> Columns:
    count, stages = draw(st.integers(0, 12)), draw(st.integers(1, 3))
    names = draw(st.sampled_from([(), ("images",), ("images", "frames")]))
    chance = np.random.default_rng(draw(st.integers(0, 2**32)))

    def ints() -> npt.NDArray[np.int64]:
        return chance.integers(-1, 1 << 62, count)

    return Columns(
        order=chance.permutation(count).astype(np.int64),
        rows=chance.integers(0, 1 << 31, count).astype(np.int32),
        tokens=ints(),
        loss_tokens=ints(),
        nbytes=ints(),
        structures=ints(),
        costs=chance.random((count, stages)),
        features=chance.random((count, len(names))),
        names=names,
    )


def arrays(c: Columns) -> list[npt.NDArray[Any]]:
    return [c.order, c.rows, c.tokens, c.loss_tokens, c.nbytes, c.structures, c.costs, c.features]


@given(sent=columns(), padding=st.integers(0, 9))
def test_what_is_unpacked_is_what_was_packed(sent: Columns, padding: int) -> None:
    row = as_bytes(sent, sent.packed_bytes + padding).numpy()
    assert not row[sent.packed_bytes :].any()
    got = Columns.unpack(row[: sent.packed_bytes], len(sent), sent.stages, sent.names)
    assert got.names == sent.names
    for before, after in zip(arrays(sent), arrays(got), strict=True):
        assert before.dtype == after.dtype
        np.testing.assert_array_equal(before, after)


@given(whole=columns(), parts=st.integers(1, 4), seed=st.integers(0, 99))
def test_gathering_restores_window_order_and_tells_owners(whole: Columns, parts: int, seed: int) -> None:
    owner = np.random.default_rng(seed).integers(0, parts, len(whole)).astype(np.int32)
    split = []
    for p in range(parts):
        order, rows, tokens, loss, nbytes, structures, costs, features = (
            a[owner == p] for a in arrays(whole)
        )
        split.append(
            Columns(order, rows, tokens, loss, nbytes, structures, costs, features, names=whole.names)
        )
    gathered, holders = Columns.gather(split)
    by_order = np.argsort(whole.order)
    np.testing.assert_array_equal(holders, owner[by_order])
    assert holders.dtype == np.int32
    for before, after in zip(arrays(whole), arrays(gathered), strict=True):
        np.testing.assert_array_equal(before[by_order], after)


def test_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("2 samples take 104 bytes of columns, got 103")):
        Columns.unpack(np.zeros(103, dtype=np.uint8), 2, 1, ())


@given(a=columns(), b=columns())
def test_schemas_are_equal_if_the_columns_mean_the_same(a: Columns, b: Columns) -> None:
    assert (a.schema == b.schema) == ((a.stages, a.names) == (b.stages, b.names))
    assert 0 <= a.schema < 1 << 63


def test_loss_tokens_are_known_if_each_is() -> None:
    def some(loss: list[int]) -> Columns:
        ints = np.array(loss, dtype=np.int64)
        none = np.empty((len(loss), 0))
        return Columns(ints, ints.astype(np.int32), ints, ints, ints, ints, none, none)

    assert some([3, 0, 4]).known_loss_tokens() == 7
    assert some([3, -1, 4]).known_loss_tokens() == -1
    assert some([]).known_loss_tokens() == 0
