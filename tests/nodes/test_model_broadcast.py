"""All ranks of a replica get what its constructor made, in lockstep, and hear of its end and of its errors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torchdata.nodes import BaseNode

from evenstep.comm.batch_spec import BatchSpec, TensorSpec
from evenstep.comm.communicator import Communicator, SoloCommunicator
from evenstep.comm.simulated import SimulatedGroup
from evenstep.cursor import Cursor
from evenstep.errors import RemoteRankError
from evenstep.nodes.model_broadcast import ModelBroadcast
from evenstep.samples import BatchInfo
from evenstep.testing import assert_node_conforms

Result = tuple[Any, dict[str, Any]]


@dataclass
class Plane:
    model: Communicator
    is_constructor: bool
    assists: bool = False


class Source(BaseNode[Any]):
    """Epochs of batches under a cursor; a peer's must never be pulled."""

    def __init__(
        self, size: int = 3, may_pull: bool = True, error: tuple[int, Exception] | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.size, self.may_pull, self.error = size, may_pull, error
        self.at = Cursor(global_batch_size=1)
        self.resets: list[dict[str, Any] | None] = []

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        self.resets.append(initial_state)
        self.at = self.at.next_epoch() if initial_state is None else Cursor.from_dict(initial_state)

    def next(self) -> Any:
        assert self.may_pull, "a peer pulled its source"
        position = self.at.consumed_samples
        if self.error is not None and self.error[0] == position:
            raise self.error[1]
        if position >= self.size:
            raise StopIteration
        self.at = Cursor(epoch=self.at.epoch, consumed_samples=position + 1, global_batch_size=1)
        return batch_at(self.at.epoch, position)

    def get_state(self) -> dict[str, Any]:
        return self.at.to_dict()


def batch_at(epoch: int, position: int) -> dict[str, Any]:
    tokens = 4 + position
    return {
        "input_ids": torch.arange(tokens).view(1, -1) + 100 * epoch,
        "cu_seqlens": torch.tensor([0, tokens], dtype=torch.int32),
        "info": BatchInfo(
            3 * epoch + position, 0, 1, True, 1, tokens, 0, None, tokens
        ),  # steps go on over epochs
    }


def replica(
    body: Callable[[ModelBroadcast, int], Any],
    ranks: tuple[int, ...] = (0, 1, 2),
    spec: BatchSpec | None = None,
    **options: Any,
) -> list[Any]:
    """What ``body(node, position)`` returns on every rank."""
    group = SimulatedGroup(ranks, timeout=20)
    results: list[Any] = [None] * len(ranks)
    raised: list[BaseException] = []

    def run(position: int) -> None:
        source = Source(may_pull=position == 0, **options)
        plane = Plane(group.communicator(ranks[position]), position == 0)
        try:
            results[position] = body(ModelBroadcast(source, plane, spec), position)
        except BaseException as error:
            raised.append(error)
            group.kill(ranks[position])

    threads = [threading.Thread(target=run, args=(position,), daemon=True) for position in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    if raised:
        raise raised[0]
    return results


def epoch_of(node: ModelBroadcast) -> list[Result]:
    return [(batch, node.state_dict()) for batch in node]


def plain(batch: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in batch.items()
    }


def test_every_rank_gets_the_same_batches_and_states() -> None:
    spec = BatchSpec(
        {
            "input_ids": TensorSpec(torch.int64, (1, None)),
            "cu_seqlens": TensorSpec(torch.int32, (2,)),
            "info": BatchInfo,
        }
    )
    for declared in (None, spec):
        results = replica(lambda node, _: epoch_of(node), spec=declared)
        for result in results:
            assert [plain(batch) for batch, _ in result] == [plain(batch_at(0, i)) for i in range(3)]
            assert [state["consumed_samples"] for _, state in result] == [1, 2, 3]
            assert all(type(batch["info"]) is BatchInfo for batch, _ in result)
        assert [state for _, state in results[0]] == [state for _, state in results[1]]


def test_epochs_follow_each_other_on_every_rank_and_each_is_one_reset() -> None:
    def body(node: ModelBroadcast, position: int) -> Any:
        seen = []
        for taken in (3, 2, 0, 3):  # whole, left early, not begun, whole
            node.reset()
            seen.append(
                [(next(node)["input_ids"][0, 0].item(), node.state_dict()["epoch"]) for _ in range(taken)]
            )
        with pytest.raises(StopIteration):
            next(node)
        with pytest.raises(StopIteration):
            next(node)
        assert len(node.source.resets) == 4  # type: ignore[attr-defined]
        return seen

    for seen in replica(body):
        assert seen == [[(0, 0)] * 3, [(100, 1)] * 2, [], [(200, 2)] * 3]


@pytest.mark.parametrize("done", range(4))
def test_a_state_of_any_rank_restores_on_any_other(done: int) -> None:
    states = replica(lambda node, _: [next(node) for _ in range(done)] and node.state_dict())

    def resume(node: ModelBroadcast, position: int) -> Any:
        if states[position]:
            node.reset(states[-1 - position])
        return [plain(batch) for batch, _ in epoch_of(node)]

    for rest in replica(resume):
        assert rest == [plain(batch_at(0, i)) for i in range(done, 3)]


def test_the_state_at_an_end_is_the_end_on_every_rank() -> None:
    def body(node: ModelBroadcast, position: int) -> Any:
        assert len(list(node)) == 3
        state = node.state_dict()
        node.reset(state)
        assert node.state_dict() == state
        rest = list(node)
        node.reset()
        return state, rest, next(node)["input_ids"][0, 0].item()

    for state, rest, first in replica(body):
        assert (state["consumed_samples"], rest, first) == (3, [], 100)


def test_an_error_is_raised_as_it_is_and_remotely_by_the_peers_after_the_same_batch() -> None:
    original = OSError("disk gone")

    def body(node: ModelBroadcast, position: int) -> Any:
        for _ in range(2):
            next(node)
        raised = []
        for _ in range(2):
            with pytest.raises((OSError, RemoteRankError)) as caught:
                next(node)
            raised.append(caught.value)
        assert raised[0] is raised[1]
        return raised[0], node.state_dict()["consumed_samples"]

    results = replica(body, ranks=(5, 3, 9), error=(2, original))
    assert results[0] == (original, 2)
    for error, done in results[1:]:
        assert isinstance(error, RemoteRankError)
        assert done == 2
        assert (error.rank, error.error_type, error.error_message) == (5, "OSError", "disk gone")


def test_an_error_of_another_replica_names_the_same_origin_everywhere() -> None:
    original = RemoteRankError("rank 7 failed", rank=7, error_type="OSError", error_message="disk", sample=3)

    def body(node: ModelBroadcast, position: int) -> Any:
        with pytest.raises(RemoteRankError) as caught:
            next(node)
        return caught.value

    for error in replica(body, error=(0, original)):
        assert str(error) == "rank 7 failed"
        assert (error.rank, error.error_type, error.error_message, error.sample) == (7, "OSError", "disk", 3)


def test_a_batch_that_cannot_be_sent_is_an_error_on_every_rank_and_not_handed_out() -> None:
    class Odd(Source):
        def next(self) -> Any:
            super().next()
            return {"x": torch.eye(2).to_sparse()}

    def body(node: ModelBroadcast, position: int) -> Any:
        node.source = Odd(may_pull=position == 0)
        with pytest.raises((TypeError, RemoteRankError)) as caught:
            next(node)
        state = node.state_dict()
        node.reset()
        return type(caught.value), state["consumed_samples"], node.state_dict()["epoch"]

    assert replica(body) == [(TypeError, 0, 0), (RemoteRankError, 0, 0), (RemoteRankError, 0, 0)]


def test_taking_the_state_and_resetting_posts_nothing() -> None:
    group = SimulatedGroup((0, 1), timeout=20)
    node = ModelBroadcast(Source(), Plane(group.communicator(0), True))
    for _ in range(3):
        node.reset()
        node.state_dict()
    assert group.collectives == 0


def test_a_rank_that_began_another_epoch_stops_the_replica() -> None:
    def body(node: ModelBroadcast, position: int) -> Any:
        next(node)
        if position == 0:
            node.reset()
        next(node)

    with pytest.raises(RemoteRankError) as caught:
        replica(body, ranks=(0, 1))
    told = "rank 0 is in stream 1 of its loader and this rank in stream 0: "
    assert str(caught.value).startswith((told, "the connection to rank 1 broke"))


def test_a_replica_of_one_passes_batches_through() -> None:
    source = Source()
    node = ModelBroadcast(source, Plane(SoloCommunicator(), True))
    batch = next(node)
    assert batch["input_ids"].tolist() == [[0, 1, 2, 3]]
    assert node.state_dict() == source.state_dict()
    node.reset()
    assert source.resets == [None, None]
    assert next(node)["input_ids"][0, 0] == 100


def test_it_conforms_on_every_rank_at_once() -> None:
    group = SimulatedGroup((0, 1), timeout=20)
    failed: list[BaseException] = []

    def check(rank: int) -> None:
        plane = Plane(group.communicator(rank), rank == 0)
        built: list[ModelBroadcast] = []

        def node(error: tuple[int, Exception] | None = None) -> ModelBroadcast:
            built.append(ModelBroadcast(Source(may_pull=rank == 0, error=error), plane))
            return built[-1]

        try:
            assert_node_conforms(node, build_failing=lambda: node((2, OSError("disk gone"))))
        except BaseException as error:
            failed.append(error)
            group.kill(rank)

    threads = [threading.Thread(target=check, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert failed == []
