"""A chosen part of the laws on real processes that talk over gloo."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from evenstep import (
    DataPlane,
    LoaderConfig,
    RemoteRankError,
    SampleError,
    StepSampler,
    TokenBudgetSampler,
    build_loader,
    collate_varlen,
)
from evenstep.testing import Outcome, assert_same, run_ranks, run_ranks_outcomes
from evenstep.testing.jobs import Layout, Seen, Stream, members_by_step

pytestmark = pytest.mark.gloo
LENGTHS = tuple(np.minimum(np.random.default_rng(3).geometric(0.12, 60), 20).tolist())


def mesh_plane(tp: int = 1, readers: str | None = None, shared_memory: bool = True) -> DataPlane:
    dp = dist.get_world_size() // tp
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    return DataPlane.from_mesh(mesh, reader_ranks=readers, shared_memory=shared_memory)


def epochs(rank: int, name: str) -> dict[str, list[Seen]]:
    """One epoch of every stream in one layout."""
    seen = {}
    for kind, stream in STREAMS.items():
        layout = LAYOUTS[name]
        if kind == "auto":
            layout = replace(layout, options={**layout.options, "balance_window": None})
        readers = "all" if layout.everybody_reads else None
        plane = mesh_plane(layout.tp, readers, layout.options.get("shared_memory", True))
        with layout.loader(stream, plane) as loader:
            seen[kind] = [Seen.of(batch, loader) for batch in loader]
    return seen


STREAMS = {
    "step": Stream(kind="step", lengths=LENGTHS, rows=16, seed=2, remainder="pad"),
    "tokens": Stream(kind="tokens", lengths=LENGTHS, rows=8, seed=2, remainder="pad"),
    "auto": Stream(kind="auto", lengths=LENGTHS, rows=16, seed=2),
    "mixture": Stream(kind="mixture", lengths=LENGTHS, rows=16, seed=2, remainder="wrap"),
}


LAYOUTS = {
    "one rank": Layout(options={"micro_batch_size": 2, "host_prefetch": 0}),
    "two ranks, lengths known": Layout(
        dp=2, known=True, options={"micro_batch_size": 1, "algorithm": "lpt", "balance_window": 2}
    ),
    "four ranks": Layout(
        dp=4, options={"micro_batch_size": 2, "broadcast_plan": False, "exchange": "window"}
    ),
    "two replicas of two": Layout(
        dp=2, tp=2, everybody_reads=True, options={"micro_batch_size": 2, "balance_window": 2}
    ),
    "two replicas of two, nothing shared": Layout(
        dp=2, tp=2, everybody_reads=True, options={"micro_batch_size": 2, "shared_memory": False}
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_members_do_not_depend_on_the_layout(name: str) -> None:
    """Laws 1, 2, 4 and 5."""
    layout = LAYOUTS[name]
    everything = run_ranks(epochs, layout.dp * layout.tp, name)
    for kind, stream in STREAMS.items():
        ranks = [seen[kind] for seen in everything]
        expected = {cursor.step: members for cursor, members in stream.steps()}
        assert members_by_step(ranks[:: layout.tp]) == expected, kind
        for seen in ranks:
            assert [b.state for b in seen] == [b.state for b in ranks[0]]
            assert [b.info.micro_batch for b in seen] == [b.info.micro_batch for b in ranks[0]]


class Documents:
    """Real tensors of several dtypes, so that every byte that moves is checked."""

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(index)
        n = LENGTHS[index]
        return {
            "input_ids": torch.randint(1, 99, (n,), generator=generator),
            "loss_weights": torch.rand(n, generator=generator, dtype=torch.float32),
            "index": index,
        }


def batches(rank: int, states: list[str], tp: int, cut: int | None) -> tuple[list[Any], dict[str, Any]]:
    config = LoaderConfig(seq_len=20, micro_batch_size=2, resume="micro_batch", min_balance_gain=0.01)
    sampler = StepSampler(len(LENGTHS), global_batch_size=16, seed=4, remainder="wrap")
    with build_loader(Documents(), mesh_plane(tp), config, sampler=sampler, collate=collate_varlen) as loader:
        if states:
            loader.load_state_dict(json.loads(states[0]))
        seen: list[Any] = []
        for batch in loader:
            seen.append(batch)
            if len(seen) == cut:
                break
        return seen, loader.state_dict()


@pytest.mark.parametrize("tp", [1, 2])
def test_stopped_inside_a_step_the_rest_is_identical_bit_for_bit(tp: int) -> None:
    """Law 6 in new processes."""
    whole = [seen for seen, _ in run_ranks(batches, 2 * tp, [], tp, None)]
    stopped = run_ranks(batches, 2 * tp, [], tp, 6)
    state = json.dumps(stopped[0][1])
    assert all(json.dumps(other) == state for _, other in stopped)
    assert stopped[0][1]["micro_batch"] == 2
    resumed = run_ranks(batches, 2 * tp, [state], tp, None)
    for rank in range(2 * tp):
        assert_same(stopped[rank][0] + resumed[rank][0], whole[rank], f"rank {rank}")
    if tp == 2:
        assert_same(whole[1], whole[0], "what a tensor-parallel peer received")


def one_fails(rank: int, known: bool) -> int:
    class Failing(Documents):
        def __getitem__(self, index: int) -> dict[str, Any]:
            if index == 7:
                raise OSError("disk")
            return super().__getitem__(index)

    sampler = TokenBudgetSampler(LENGTHS, rows_per_step=8, seq_len=20, seed=1, remainder="pad")
    config = LoaderConfig(seq_len=20, micro_batch_size=1)
    metadata = np.array(LENGTHS) if known else None
    count = 0
    with build_loader(Failing(), mesh_plane(), config, sampler=sampler, metadata=metadata) as loader:
        try:
            for _ in loader:
                count += 1
        except Exception as error:
            error.args = (f"{count} batches: {error}",)
            raise
    return count


@pytest.mark.parametrize("known", [False, True], ids=["online", "metadata"])
def test_one_failing_rank_stops_all_within_seconds(known: bool) -> None:
    """Law 10."""
    outcomes: list[Outcome[int]] = run_ranks_outcomes(one_fails, 4, known, timeout=50)
    errors = [outcome.error for outcome in outcomes]
    assert all(outcome.seconds < 30 for outcome in outcomes)
    told = [str(error) for error in errors if type(error) is RemoteRankError]
    assert all("failed at sample 7: OSError: disk" in text for text in told), errors
    if known:
        assert len(told) == 3
        (original,) = [error for error in errors if isinstance(error, SampleError)]
        assert original.sample == 7
        assert str(original).endswith(" batches: sample 7: OSError: disk")
    else:
        assert len(told) == 4
        assert len({text.split(" batches")[0] for text in told}) == 1
