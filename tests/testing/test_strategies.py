"""What the strategies draw is what evenstep takes."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.packing import collate_varlen
from evenstep.plan import Plan, plan_window
from evenstep.testing.strategies import batches, plans, rows, sample_lists, samples, windows

thoroughly = settings(max_examples=500 if settings.default and settings.default.derandomize else 100)


@thoroughly
@given(
    samples(min_tokens=0, max_tokens=5, vocab=9, extras=("loss_weights", "token_type_ids", "mrope", "index"))
)
def test_samples_have_fields_as_long_as_their_tokens(sample: dict[str, Any]) -> None:
    length = len(sample["input_ids"])
    assert length <= 5
    assert all(1 <= t < 9 for t in sample["input_ids"].tolist())
    assert sample["loss_weights"].shape == sample["token_type_ids"].shape == (length,)
    assert sample["mrope"].shape == (3, length)
    assert type(sample["index"]) is int
    assert all(
        label in (-100, token)
        for token, label in zip(
            sample["input_ids"].tolist(), sample.get("labels", sample["input_ids"]).tolist(), strict=True
        )
    )


@thoroughly
@given(samples(labels=True), samples(labels=False))
def test_labels_can_be_had_or_not(with_labels: dict[str, Any], without: dict[str, Any]) -> None:
    assert "labels" in with_labels
    assert "labels" not in without


def test_unknown_extras_are_told() -> None:
    message = "extras has ['speed']; the strategy makes index, loss_weights, mrope, token_type_ids"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        samples(extras=("speed",))


@thoroughly
@given(sample_lists(seq_len=9))
def test_lists_of_samples_fit(drawn: list[dict[str, Any]]) -> None:
    assert 1 <= sum(len(s["input_ids"]) for s in drawn) <= 9
    assert len({frozenset(set(s) - {"labels"}) for s in drawn}) == 1


def test_full_rows_are_not_rare() -> None:
    full = 0

    @settings(max_examples=100, derandomize=True, database=None)
    @given(sample_lists(seq_len=16))
    def count(drawn: list[dict[str, Any]]) -> None:
        nonlocal full
        full += sum(len(s["input_ids"]) for s in drawn) == 16

    count()
    assert full >= 5


@thoroughly
@given(rows(seq_len=8))
def test_rows_are_packed(row: dict[str, Any]) -> None:
    assert len(row["input_ids"]) == 8
    assert row["cu_seqlens"][-1] == row["num_tokens"]


@thoroughly
@given(rows(seq_len=8, padding=False))
def test_padding_rows_can_be_left_out(row: dict[str, Any]) -> None:
    assert row["num_tokens"] >= 1


@thoroughly
@given(batches())
def test_batches_are_collated(batch: dict[str, Any]) -> None:
    assert batch["input_ids"].shape == batch["labels"].shape
    assert batch["num_tokens"] == sum(int(c[-1]) for c in batch["cu_seqlens"])


@thoroughly
@given(batches(collate=collate_varlen))
def test_any_collate_makes_batches(batch: dict[str, Any]) -> None:
    assert isinstance(batch["cu_seqlens"], torch.Tensor)


@thoroughly
@given(windows(max_stages=2))
def test_windows_have_a_feasible_reference(window: dict[str, Any]) -> None:
    total = window["micro_batches"] * window["dp_size"] * window["rows"]
    used = np.bincount(window["reference"], weights=window["tokens"], minlength=total)
    assert len(used) == total
    assert ((used >= 1) & (used <= window["constraints"].seq_len)).all()
    plan = plan_window(**window)
    assert len(plan.assignment) == len(window["tokens"])


@thoroughly
@given(st.data())
def test_plans_conserve_their_samples(data: st.DataObject) -> None:
    window = data.draw(windows())
    plan: Plan = data.draw(plans(st.just(window)))
    moved = np.bincount(plan.assignment, weights=window["tokens"])
    assert moved.sum() == window["tokens"].sum()
    assert moved.max() <= window["constraints"].seq_len


@thoroughly
@given(plans())
def test_plans_come_alone(plan: Plan) -> None:
    assert plan.loads.shape[:2] == (plan.micro_batches, plan.dp_size)
