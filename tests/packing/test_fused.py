"""The one-pass form equals pack and collate one after the other, bit for bit."""

from __future__ import annotations

import functools
import re
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.packing import collate_rows, collate_varlen, fused, fused_pack, pack_text

# Continuous integration is the derandomised profile.
thoroughly = settings(max_examples=500 if settings.default and settings.default.derandomize else 100)

DTYPES = [torch.int64, torch.int32, torch.uint8]


@st.composite
def rows_of_samples(draw: st.DrawFn) -> list[list[dict[str, Any]]]:
    rows = []
    for lengths in draw(st.lists(st.lists(st.integers(0, 7), max_size=4), min_size=1, max_size=4)):
        row = []
        for n in lengths:
            ids = torch.arange(n).to(draw(st.sampled_from(DTYPES))) + draw(st.integers(0, 100))
            sample: dict[str, Any] = {"input_ids": ids.numpy() if draw(st.booleans()) else ids}
            if draw(st.booleans()):
                mask = draw(st.lists(st.booleans(), min_size=n, max_size=n))
                sample["labels"] = [int(t) if m else -100 for t, m in zip(ids, mask, strict=True)]
            if draw(st.integers(0, 20)) == 20:
                sample["loss_weights"] = np.ones(n)
            row.append(sample)
        rows.append(row)
    return rows


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert list(one) == list(other)
    for name, value in one.items():
        pairs = zip(value, other[name], strict=True) if isinstance(value, list) else [(value, other[name])]
        for a, b in pairs:
            assert type(a) is type(b), name
            if isinstance(a, torch.Tensor):
                assert a.dtype == b.dtype, name
                assert a.shape == b.shape, name
                assert a.is_contiguous() == b.is_contiguous(), name
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, name


@thoroughly
@given(
    rows_of_samples(),
    st.integers(28, 31),
    st.fixed_dictionaries(
        {},
        optional={
            "shifted": st.booleans(),
            "pad_token_id": st.just(7),
            "ignore_index": st.just(-1),
            "oversized": st.sampled_from(["truncate", "single"]),
        },
    ),
    st.fixed_dictionaries(
        {},
        optional={"pad_to_multiple_of": st.just(8), "pad_token_id": st.just(9), "ignore_index": st.just(-2)},
    ),
    st.sampled_from([collate_rows, collate_varlen]),
)
def test_one_pass_equals_two(
    rows: list[list[dict[str, Any]]],
    seq_len: int,
    pack_options: dict[str, Any],
    collate_options: dict[str, Any],
    collate: Any,
) -> None:
    pack: Any = functools.partial(pack_text, **pack_options)
    collate = functools.partial(collate, **collate_options)
    one_pass = fused(pack, collate)
    assert one_pass is not None
    try:
        expected = collate([pack(samples, seq_len) for samples in rows])
    except ValueError as error:
        with pytest.raises(ValueError, match=f"^{re.escape(str(error))}$"):
            one_pass(rows, seq_len)
        return
    assert_same(one_pass(rows, seq_len), expected)


def test_tokens_are_written_without_the_two_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    def composed(*args: Any) -> Any:
        raise AssertionError("took the long way")

    rows: list[list[dict[str, Any]]] = [
        [{"input_ids": torch.arange(5)}, {"input_ids": np.arange(3)}],
        [],
    ]
    for collate in (collate_rows, collate_varlen):
        one_pass = fused(pack_text, collate)
        assert one_pass is not None
        long_way = collate([pack_text(samples, 8) for samples in rows])
        direct = type(one_pass)(composed, composed, one_pass.flat, {}, {})
        assert_same(direct(rows, 8), long_way)


def test_oversized_and_crowded_rows_go_the_long_way() -> None:
    sample = {"input_ids": torch.arange(5)}
    one_pass = fused(functools.partial(pack_text, oversized="single"), collate_rows)
    assert one_pass is not None
    assert one_pass([[sample]], 4)["input_ids"].shape == (1, 5)
    message = (
        "2 samples with 10 tokens in a row of 8; 2 tokens would be lost; plan the rows with the lengths that are "
        "packed (lengths [5, 5])"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        fused_pack([[sample, sample]], 8)


@pytest.mark.parametrize(
    "row",
    [
        [MappingProxyType({"input_ids": torch.arange(3)})],
        [{"input_ids": torch.arange(3)[None]}],
        [{"input_ids": torch.arange(3.0)}],
        [{"labels": torch.arange(3)}],
        [{"input_ids": torch.arange(3), "labels": torch.arange(2)}],
        [{"input_ids": torch.arange(3), "labels": torch.arange(3.0)}],
        [{"input_ids": torch.arange(3), "loss_weights": torch.ones(3)}],
        [{"input_ids": torch.arange(3), "labels": torch.arange(3), "name": "a"}],
    ],
)
@pytest.mark.parametrize("seq_len", [4, 0])
def test_what_the_one_pass_cannot_read_ends_as_in_two(row: list[Any], seq_len: int) -> None:
    one_pass = fused(pack_text, collate_rows)
    assert one_pass is not None
    try:
        expected: Any = collate_rows([pack_text(row, seq_len)])
    except (ValueError, TypeError) as error:
        with pytest.raises(type(error), match=f"^{re.escape(str(error))}$"):
            one_pass([row], seq_len)
    else:
        assert_same(one_pass([row], seq_len), expected)


def test_a_users_function_has_no_one_pass_form() -> None:
    def pack(samples: Any, seq_len: int) -> Any:
        return pack_text(samples, seq_len)

    assert fused(pack, collate_rows) is None
    assert fused(pack_text, list) is None
    assert fused(functools.partial(pack_text, []), collate_rows) is None
    with pytest.raises(
        ValueError, match=r"are not both built in, so there is no one-pass form of them; call"
    ):
        fused_pack([[]], 4, pack=pack)


def test_nested_options() -> None:
    inner = functools.partial(functools.partial(pack_text, pad_token_id=1), pad_token_id=2)
    one_pass = fused(inner, collate_rows)
    assert one_pass is not None
    assert one_pass([[]], 2)["input_ids"].tolist() == [[2, 2]]


@pytest.mark.parametrize("collate", [collate_rows, collate_varlen])
def test_the_batch_shares_nothing_with_the_samples(collate: Any) -> None:
    ids = torch.arange(1, 5)
    batch = fused_pack([[{"input_ids": ids, "labels": ids}]], 4, collate=collate)
    ids.zero_()
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4]]
    assert batch["labels"].tolist() == [[-100, 2, 3, 4]]
