"""Laws 6 and 7: stop anywhere, go on in the same layout or another one; nothing is skipped, repeated or reshuffled."""

from __future__ import annotations

import json
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep import (
    Cursor,
    DataPlane,
    LinearQuadraticCost,
    Loader,
    StateMismatch,
    StepSampler,
)
from evenstep.testing.jobs import Layout, Seen, Stream, layouts, members_by_step, streams

FIXTURES = Path(__file__).parent.parent / "fixtures"
SMALL = Stream(kind="step", lengths=tuple([7, 3, 12, 1, 9, 20, 5, 2] * 8), rows=24, seed=5)
IN_A_STEP = re.escape("resume='micro_batch' cannot continue inside this step, which starts again")


def take(loader: Loader[Any], batches: int | None = None) -> list[Seen]:
    seen: list[Seen] = []
    while batches is None or len(seen) < batches:
        try:
            seen.append(Seen.of(next(loader), loader))
        except StopIteration:
            break
    return seen


def stop_and_go(
    first: tuple[Stream, Layout], second: tuple[Stream, Layout], batches: int, rest: int | None = None
) -> tuple[list[list[Seen]], list[list[Seen]], dict[str, Any]]:
    """What every rank saw until it stopped, and what new processes saw after it."""
    states: list[str] = []

    def before(plane: DataPlane) -> list[Seen]:
        with first[1].loader(first[0], plane) as loader:
            seen = take(loader, batches)
            states.append(json.dumps(loader.state_dict()))
        return seen

    def after(plane: DataPlane) -> list[Seen]:
        with second[1].loader(second[0], plane) as loader:
            loader.load_state_dict(json.loads(states[0]))
            return take(loader, rest)

    earlier = first[1].world().run(before)
    assert len(set(states)) == 1, "the state differs between ranks"
    assert len(states[0]) < 512
    return earlier, second[1].world().run(after), json.loads(states[0])


def whole(stream: Stream, layout: Layout) -> list[list[Seen]]:
    def epoch(plane: DataPlane) -> list[Seen]:
        with layout.loader(stream, plane) as loader:
            return take(loader)

    return layout.world().run(epoch)


@settings(max_examples=25)
@given(st.data())
def test_stopped_anywhere_the_rest_is_identical(data: st.DataObject) -> None:
    """Law 6, with ``resume="micro_batch"``: in new processes, in the same layout."""
    stream = data.draw(streams())
    layout = data.draw(layouts(stream, tp_sizes=(1, 1, 2), dp_sizes=(1, 2, 3, 4), resume="micro_batch"))
    uninterrupted = whole(stream, layout)
    cut = data.draw(st.integers(0, len(uninterrupted[0])))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        before, after, _ = stop_and_go((stream, layout), (stream, layout), cut)
    assert [a + b for a, b in zip(before, after, strict=True)] == uninterrupted


@settings(max_examples=25)
@given(st.data())
def test_the_default_begins_the_step_under_way_again(data: st.DataObject) -> None:
    """Law 6, with ``resume="step"``."""
    stream = data.draw(streams())
    layout = data.draw(layouts(stream, tp_sizes=(1, 1, 2), dp_sizes=(1, 2, 3, 4)))
    uninterrupted = whole(stream, layout)
    cut = data.draw(st.integers(0, len(uninterrupted[0])))
    before, after, _ = stop_and_go((stream, layout), (stream, layout), cut)
    for rank, seen in enumerate(before):
        complete = cut
        while complete and not seen[complete - 1].info.is_last_micro_batch:
            complete -= 1
        assert after[rank] == uninterrupted[rank][complete:]


