"""The conformance check passes a node that keeps the contract, and tells each breach of it in words."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torchdata.nodes as tn
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torchdata.nodes import BaseNode

from evenstep import BatchInfo
from evenstep.nodes import HostPrefetch
from evenstep.testing import assert_node_conforms


class Counter(BaseNode[int]):
    """Ten times the epoch and the number of each of four items; the bugs below break one law each."""

    length = 4

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.epoch, self.at, self.ended = -1, 0, False

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        self.ended = False
        if initial_state is None:
            self.epoch, self.at = self.epoch + 1, 0
        else:
            self.load(initial_state)

    def load(self, state: dict[str, Any]) -> None:
        self.epoch, self.at = state["epoch"], state["at"]

    def next(self) -> int:
        if self.at >= self.length:
            self.ended = True
            raise StopIteration
        self.at += 1
        return 10 * self.epoch + self.at - 1

    def get_state(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "at": self.at}


class GoesOnAfterItsEnd(Counter):
    def next(self) -> int:
        if self.ended:
            return -1
        return super().next()


class Endless(Counter):
    length = 10**9


class HandsOutASet(Counter):
    def get_state(self) -> dict[str, Any]:
        return {**super().get_state(), "seen": {1}}


class HandsOutATuple(Counter):
    def get_state(self) -> dict[str, Any]:
        return {**super().get_state(), "seen": (1,)}


class GrowsItsState(Counter):
    def get_state(self) -> dict[str, Any]:
        return {**super().get_state(), "seen": [0] * self.at}


class MovesWhenAsked(Counter):
    def get_state(self) -> dict[str, Any]:
        state = super().get_state()
        self.at += self.at == 1
        return state


class CountsQuestions(Counter):
    asked = 0

    def get_state(self) -> dict[str, Any]:
        self.asked += 1
        return {**super().get_state(), "asked": self.asked}


class RestoresTooFar(Counter):
    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self.at += self.at == 2


class ForgetsItsEpoch(Counter):
    def load(self, state: dict[str, Any]) -> None:
        self.epoch, self.at = 0, state["at"]


class RestoresAnotherState(Counter):
    restored = False

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self.restored = True

    def get_state(self) -> dict[str, Any]:
        return {**super().get_state(), "restored": self.restored}


class HasOneEpoch(Counter):
    def next(self) -> int:
        if self.epoch:
            raise StopIteration
        return super().next()


class CountsItems(Counter):
    """Its items say how many were handed out in all epochs before this one."""

    before = 0

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        if initial_state is None:
            self.before = self.after_leaving()
        super().reset(initial_state)

    def after_leaving(self) -> int:
        return self.before + self.at

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self.before = state["before"]

    def next(self) -> int:
        super().next()
        return 100 * self.before + self.at

    def get_state(self) -> dict[str, Any]:
        return {**super().get_state(), "before": self.before}


class CountsWhatItReadAhead(CountsItems):
    ahead = 0

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        self.ahead = 0

    def after_leaving(self) -> int:
        return super().after_leaving() + self.ahead

    def next(self) -> int:
        item = super().next()
        self.ahead = int(self.at < self.length)
        return item


class CountsTheEndThatItRestores(CountsItems):
    restored = False

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self.restored = True

    def after_leaving(self) -> int:
        return super().after_leaving() + (self.restored and self.at == self.length)


class LosesItsTailWhenAsked(Counter):
    length = 5

    def get_state(self) -> dict[str, Any]:
        if self.at == 3:
            self.length = 4
        return super().get_state()


BREACHES: list[tuple[type[Counter], str]] = [
    (GoesOnAfterItsEnd, "the end is not sticky: after StopIteration came -1"),
    (Endless, "the epoch has more than 20 items; is it endless?"),
    (
        HandsOutASet,
        "the state after item 0 is no JSON: Object of type set is not JSON serializable: {'epoch': 0, 'at': 0, 'seen': {1}}",
    ),
    (
        HandsOutATuple,
        "the state after item 0 does not survive JSON: {'epoch': 0, 'at': 0, 'seen': (1,)} became "
        "{'epoch': 0, 'at': 0, 'seen': [1]}",
    ),
    (
        GrowsItsState,
        "the state after item 1 has another shape than at the beginning: {'epoch': 0, 'at': 1, 'seen': [0]}, "
        "{'epoch': 0, 'at': 0, 'seen': []}",
    ),
    (
        MovesWhenAsked,
        "item 1 of a second node, whose state was not taken before each item is int 1, expected int 2",
    ),
    (
        CountsQuestions,
        "taken twice after item 1, the state differs: {'epoch': 0, 'at': 2, 'asked': 1}, "
        "{'epoch': 0, 'at': 2, 'asked': 2}",
    ),
    (RestoresTooFar, "restored after item 2 of 4, 1 items came, expected 2"),
    (ForgetsItsEpoch, "item 2 of a node restored after item 2 is int 2, expected int 12"),
    (
        RestoresAnotherState,
        "the state after item 0 of a node restored after item 0: {'epoch': 0, 'at': 0, 'restored': True}, "
        "{'epoch': 0, 'at': 0, 'restored': False}",
    ),
    (
        CountsWhatItReadAhead,
        "item 0 of a node restored after item 3 and reset is int 301, expected int 401, as of one that was reset after it "
        "had handed out item 3: reset() without a state begins the epoch after the last item handed out, whatever has "
        "been read ahead. Make it the same in both, as HostPrefetch does.",
    ),
    (
        CountsTheEndThatItRestores,
        "item 0 of a node restored at the end of its epoch and reset is int 501, expected int 401",
    ),
    (
        LosesItsTailWhenAsked,
        "a second node, whose state was not taken before each item, goes on after the 4 items of the first: 4",
    ),
    (HasOneEpoch, "the epoch after the first one is empty"),
]


def test_a_right_node_conforms() -> None:
    assert_node_conforms(Counter)


@pytest.mark.parametrize(("bug", "message"), BREACHES)
def test_each_breach_is_told(bug: type[Counter], message: str) -> None:
    with pytest.raises(AssertionError, match=f"^{re.escape(message)}$"):
        assert_node_conforms(bug, max_items=20)


def batch(step: int, micro_batch: int, micro_batches: int) -> dict[str, Any]:
    is_last = micro_batch == micro_batches - 1
    return {"info": BatchInfo(step, micro_batch, micro_batches, is_last, 1, 8, 0, None, None)}


class Batches(Counter):
    """Five steps an epoch, of one, two and three micro-batches; ``kept`` says which of them come."""

    sizes = (1, 3, 2, 1, 2)
    length = sum(sizes)

    def __init__(self, kept: Callable[[int], bool] = lambda _: True, copies: int = 1) -> None:
        super().__init__()
        places = [(s, m) for s, n in enumerate(self.sizes) for m in range(n)]
        self.numbers = [k for k in range(self.length) if kept(k) for _ in range(copies)]
        self.places, self.length = places, len(self.numbers)

    def next(self) -> Any:
        super().next()
        step, micro_batch = self.places[self.numbers[self.at - 1]]
        return batch(step + len(self.sizes) * self.epoch, micro_batch, self.sizes[step])


ALL = Batches.length
REMEDY = (
    ": the node leaves batches out, and other ranks wait for them in the training step. Leave out samples instead, in the "
    "dataset or the sampler"
)


@given(st.sets(st.integers(0, ALL - 1), min_size=1), st.integers(1, 2))
@example({0}, 1).via("known only from the epoch before")
@settings(max_examples=60)
def test_batches_that_are_left_out_are_told(lost: set[int], copies: int) -> None:
    assume(len(lost) < ALL)
    with pytest.raises(AssertionError, match=f"{re.escape(REMEDY)}$"):
        assert_node_conforms(lambda: Batches(lambda k: k not in lost, copies))


def test_all_batches_conform_also_where_several_items_are_made_of_one() -> None:
    assert_node_conforms(Batches, items=ALL)
    assert_node_conforms(lambda: Batches(copies=2), items=2 * ALL)


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        (2, "after micro-batch 0 of step 1 comes micro-batch 2 of step 1, expected micro-batch 1 of step 1"),
        (6, "after micro-batch 1 of step 2 comes micro-batch 0 of step 4, expected micro-batch 0 of step 3"),
        (8, "the epoch ends after micro-batch 0 of step 4, but step 4 has 2 micro-batches"),
        (0, "after micro-batch 1 of step 4 comes micro-batch 0 of step 6, expected micro-batch 0 of step 5"),
    ],
)
def test_the_batch_that_is_left_out_is_named(lost: int, message: str) -> None:
    with pytest.raises(AssertionError, match=f"^{re.escape(message + REMEDY)}$"):
        assert_node_conforms(lambda: Batches(lambda k: k != lost))


class Even(Counter):
    """A filter, which is right by itself."""

    def next(self) -> int:
        while (item := super().next()) % 2:
            pass
        return item


class ShorterLater(Counter):
    def next(self) -> int:
        self.length = 4 if self.epoch == 0 else 3
        return super().next()


def test_a_number_of_items_is_held_against_every_epoch() -> None:
    assert_node_conforms(Even)
    assert_node_conforms(Even, items=2)
    assert_node_conforms(ShorterLater)
    with pytest.raises(AssertionError) as caught:
        assert_node_conforms(Even, items=4)
    assert str(caught.value) == "the epoch has 2 items, expected 4: the node loses or adds some"
    with pytest.raises(AssertionError) as caught:
        assert_node_conforms(ShorterLater, items=4)
    assert str(caught.value) == (
        "the epoch after the first one has 3 items, expected 4: the node loses or adds some"
    )


class BeginsAnywhere(CountsItems):
    """Left in the middle, it begins where no node did before: how far a thread has read ahead is chance."""

    length = 9
    places = itertools.count(1)

    def after_leaving(self) -> int:
        return next(self.places) if 0 < self.at < self.length else super().after_leaving()


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # of its thread, joining itself
@pytest.mark.parametrize(
    ("name", "stock"),
    [
        ("Prefetcher", lambda source: tn.Prefetcher(source, 1)),
        ("ParallelMapper", lambda source: tn.ParallelMapper(source, int, 1, max_concurrent=1)),
        ("Prefetcher", lambda source: tn.Mapper(tn.Prefetcher(source, 1), int)),
    ],
)
def test_a_stock_node_that_reads_ahead_is_named(
    name: str, stock: Callable[[BaseNode[int]], BaseNode[int]]
) -> None:
    end = f"torchdata's {name} cannot: it counts what its thread has read. Use HostPrefetch in its place."
    with pytest.raises(
        AssertionError, match=f"^item 0 of a node restored after item 6 and reset is .*{re.escape(end)}$"
    ):
        assert_node_conforms(lambda: stock(BeginsAnywhere()))


@pytest.mark.parametrize("right", [CountsItems, lambda: HostPrefetch(CountsItems(), 2)])
def test_a_node_that_counts_what_it_handed_out_conforms(right: Callable[[], BaseNode[int]]) -> None:
    assert_node_conforms(right)


class Failing(Counter):
    """Fails at its third item, for good and with the same error."""

    def __init__(self) -> None:
        super().__init__()
        self.error = OSError("no such block")

    def next(self) -> int:
        if self.at == 2:
            raise self.error
        return super().next()


class Recovers(Failing):
    def next(self) -> int:
        if self.at == 2:
            self.at = 3
            raise self.error
        return super().next()


class FailsAnew(Failing):
    def next(self) -> int:
        if self.at == 2:
            raise OSError("no such block")
        return super().next()


def test_a_node_that_fails_for_good_conforms() -> None:
    assert_node_conforms(Counter, build_failing=Failing)


@pytest.mark.parametrize(
    ("failing", "message"),
    [
        (Counter, "the failing node ended without an error"),
        (Endless, "the failing node gave 20 items without an error"),
        (Recovers, "the error OSError('no such block') is not sticky: after it came 3"),
        (
            FailsAnew,
            "after OSError('no such block') the node raised OSError('no such block'): an error stays the same object",
        ),
    ],
)
def test_each_wrong_way_to_fail_is_told(failing: Callable[[], BaseNode[int]], message: str) -> None:
    with pytest.raises(AssertionError, match=f"^{re.escape(message)}$"):
        assert_node_conforms(Counter, build_failing=failing, max_items=20)


def test_every_node_is_closed_whatever_was_found() -> None:
    closed: list[Counter] = []

    class Closing(HasOneEpoch):
        def close(self) -> None:
            closed.append(self)

    built: list[Counter] = []

    def build() -> Counter:
        built.append(Closing())
        return built[-1]

    with pytest.raises(AssertionError):
        assert_node_conforms(build)
    assert closed == built != []
