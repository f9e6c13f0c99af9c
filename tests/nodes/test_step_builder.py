"""Steps built of a stream: rows within their limits, nothing lost, state without payloads, exact resume."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torchdata.nodes as tn
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep import Infeasible, LoaderConfig, SampleError, SampleMetadata, build_loader
from evenstep.nodes import StepBuilder
from evenstep.testing import assert_node_conforms

SEQ_LEN = 10


class Stream:
    """Samples of given lengths, each with its own number."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self.pulled = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for k, n in enumerate(self.lengths):
            self.pulled += 1
            yield {"input_ids": [k] * n, "k": k}


streams = st.lists(st.integers(0, SEQ_LEN), min_size=1, max_size=40)


@settings(max_examples=200, deadline=None)
@given(lengths=streams, rows=st.integers(1, 5), look_ahead=st.integers(1, 8))
def test_every_sample_comes_once_in_rows_within_their_limit(
    lengths: list[int], rows: int, look_ahead: int
) -> None:
    source = Stream(lengths)
    builder = StepBuilder(source, SEQ_LEN, rows, look_ahead=look_ahead)
    seen: list[int] = []
    for step in builder:
        assert len(step) == rows
        assert all(sum(len(s["input_ids"]) for s in row) <= SEQ_LEN for row in step)
        seen += [s["k"] for row in step for s in row]
        oldest = min(set(range(len(lengths))) - set(seen), default=source.pulled)
        assert source.pulled - oldest <= rows * SEQ_LEN + look_ahead + len([n for n in lengths if n == 0])
        assert source.pulled - len(seen) <= look_ahead
    assert sorted(seen) == list(range(len(lengths)))


@settings(max_examples=50, deadline=None)
@given(lengths=streams, rows=st.integers(1, 4), look_ahead=st.integers(1, 6))
def test_the_oldest_waiting_sample_is_in_the_next_step(
    lengths: list[int], rows: int, look_ahead: int
) -> None:
    missing = set(range(len(lengths)))
    for step in StepBuilder(Stream(lengths), SEQ_LEN, rows, look_ahead=look_ahead):
        members = {s["k"] for row in step for s in row}
        assert min(missing) in members
        missing -= members


@settings(max_examples=50, deadline=None)
@given(lengths=streams, rows=st.integers(1, 4), look_ahead=st.integers(1, 6), data=st.data())
def test_a_stop_anywhere_resumes_exactly(
    lengths: list[int], rows: int, look_ahead: int, data: st.DataObject
) -> None:
    def build() -> StepBuilder:
        return StepBuilder(Stream(lengths), SEQ_LEN, rows, look_ahead=look_ahead)

    builder, steps, states = build(), [], []
    states.append(builder.state_dict())
    for step in builder:
        steps.append(step)
        states.append(builder.state_dict())
    cut = data.draw(st.integers(0, len(steps)))
    again = build()
    again.reset(json.loads(json.dumps(states[cut])))
    assert list(again) == steps[cut:]
    assert again.state_dict() == states[-1]


@pytest.mark.parametrize("kind", ["iterable", "nodes"])
def test_it_conforms(kind: str) -> None:
    lengths = [6, 5, 4, 3, 2, 9, 8, 1, 7, 3, 2, 2, 5, 10, 1]
    samples = list(Stream(lengths))

    def build() -> StepBuilder:
        source: Any = samples if kind == "iterable" else tn.IterableWrapper(samples)
        return StepBuilder(source, SEQ_LEN, 2, look_ahead=2)

    assert_node_conforms(build)


def test_the_state_holds_positions_and_no_payload() -> None:
    builder = StepBuilder(Stream([6, 5, 9, 4, 8, 3]), SEQ_LEN, 2, look_ahead=2)
    next(builder)
    # 0 and 3 share a row, 1 sits in the other; 2 (and 4) wait.
    assert builder.state_dict() == {"source": {"taken": 0}, "pulled": 5, "handed": "b", "marks": "0"}


def test_more_look_ahead_fills_rows_better() -> None:
    lengths = [(7 * k * k + 3 * k) % SEQ_LEN + 1 for k in range(300)]

    def fill(look_ahead: int) -> float:
        steps = list(StepBuilder(Stream(lengths), SEQ_LEN, 4, look_ahead=look_ahead))
        return sum(lengths) / (len(steps) * 4 * SEQ_LEN)

    assert fill(1) < fill(8) <= fill(64)
    assert fill(64) > 0.95


def test_budgets_and_segments_bind() -> None:
    def metadata(sample: dict[str, Any]) -> SampleMetadata:
        return SampleMetadata(len(sample["input_ids"]), {"patches": float(sample["k"])})

    builder = StepBuilder(
        Stream([1, 1, 1, 1, 1]), SEQ_LEN, 2, metadata_fn=metadata, budgets={"patches": 4.0}, max_segments=2
    )
    assert [[[s["k"] for s in row] for row in step] for step in builder] == [[[0, 1], [2]], [[3], [4]]]
    tight = StepBuilder(Stream([1, 1, 1]), SEQ_LEN, 2, metadata_fn=metadata, budgets={"patches": 1.0})
    with pytest.raises(
        Infeasible,
        match=re.escape(
            "sample 2 has patches=2.0, the budget of a row is 1.0: it fits no row. Raise the budget, leave the sample "
            "out, or choose oversized='single'."
        ),
    ):
        next(tight)