@settings(max_examples=40)
@given(st.data())
def test_on_another_number_of_ranks_the_remaining_steps_have_the_same_members(data: st.DataObject) -> None:
    """Law 7, and inside a step it starts again; also with another global batch size, from the same sample on."""
    stream = data.draw(streams(rows=(24, 48)))
    first = data.draw(layouts(stream, tp_sizes=(1, 1, 2)))
    batches = data.draw(st.integers(0, 12))
    other = stream
    if stream.kind in ("step", "mixture") and stream.remainder != "wrap" and data.draw(st.booleans()):
        other = replace(stream, rows=data.draw(st.sampled_from([24, 48])))
    second = data.draw(
        layouts(other, tp_sizes=(1, 1, 2), resume=data.draw(st.sampled_from(["step", "micro_batch"])))
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before, after, state = stop_and_go((stream, first), (other, second), batches)
    if state["micro_batch"] and second.options["resume"] == "micro_batch" and first.dp == second.dp:
        return
    cursor = Cursor.from_dict(state)
    expected = {c.step: members for c, members in other.steps(replace(cursor, micro_batch=0, plan=0))}
    assert members_by_step(after[:: second.tp]) == expected
    # What was trained on by complete steps before, and what comes, is what one uninterrupted run has.
    if other == stream:
        done = {s: m for s, m in members_by_step(before[:: first.tp]).items() if s < cursor.step}
        assert {**done, **expected} == {c.step: members for c, members in stream.steps()}


def layout_of(dp: int = 2, micro_batch_size: int = 2, **options: Any) -> Layout:
    return Layout(dp=dp, options={"micro_batch_size": micro_batch_size, "host_prefetch": 0, **options})


@pytest.mark.parametrize(
    "other",
    [
        layout_of(dp=4, resume="micro_batch"),
        layout_of(micro_batch_size=1, resume="micro_batch"),
        layout_of(balance_window=2, resume="micro_batch"),
    ],
    ids=["dp size", "micro-batch size", "window"],
)
def test_a_changed_layout_warns_and_begins_the_step_again(other: Layout) -> None:
    same = layout_of(resume="micro_batch")
    with pytest.warns(UserWarning, match=IN_A_STEP):
        _, after, state = stop_and_go((SMALL, same), (SMALL, other), 8)
    assert (state["step"], state["micro_batch"]) == (1, 2)
    assert (after[0][0].info.step, after[0][0].info.micro_batch) == (1, 0)
    assert members_by_step(after) == {c.step: m for c, m in SMALL.steps() if c.step >= 1}


def test_a_changed_global_batch_warns_and_begins_at_the_same_sample() -> None:
    same, other = layout_of(resume="micro_batch"), replace(SMALL, rows=12)
    with pytest.warns(UserWarning, match=IN_A_STEP):
        _, after, state = stop_and_go((SMALL, same), (other, same), 8)
    assert state["consumed_samples"] == 24
    start = replace(Cursor.from_dict(state), micro_batch=0, plan=0)
    expected = {c.step: members for c, members in other.steps(start)}
    assert list(expected) == [1, 2, 3]
    assert members_by_step(after) == expected


@pytest.mark.parametrize("known", [False, True], ids=["online", "metadata"])
@pytest.mark.parametrize("prefetch", [0, None])
def test_another_plan_warns_and_begins_the_step_again(known: bool, prefetch: int | None) -> None:
    layout = replace(layout_of(resume="micro_batch", balance_window=3, host_prefetch=prefetch), known=known)
    states: list[dict[str, Any]] = []

    def before(plane: DataPlane) -> None:
        with layout.loader(SMALL, plane) as loader:
            take(loader, 10)
            states.append(loader.state_dict())

    def after(plane: DataPlane) -> list[Seen]:
        cost = LinearQuadraticCost(1.0, 3.0)
        with layout.loader(SMALL, plane, cost=cost) as loader:
            loader.load_state_dict(states[0])
            return take(loader)

    layout.world().run(before)
    assert (states[0]["step"], states[0]["micro_batch"]) == (1, 4)
    with pytest.warns(
        UserWarning,
        match=re.escape(
            "the state stands after micro-batch 4 of step 1, but its window is planned differently now (cost model, "
            "algorithm, gate, capacity or metadata changed); the step starts again"
        ),
    ):
        ranks = layout.world().run(after)
    assert [(b.info.step, b.info.micro_batch) for b in ranks[0]] == [(1, m) for m in range(6)]
    assert members_by_step(ranks) == {c.step: m for c, m in SMALL.steps() if c.step == 1}


def test_between_windows_another_plan_does_not_matter() -> None:
    layout = layout_of(resume="micro_batch", balance_window=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, after, state = stop_and_go(
            (SMALL, layout), (SMALL, replace(layout, options={**layout.options, "algorithm": "lpt"})), 9
        )
    assert (state["micro_batch"], state["plan"]) == (3, 0)
    assert [(b.info.step, b.info.micro_batch) for b in after[0]] == [(1, 3), (1, 4), (1, 5)]


def test_delivered_micro_batches_are_not_read_again() -> None:
    read: list[int] = []

    class Noting:
        def __len__(self) -> int:
            return len(SMALL)

        def __getitem__(self, index: int) -> dict[str, int]:
            read.append(index)
            return SMALL[index]

    layout = replace(layout_of(dp=1, resume="micro_batch"), known=True)
    with layout.loader(SMALL, DataPlane.single()) as loader:
        take(loader, 5)
        state = loader.state_dict()
    with layout.loader(SMALL, DataPlane.single(), dataset=Noting()) as loader:
        loader.load_state_dict(state)
        first = take(loader, 1)
    assert sorted(read) == sorted(i for row in first[0].rows for i in row)


def test_a_hyper_parallel_state_goes_on_at_its_sample() -> None:
    theirs = {
        "_index_sampler_state": {
            "consumed_samples": 24,
            "epoch": 2,
            "global_batch_size": 24,
            "dp_world_size": 8,
            "optimizer_step_offset": 5,
        },
        "_iterator_finished": False,
        "dataset_state": {"dataset_size": len(SMALL), "seed": 5},
    }
    layout = layout_of()

    def train(plane: DataPlane) -> tuple[dict[str, Any], int, list[Seen]]:
        with layout.loader(SMALL, plane) as loader:
            loader.load_state_dict(theirs)
            return loader.state_dict(), loader.step, take(loader)

    ranks = layout.world().run(train)
    state, step, _ = ranks[0]
    assert step == 6
    assert (state["epoch"], state["consumed_samples"], state["dp_size"]) == (2, 24, 8)
    start = Cursor(epoch=2, consumed_samples=24, step=6)
    assert members_by_step([seen for _, _, seen in ranks]) == {c.step: m for c, m in SMALL.steps(start)}
    foreign = {**theirs, "dataset_state": {"dataset_size": 63, "seed": 5}}
    with layout_of(dp=1).loader(SMALL, DataPlane.single()) as loader, pytest.raises(StateMismatch):
        loader.load_state_dict(foreign)


class Numbers:
    """Samples without payload."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"index": index, "length": 1 + index % 7}


def test_a_stored_state_of_version_1_goes_on() -> None:
    stored = json.loads((FIXTURES / "cursor-v1.json").read_text())
    sampler = StepSampler(
        stored["dataset_size"], global_batch_size=stored["global_batch_size"], seed=stored["seed"]
    )
    expected = sampler.step_at(replace(Cursor.from_dict(stored), micro_batch=0, plan=0))
    assert expected is not None
    arguments: dict[str, Any] = {"dataset": Numbers(stored["dataset_size"]), "sampler": sampler}
    layout = layout_of(dp=1)
    # It was made for an order of the user's own, which is part of the stream.
    with layout.loader(SMALL, DataPlane.single(), **arguments) as loader, pytest.raises(StateMismatch):
        loader.load_state_dict(stored)
    arguments["allow_changed_dataset"] = True
    with layout.loader(SMALL, DataPlane.single(), **arguments) as loader:
        loader.load_state_dict(stored)
        assert loader.state_dict() == stored
        seen = take(loader, 512 // 2)
        assert loader.step == 1235
    assert (seen[0].info.step, seen[0].info.micro_batch, seen[0].state["epoch"]) == (1234, 0, 3)
    assert members_by_step([seen]) == {1234: sorted(expected.indices.tolist())}


@pytest.mark.parametrize(
    ("other", "name", "saved", "current"),
    [
        (replace(SMALL, seed=6), "seed", 5, 6),
        (replace(SMALL, order="sequential"), "order", "shuffled", "sequential"),
        (replace(SMALL, lengths=SMALL.lengths[:-1]), "dataset_size", 64, 63),
    ],
)
def test_another_stream_is_refused_when_its_state_is_loaded(
    other: Stream, name: str, saved: object, current: object
) -> None:
    layout = layout_of(dp=1)
    with layout.loader(SMALL, DataPlane.single()) as loader:
        take(loader, 12)
        state = loader.state_dict()
    with layout.loader(other, DataPlane.single()) as loader:
        untouched = loader.state_dict()
        message = (
            f"the state was saved with {name}={saved!r}, this loader has {name}={current!r}: resuming would skip, "
            "repeat or reshuffle samples. Load it with the dataset and sampler it was saved with, or pass "
            "allow_changed_dataset=True to continue at the same position of the other stream."
        )
        with pytest.raises(StateMismatch, match=f"^{re.escape(message)}$"):
            loader.load_state_dict(state)
        assert loader.state_dict() == untouched
    with layout.loader(other, DataPlane.single(), allow_changed_dataset=True) as loader:
        loader.load_state_dict(state)
        seen = take(loader)
    start = replace(Cursor.from_dict(state), micro_batch=0, plan=0)
    assert members_by_step([seen]) == {c.step: m for c, m in other.steps(start)}
