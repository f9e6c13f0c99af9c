"""The laws of the loader over random jobs, with ranks as threads of one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings, target
from hypothesis import strategies as st

from evenstep import DataPlane, RemoteRankError, SampleError
from evenstep.nodes import PlannedBatch, Planner, SamplerReader
from evenstep.nodes.stage import upstream
from evenstep.testing.jobs import (
    DP_SIZES,
    Layout,
    Seen,
    Stream,
    jobs,
    layouts,
    members_by_step,
    streams,
)


def epoch(plane: DataPlane, stream: Stream, layout: Layout) -> list[Seen]:
    loader = layout.loader(stream, plane)
    seen = [Seen.of(batch, loader) for batch in loader]
    loader.close()
    return seen


def check_membership(stream: Stream, layout: Layout, ranks: list[list[Seen]]) -> None:
    """Law 1 and law 2: a step has the members that the sampler gives it, each in one row of one rank."""
    expected = {cursor.step: members for cursor, members in stream.steps()}
    assert members_by_step(ranks[:: layout.tp]) == expected


def check_limits(stream: Stream, layout: Layout, ranks: list[list[Seen]]) -> None:
    """Law 3."""
    for batch in (batch for seen in ranks for batch in seen):
        assert len(batch.rows) == layout.options["micro_batch_size"]
        # What the loop is told comes from the plan, the rows from what was read and exchanged.
        assert batch.info.num_samples == sum(map(len, batch.rows))
        assert batch.info.num_tokens == sum(stream.lengths[i] for row in batch.rows for i in row)
        for row in batch.rows:
            assert sum(stream.lengths[i] for i in row) <= stream.seq_len


def check_counts(ranks: list[list[Seen]]) -> None:
    """Law 4, and that the loop is told the truth."""
    places = [[(b.info.step, b.info.micro_batch, b.info.num_micro_batches) for b in seen] for seen in ranks]
    assert all(other == places[0] for other in places)
    position = 0
    while position < len(places[0]):
        step, _, count = places[0][position]
        assert places[0][position : position + count] == [(step, m, count) for m in range(count)]
        position += count
    for seen in ranks:
        for batch in seen:
            assert batch.info.is_last_micro_batch == (
                batch.info.micro_batch == batch.info.num_micro_batches - 1
            )


def check_plans(ranks: list[list[Seen]]) -> None:
    """Law 5: the state holds the digest of the plan, and is the same everywhere."""
    assert all([b.state for b in seen] == [b.state for b in ranks[0]] for seen in ranks)


@settings(max_examples=60)
@given(jobs(tp_sizes=(1, 1, 2)))
def test_the_laws_hold_in_any_layout(job: tuple[Stream, Layout]) -> None:
    stream, layout = job
    ranks = layout.world().run(epoch, stream, layout)
    check_membership(stream, layout, ranks)
    check_limits(stream, layout, ranks)
    check_counts(ranks)
    check_plans(ranks)


@pytest.mark.parametrize("dp", DP_SIZES)
@settings(max_examples=170)
@given(data=st.data())
def test_membership_does_not_depend_on_the_layout_in_a_thousand_of_them(dp: int, data: st.DataObject) -> None:
    """Law 2, a sixth of the thousand on each number of ranks."""
    stream = data.draw(streams())
    expected = {cursor.step: members for cursor, members in stream.steps()}
    layout = data.draw(layouts(stream, dp_sizes=[dp], host_prefetch=[0]))
    assert members_by_step(layout.world().run(epoch, stream, layout)) == expected


@settings(max_examples=20)
@given(jobs(tp_sizes=(1, 2)), st.data())
def test_taking_the_state_changes_nothing(job: tuple[Stream, Layout], data: st.DataObject) -> None:
    """Law 11."""
    stream, layout = job
    taken = data.draw(st.lists(st.booleans(), min_size=8, max_size=8))

    def rows(plane: DataPlane, when: list[bool]) -> list[list[list[int]]]:
        loader = layout.loader(stream, plane)
        seen = []
        for k, batch in enumerate(loader):
            seen.append(batch["rows"])
            if when[k % len(when)]:
                assert loader.state_dict() == loader.state_dict()
        return seen

    assert layout.world().run(rows, taken) == layout.world().run(rows, [False])


@settings(max_examples=30)
@given(st.data())
def test_every_sample_goes_where_the_plan_says(data: st.DataObject) -> None:
    """Law 1, row by row: nothing is exchanged for something else on its way."""
    stream = data.draw(streams())
    layout = data.draw(layouts(stream, dp_sizes=(2, 3, 4), host_prefetch=[0]))
    layout = replace(layout, known=False)

    def compare(plane: DataPlane) -> int:
        loader = layout.loader(stream, plane)
        nodes = list(upstream(loader.root))
        reader = next(node for node in nodes if isinstance(node, SamplerReader))
        planner = next(node for node in nodes if isinstance(node, Planner))
        planned: list[PlannedBatch] = []
        produce, size, moved = planner.produce, layout.options["micro_batch_size"], 0

        def noted() -> PlannedBatch:
            planned.append(produce())
            return planned[-1]

        planner.produce = noted  # type: ignore[method-assign]
        for batch in loader:
            window, assignment = planned[-1].window, planned[-1].assignment
            step = stream.sampler().step_at(window.place.start)
            assert step is not None
            indices, _, _ = reader.layout.select(step, window.place, plane.topology)
            indices = indices[window.columns.order]
            first = (planned[-1].micro_batch * layout.dp + plane.topology.dp_rank) * size
            expected = [indices[assignment == first + r].tolist() for r in range(size)]
            assert batch["rows"] == expected
            assert window.holders is not None
            mine = (assignment >= first) & (assignment < first + size)
            moved += int((window.holders[mine] != plane.topology.dp_rank).sum())
        return moved

    target(float(sum(layout.world().run(compare))))  # so that examples in which much moves are tried


class Failing:
    """A stream of which one sample cannot be read."""

    def __init__(self, stream: Stream, index: int) -> None:
        self.stream, self.index = stream, index

    def __len__(self) -> int:
        return len(self.stream)

    def __getitem__(self, index: int) -> dict[str, int]:
        if index == self.index:
            raise OSError(f"disk of {index}")
        return self.stream[index]


@settings(max_examples=30)
@given(jobs(tp_sizes=(1, 1, 2)), st.data())
def test_a_rank_that_cannot_read_stops_every_rank(job: tuple[Stream, Layout], data: st.DataObject) -> None:
    """Law 10: after the same batch, with the same words; a later failure has its own rank raise the original."""
    stream, layout = job
    used = [index for _, members in stream.steps() for index in members]
    index = data.draw(st.sampled_from(used))
    seen: dict[int, int] = {}

    def train(plane: DataPlane) -> None:
        loader = layout.loader(stream, plane, dataset=Failing(stream, index))
        for k, batch in enumerate(loader, 1):
            seen[plane.topology.rank] = k
            assert index not in [i for row in batch["rows"] for i in row]
        raise AssertionError("the epoch ended without the sample")

    world = layout.world()
    outcomes = world.outcomes(train, deadline=30.0)
    if layout.known:
        # Read where it was planned to go, so that only this rank can tell.
        original = [error for error in outcomes if isinstance(error, SampleError)]
        assert original, outcomes
        assert {error.sample for error in original} == {index}
    assert all(isinstance(error, RemoteRankError | SampleError) for error in outcomes), outcomes
    told = [error for error in outcomes if isinstance(error, RemoteRankError)]
    assert all(
        (e.sample, e.error_type, e.error_message) == (index, "OSError", f"disk of {index}") for e in told
    )
    if not layout.known:
        assert len(told) == world.size
        assert len({seen.get(rank, 0) for rank in range(world.size)}) == 1
