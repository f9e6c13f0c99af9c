"""Any iterable is driven from any position: nodes, what has a state of any kind, and what has none."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torchdata.nodes as tn
from hypothesis import given
from hypothesis import strategies as st

from evenstep.nodes.streams import open_stream

SIZE = 4


class Stateful:
    """Goes on where it was left, as many loaders do; its state is a bare number, and it hears of no epochs."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < SIZE:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> int:
        return self.at

    def load_state_dict(self, state: int) -> None:
        self.at = state


class Lazy(Stateful):
    """Goes where it was sent, and says so, only when an item is asked for, as StatefulDataLoader does."""

    sent: int | None = None

    def __iter__(self) -> Iterator[int]:
        if self.sent is not None:
            self.at, self.sent = self.sent, None
        yield from super().__iter__()

    def load_state_dict(self, state: int) -> None:
        self.sent = state


SOURCES: dict[str, Callable[[], Any]] = {
    "node": lambda: tn.IterableWrapper(range(SIZE)),
    "stateful": Stateful,
    "lazy": Lazy,
    "list": lambda: list(range(SIZE)),
}
OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["begin", "load", "state"]), st.integers(0, SIZE)), max_size=8
)


def take(stream: Any, count: int) -> list[int]:
    return [stream.next() for _ in range(count)]


@pytest.mark.parametrize("kind", SOURCES)
@given(operations=OPERATIONS)
def test_wherever_it_is_sent_it_goes_on_from_there(kind: str, operations: list[tuple[str, int]]) -> None:
    """Each operation is followed by some items; the state after them leads back there, also in a fresh stream."""
    stream = open_stream(SOURCES[kind](), "numbers")
    states: dict[int, Any] = {}
    stream.begin(0)
    at = 0
    for epoch, (operation, count) in enumerate(operations, 1):
        if operation == "begin":
            stream.begin(epoch)
            at = 0
        elif operation == "load" and states:
            at = sorted(states)[count % len(states)]
            stream.load(states[at])
        states[at] = stream.state()
        count = min(count, SIZE - at)
        assert take(stream, count) == list(range(at, at + count))
        at += count
        states[at] = stream.state()
    for position, state in states.items():
        fresh = open_stream(SOURCES[kind](), "numbers")
        fresh.load(state)
        assert take(fresh, SIZE - position) == list(range(position, SIZE))
        with pytest.raises(StopIteration):
            fresh.next()


def test_what_can_be_iterated_only_once_is_told_when_it_would_begin_again() -> None:
    stream = open_stream(iter(range(SIZE)), "numbers")
    stream.begin(0)
    assert take(stream, 2) == [0, 1]
    stream.begin(1)
    message = (
        "range_iterator can be iterated only once, and some of its items are gone: pass an object whose __iter__ begins "
        "again, or a node or loader that has a state"
    )
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}$"):
        stream.next()


def test_a_state_that_cannot_be_copied_names_its_key() -> None:
    class Locked(Stateful):
        def state_dict(self) -> Any:
            return {"inner": [1, threading.Lock()]}

    stream = open_stream(Locked(), "numbers")
    stream.begin(0)
    with pytest.raises(
        TypeError, match=r"^the source's state\['inner'\]\[1\] is <unlocked .*, which no checkpoint can"
    ):
        stream.state()
