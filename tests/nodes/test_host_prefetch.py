"""The background thread: always ahead, never in the way, and gone when nobody needs it."""

from __future__ import annotations

import gc
import re
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from torchdata.nodes import BaseNode

from evenstep.nodes import HostPrefetch

Hook = Callable[[int], object]


class Numbers(BaseNode[int]):
    """Counts to ``end``, then begins again; a hook may wait or raise before each number."""

    def __init__(self, end: int = 20, hook: Hook = lambda _: None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.end = end
        self.hook = hook
        self.produced = 0
        self.at = 0
        self.epoch = 0
        self.fresh = True
        self.threads: set[str] = set()

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        if initial_state is not None:
            self.at, self.epoch = initial_state["at"], initial_state["epoch"]
        elif not self.fresh:
            self.at, self.epoch = 0, self.epoch + 1
        self.fresh = False

    def next(self) -> int:
        if self.at == self.end:
            raise StopIteration
        self.threads.add(threading.current_thread().name)
        self.hook(self.at)
        self.at += 1
        self.produced += 1
        return self.at - 1

    def get_state(self) -> dict[str, Any]:
        return {"at": self.at, "epoch": self.epoch}


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


_earlier: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def earlier_threads() -> None:
    """Other tests of this process may have left prefetchers that are still on their way out."""
    _earlier.clear()
    _earlier.update(threading.enumerate())


def threads() -> list[threading.Thread]:
    new = set(threading.enumerate()) - _earlier
    return [t for t in new if t.name.startswith("evenstep-prefetch")]


def started(source: Numbers, depth: int | None = 3, state: dict[str, Any] | None = None) -> HostPrefetch[int]:
    node: HostPrefetch[int] = HostPrefetch(source, depth)
    node.reset(state)
    return node


@pytest.mark.parametrize("depth", [1, 3, None])
def test_items_come_in_order_from_one_thread(depth: int | None) -> None:
    source = Numbers()
    node = started(source, depth)
    assert list(node) == list(range(20))
    assert source.threads == {"evenstep-prefetch-rank0"}
    for _ in range(3):
        with pytest.raises(StopIteration):
            next(node)
    node.close()


@pytest.mark.parametrize("depth", [1, 3])
def test_it_runs_no_further_ahead_than_it_may(depth: int) -> None:
    source = Numbers()
    node = started(source, depth)
    assert source.produced == 0
    for taken in range(1, 6):
        next(node)
        node.wait()
        assert source.produced == taken + depth
        assert node.ready()
    node.close()


def test_the_state_is_that_of_the_last_item_handed_out() -> None:
    node = started(Numbers())
    assert node.state_dict() == {"at": 0, "epoch": 0}
    for taken in range(1, 8):
        next(node)
        node.wait()
        assert node.state_dict() == {"at": taken, "epoch": 0}
    node.close()


def test_resets_forget_what_was_produced_ahead() -> None:
    source = Numbers()
    node = started(source)
    for _ in range(4):
        next(node)
    node.reset({"at": 11, "epoch": 5})
    assert node.state_dict() == {"at": 11, "epoch": 5}
    assert [next(node), next(node)] == [11, 12]
    node.reset()  # the epoch after the last item handed out, however far the thread was
    assert node.state_dict() == {"at": 0, "epoch": 6}
    node.reset()
    node.close()


def test_a_new_stream_never_shows_items_of_the_old_one() -> None:
    source = Numbers(end=10**9, hook=lambda _: time.sleep(0.0002))
    node = started(source)
    for stream in range(200):
        node.reset({"at": 1000 * stream, "epoch": stream})
        for number in range(stream % 4):
            assert next(node) == 1000 * stream + number
    node.close()


class FaultError(Exception):
    pass


@pytest.mark.parametrize("kind", [FaultError, KeyboardInterrupt, SystemExit])
def test_an_error_comes_after_the_items_before_it_as_it_is_and_stays(kind: type[BaseException]) -> None:
    error = kind("at 5")

    def fail(at: int) -> None:
        if at == 5:
            raise error

    node = started(Numbers(hook=fail))
    assert [next(node) for _ in range(5)] == [0, 1, 2, 3, 4]
    for _ in range(3):
        with pytest.raises(kind) as caught:
            next(node)
        assert caught.value is error
    assert node.state_dict() == {"at": 5, "epoch": 0}
    node.reset({"at": 6, "epoch": 0})
    assert next(node) == 6
    node.close()


def test_an_error_of_reset_is_raised_by_reset() -> None:
    node = started(Numbers())
    next(node)
    with pytest.raises(KeyError, match="epoch"):
        node.reset({"at": 3})
    node.close()


def test_close_ends_the_thread_and_what_waits_for_it() -> None:
    node = started(Numbers())
    next(node)
    assert len(threads()) == 1
    node.close()
    node.close()
    assert not threads()
    for work in (lambda: next(node), node.start):
        with pytest.raises(RuntimeError, match=r"^this prefetcher has been closed and gives no more items$"):
            work()


def test_close_does_not_wait_for_a_source_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr("evenstep.nodes.producer.CLOSE_GRACE", 0.2)
    node = started(Numbers(hook=lambda at: at < 1 or release.wait(20)))
    next(node)
    wait_until(lambda: node.source.at == 1)  # type: ignore[attr-defined]
    began = time.monotonic()
    node.close()
    assert time.monotonic() - began < 4
    release.set()
    wait_until(lambda: not threads())


def test_a_node_that_nobody_holds_ends_its_thread() -> None:
    source = Numbers(end=10**9)
    node = started(source)
    next(node)
    gone = weakref.ref(node)
    del node
    gc.collect()
    assert gone() is None
    wait_until(lambda: not threads())


def test_a_node_that_was_never_asked_has_no_thread() -> None:
    node = started(Numbers())
    node.reset()
    assert not node.ready()
    node.close()
    assert not threads()


def test_start_produces_without_waiting() -> None:
    entered = threading.Event()

    def slow(_: int) -> None:
        entered.set()
        time.sleep(0.05)

    node = started(Numbers(hook=slow), depth=1)
    node.start()
    assert not node.ready()
    assert entered.wait(5)
    wait_until(node.ready)
    assert next(node) == 0
    node.close()


@pytest.mark.parametrize("depth", [0, -1, True, 1.5, "2"])
def test_refused_depths(depth: Any) -> None:
    message = f"depth={depth!r}, expected a number of items >= 1, or None for the next window"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        HostPrefetch(Numbers(), depth)


@pytest.mark.parametrize("fault", [None, OSError("no such item")], ids=["end", "error"])
def test_a_node_that_was_dropped_after_its_end_or_error_ends_its_thread(fault: Exception | None) -> None:
    def fail(at: int) -> None:
        if at == 5 and fault is not None:
            raise fault

    def loop() -> None:
        node = started(Numbers(end=8, hook=fail))
        with suppress(OSError):
            for _ in node:
                pass

    loop()
    gc.collect()
    wait_until(lambda: not threads())


def test_an_error_leads_to_the_next_epoch_on_a_new_thread() -> None:
    broken = [True]

    def fail(at: int) -> None:
        if at == 2 and broken[0]:
            raise OSError("once")

    node = started(Numbers(end=4, hook=fail))
    with pytest.raises(OSError, match=r"^once$"):
        list(node)
    wait_until(lambda: not threads())
    broken[0] = False
    node.reset({"at": 0, "epoch": 0})
    assert list(node) == [0, 1, 2, 3]
    node.close()