def test_a_sample_above_a_budget_may_have_a_row_of_its_own() -> None:
    def metadata(sample: dict[str, Any]) -> SampleMetadata:
        return SampleMetadata(len(sample["input_ids"]), {"patches": 9.0 if sample["k"] == 1 else 0.0})

    builder = StepBuilder(
        Stream([1, 1, 1, 1]), SEQ_LEN, 2, metadata_fn=metadata, budgets={"patches": 5.0}, oversized="single"
    )
    assert [[[s["k"] for s in row] for row in step] for step in builder] == [[[0, 2, 3], [1]]]


@pytest.mark.parametrize(
    ("budget", "share", "most"),
    [(1.0, 0.1, 10), (3.0, 0.3, 10), (30.0, 1 / 3, 90), (1.0, 1 / 3, 3), (0.7, 0.1, 7)],
)
def test_rows_full_of_fractions_are_full_for_the_planner_too(budget: float, share: float, most: int) -> None:
    def metadata(sample: dict[str, Any]) -> SampleMetadata:
        return SampleMetadata(len(sample["input_ids"]), {"share": share})

    builder = StepBuilder(Stream([1] * 2 * most), 128, 2, metadata_fn=metadata, budgets={"share": budget})
    config = LoaderConfig(seq_len=128, budgets={"share": budget})
    with build_loader(builder, None, config, metadata_fn=metadata) as loader:
        assert [batch["info"].num_samples for batch in loader] == [most, most]


def test_oversized_samples_follow_the_policy() -> None:
    message = (
        "sample 1 since the stream was begun or loaded: ValueError: it has 12 tokens, seq_len is 10: it fits no row. "
        "Raise seq_len, split it (evenstep.datasets.SplitDocuments), or choose oversized='truncate' or 'single'"
    )
    with pytest.raises(SampleError, match=f"^{re.escape(message)}$"):
        next(StepBuilder(Stream([3, 12]), SEQ_LEN, 2))
    for policy in ("single", "truncate"):
        step = next(StepBuilder(Stream([3, 12, 4]), SEQ_LEN, 2, oversized=policy))
        assert [[s["k"] for s in row] for row in step] == [[0, 2], [1]]


@pytest.mark.parametrize(
    ("name", "value"), [("rows", 0), ("rows", True), ("look_ahead", 0), ("look_ahead", 1.5)]
)
def test_odd_numbers_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{name}={value!r}, expected an integer >= 1")):
        StepBuilder([], SEQ_LEN, **{"rows": 2, name: value})


def test_a_foreign_state_is_refused() -> None:
    with pytest.raises(
        ValueError, match=re.escape("this is not the state of a StepBuilder: missing keys ['marks']")
    ):
        StepBuilder([], SEQ_LEN, 2).reset({"source": {"taken": 0}, "pulled": 0, "handed": "0"})


def test_a_source_that_cannot_be_iterated_is_refused() -> None:
    with pytest.raises(
        TypeError, match=re.escape("the source of samples is int 3, expected a torchdata node")
    ):
        StepBuilder(3, SEQ_LEN, 2)


def test_an_iterator_that_can_run_only_once_says_so() -> None:
    builder = StepBuilder(iter([{"input_ids": [1]}]), SEQ_LEN, 1)
    assert len(list(builder)) == 1
    builder.reset(None)
    with pytest.raises(RuntimeError, match=re.escape("list_iterator can be iterated only once")):
        next(builder)


@pytest.mark.parametrize("cut", range(3))
def test_samples_that_cannot_be_measured_are_skipped_and_stay_so_after_a_resume(
    cut: int, caplog: pytest.LogCaptureFixture
) -> None:
    samples: list[Any] = [
        {"input_ids": [k] * n} if n else {"text": k} for k, n in enumerate([5, 0, 6, 3, 0, 9, 2, 4, 8])
    ]

    def builder() -> StepBuilder:
        return StepBuilder(samples, 10, 2, look_ahead=2, on_sample_error="skip")

    whole = builder()
    steps = [next(whole) for _ in range(cut)]
    state = copy.deepcopy(whole.state_dict())
    rest = list(whole)
    found = sorted(sample["input_ids"][0] for step in steps + rest for row in step for sample in row)
    assert found == [0, 2, 3, 5, 6, 7, 8]
    assert whole.skipped == 2
    assert [record.getMessage() for record in caplog.records] == [
        f"evenstep: sample {k} since the stream was begun or loaded is skipped: TypeError: a sample of type dict without "
        "'input_ids' says nothing of its length; pass metadata_fn=lambda sample: number_of_tokens"
        for k in (1, 4)
    ]
    again = builder()
    again.reset(state)
    assert list(again) == rest
    with pytest.raises(
        SampleError, match=re.escape("sample 1 since the stream was begun or loaded: TypeError: a sample")
    ):
        list(StepBuilder(samples, 10, 2))
