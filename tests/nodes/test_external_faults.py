"""What goes wrong in a rank-local stream is told on every rank: its end, its errors, its samples and its steps."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from evenstep import DataPlane, LoaderConfig, RemoteRankError, build_loader
from evenstep.nodes import MetadataGather, PaddingRow
from evenstep.nodes.stage import upstream
from evenstep.testing import SimulatedWorld

ROWS = 4


@pytest.mark.parametrize("host_prefetch", [0, None])
def test_uneven_ends_follow_the_policy(steps_of: Any, host_prefetch: int | None) -> None:
    def rank(plane: DataPlane, policy: Any) -> tuple[int, int, int]:
        steps = steps_of(plane.topology.dp_rank, 2)[: 2 if plane.topology.dp_rank else 5]
        config = LoaderConfig(seq_len=512, uneven=policy, host_prefetch=host_prefetch)
        with build_loader(steps, plane, config) as loader:
            gather = next(node for node in upstream(loader.root) if isinstance(node, MetadataGather))
            return len(list(loader)), len(list(loader)), gather.left_out

    world = SimulatedWorld(2)
    longer, shorter = world.run(rank, "stop")
    assert longer[:2] == shorter[:2] == (2 * ROWS, 2 * ROWS)
    assert longer[2] > 0  # the third step of each epoch, which only rank 0 had
    assert shorter[2] == 0
    for outcome in world.outcomes(rank, "error"):
        assert isinstance(outcome, RemoteRankError)
        assert str(outcome) == (
            "the stream of rank 1 has ended while rank 0 still has data: the ranks would take different numbers of "
            "steps. Give every rank the same number of steps, or choose uneven='stop'."
        )


def test_a_failing_stream_is_told_on_every_rank(steps_of: Any) -> None:
    class Failing:
        def __init__(self, steps: list[Any]) -> None:
            self.steps = steps

        def __iter__(self) -> Iterator[Any]:
            yield from self.steps[:3]
            raise OSError("the archive is cut off")

    def rank(plane: DataPlane, got: list[int]) -> None:
        steps = steps_of(plane.topology.dp_rank, 2)
        source = Failing(steps) if plane.topology.rank else steps
        with build_loader(source, plane, LoaderConfig(seq_len=512)) as loader:
            for _ in loader:
                got[plane.topology.rank] += 1

    got = [0, 0]
    for outcome in SimulatedWorld(2).outcomes(rank, got):
        assert isinstance(outcome, RemoteRankError)
        assert (outcome.rank, outcome.error_type, outcome.error_message) == (
            1,
            "OSError",
            "the archive is cut off",
        )
    assert got == [3 * ROWS] * 2


def test_a_corrupt_sample_of_a_stream_is_skipped_or_named() -> None:
    def rank(plane: DataPlane, policy: Any) -> int:
        steps = [[[{"input_ids": [1, 2]}], [{"text": "no tokens"}, {"input_ids": [3]}]]]
        config = LoaderConfig(seq_len=8, on_sample_error=policy)
        with build_loader(steps, plane, config) as loader:
            return sum(batch["info"].num_tokens for batch in loader)

    assert SimulatedWorld(2).run(rank, "skip") == [3, 3]
    for outcome in SimulatedWorld(2).outcomes(rank, "raise"):
        assert outcome.sample == 1
        assert outcome.error_message.startswith(
            "a sample of type dict without 'input_ids' says nothing of its length"
        )


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([[]], "the external source gave a step of 0 rows, which micro_batch_size=2 does not divide"),
        (
            [[[], [], []]],
            "the external source gave a step of 3 rows, which micro_batch_size=2 does not divide",
        ),
        (
            [[{"input_ids": [1]}] * 2, [{"input_ids": [1]}] * 4],
            "the external source gave a step of 4 rows after steps of 2: ranks would take different numbers of "
            "micro-batches.",
        ),
        (
            [[[{"input_ids": [1]}] * 3, []]],
            "rank 0: the external source gave 0 samples for row 1 of a step of 2 rows, expected one or more in each: an "
            "empty row would train on padding alone. If that is meant, put evenstep.nodes.PaddingRow() there.",
        ),
        (
            {0: {"input_ids": [1]}}.values(),  # a stream: samples in a list are refused before
            "the external source gave a dict, expected a local step: a list of rows, each a list of samples.",
        ),
    ],
)
def test_odd_steps_are_refused(steps: Any, message: str) -> None:
    config = LoaderConfig(seq_len=8, micro_batch_size=2)
    with (
        build_loader(steps, None, config) as loader,
        pytest.raises(RemoteRankError, match=re.escape(message)),
    ):
        list(loader)


def test_every_rank_hears_of_an_empty_row_and_a_row_of_padding_is_none() -> None:
    def body(plane: DataPlane, empty: list[Any]) -> list[int]:
        last = empty if plane.topology.rank == 1 else [{"input_ids": [3]}]
        steps = [[[{"input_ids": [1, 2]}], [{"input_ids": [3]}]], [[{"input_ids": [4]}], last]]
        with build_loader(steps, plane, LoaderConfig(seq_len=8)) as loader:
            return [batch["info"].num_tokens for batch in loader]

    assert sum(map(sum, SimulatedWorld(2).run(body, PaddingRow()))) == 9
    for outcome in SimulatedWorld(2).outcomes(body, []):
        assert outcome.rank == 1
        assert outcome.error_message == (
            "rank 1: the external source gave 0 samples for row 1 of a step of 2 rows, expected one or more in each: an "
            "empty row would train on padding alone. If that is meant, put evenstep.nodes.PaddingRow() there."
        )


def test_only_constructors_read() -> None:
    config = LoaderConfig(seq_len=8)
    world = SimulatedWorld({"dp": 2, "tp": 2}, reader_ranks="all")
    outcomes = world.outcomes(lambda plane: build_loader([], plane, config))
    assert str(outcomes[0]) == (
        "external steps are read by the constructors (0, 2) alone, but the ranks (0, 1, 2, 3) would read or plan: leave "
        "reader_ranks and planner_rank at None"
    )
