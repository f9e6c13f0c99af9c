"""Any history of a training job against a model that is just the list of steps."""

from __future__ import annotations

import json
import queue
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from evenstep import Cursor, DataPlane, Loader
from evenstep.testing.jobs import Layout, Stream, layouts, streams

DP_SIZES = (1, 2, 3, 4)


class Cluster:
    """The ranks of one job, each a thread that obeys orders, all at the same time."""

    def __init__(self, stream: Stream, layout: Layout) -> None:
        self.planes = layout.world().planes()
        self._orders: list[queue.Queue[Any]] = [queue.Queue() for _ in self.planes]
        self._answers: list[queue.Queue[Any]] = [queue.Queue() for _ in self.planes]
        self._threads = [
            threading.Thread(target=self._obey, args=(rank, stream, layout), daemon=True)
            for rank in range(len(self.planes))
        ]
        for thread in self._threads:
            thread.start()

    def order(self, what: Callable[[Loader[Any]], Any]) -> list[Any]:
        """What every rank answers, exceptions included."""
        for orders in self._orders:
            orders.put(what)
        return [answers.get(timeout=60) for answers in self._answers]

    def end(self, *, gently: bool) -> None:
        if gently:
            self.order(lambda loader: loader.close())
        for plane in self.planes:
            plane.abandon()
        for orders in self._orders:
            orders.put(None)
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive(), "a rank hangs"

    def _obey(self, rank: int, stream: Stream, layout: Layout) -> None:
        loader = layout.loader(stream, self.planes[rank])
        while (what := self._orders[rank].get()) is not None:
            try:
                self._answers[rank].put(what(loader))
            except BaseException as error:
                self._answers[rank].put(error)


@dataclass
class Model:
    """Where a job stands in the list of steps.

    Attributes:
        cursor: The beginning of the step under way.
        delivered: Its micro-batches handed out, as the next batch will tell.
        shown: The same as the state tells, which after a load is what was loaded.
        partial: Samples seen in this step.
        ledger: Samples of complete steps of this epoch.
        ended: Whether the end of the epoch was met.
        moved: Whether a batch was handed out since the job, or its last load or epoch, began.
    """

    cursor: Cursor
    delivered: int = 0
    shown: int = 0
    partial: Counter[int] = field(default_factory=Counter)
    ledger: Counter[int] = field(default_factory=Counter)
    ended: bool = False
    moved: bool = False

    def copy(self) -> Model:
        return replace(self, partial=self.partial.copy(), ledger=self.ledger.copy())

    def begin(self, epoch: int) -> None:
        self.cursor = self.cursor.at_epoch(epoch)
        self.delivered = self.shown = 0
        self.partial, self.ledger, self.ended, self.moved = Counter(), Counter(), False, False


@dataclass
class Saved:
    text: str
    model: Model
    stream: Stream
    layout: Layout


def position_of(layout: Layout, stream: Stream) -> tuple[Any, ...]:
    """What must be the same for a step to be continued."""
    return (
        layout.dp,
        layout.options["micro_batch_size"],
        layout.options.get("balance_window"),
        stream.rows,
    )


class Training(RuleBasedStateMachine):
    """Batches, saves, kills, restores, epochs in any order."""

    cluster: Cluster | None = None

    @initialize(data=st.data(), stream=streams(rows=(12,)))
    def start(self, data: st.DataObject, stream: Stream) -> None:
        self.stream = stream
        self.layout = self.draw_layout(data)
        self.cluster = Cluster(self.stream, self.layout)
        self.model = Model(stream.sampler().start())
        self.saved: list[Saved] = []
        self.loaded: Saved | None = None

    def draw_layout(self, data: st.DataObject) -> Layout:
        resume = data.draw(st.sampled_from(["step", "micro_batch"]))
        return data.draw(layouts(self.stream, dp_sizes=DP_SIZES, tp_sizes=(1, 1, 2), resume=resume))

    def order(self, what: Callable[[Loader[Any]], Any]) -> Any:
        """One answer, which all ranks gave."""
        assert self.cluster is not None
        answers = self.cluster.order(what)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        assert all(answer == answers[0] for answer in answers), answers
        return answers[0]

    @rule(batches=st.integers(1, 6))
    def train(self, batches: int) -> None:
        for _ in range(batches):
            assert self.cluster is not None
            answers = self.cluster.order(lambda loader: next(loader, None))
            for answer in answers:
                if isinstance(answer, BaseException):
                    raise answer
            self.see(answers[:: self.layout.tp])

    def see(self, batches: list[Any]) -> None:
        model, self.loaded = self.model, None
        step = None if model.ended else self.stream.sampler().step_at(model.cursor)
        if step is None:
            assert batches == [None] * len(batches)
            if not model.ended:
                self.close_books()
            model.ended = True
            return
        assert None not in batches, batches
        infos = [batch["info"] for batch in batches]
        assert {(i.step, i.micro_batch) for i in infos} == {(model.cursor.step, model.delivered)}
        model.partial.update(i for batch in batches for row in batch["rows"] for i in row)
        model.delivered, model.moved = model.delivered + 1, True
        if infos[0].is_last_micro_batch:
            expected = Counter(i for i in step.indices.tolist() if i >= 0 and self.stream.lengths[i])
            assert model.partial == expected
            model.ledger.update(expected)
            model.cursor, model.delivered, model.partial = step.next_cursor, 0, Counter()
        model.shown = model.delivered

    def close_books(self) -> None:
        """The epoch's ledger: nothing twice, and with padding nothing left out."""
        if self.stream.kind == "mixture" or self.stream.remainder == "wrap":
            return
        real = {i for i, length in enumerate(self.stream.lengths) if length}
        assert set(self.model.ledger.values()) <= {1}
        assert set(self.model.ledger) <= real
        if self.stream.remainder == "pad":
            assert set(self.model.ledger) == real

    @rule()
    def loop_again(self) -> None:
        """A new ``for`` loop: after a break it goes on; after an end, or all that precedes it, the next epoch begins."""
        self.order(lambda loader: iter(loader) is loader)
        if self.model.ended or (self.model.moved and self.all_handed_out()):
            self.model.begin(self.model.cursor.epoch + 1)

    def all_handed_out(self) -> bool:
        return not self.model.shown and self.stream.sampler().step_at(self.model.cursor) is None

    @rule(ahead=st.integers(0, 2))
    def set_epoch(self, ahead: int) -> None:
        model = self.model
        epoch = model.cursor.epoch + ahead
        started = model.cursor.consumed_samples or model.shown
        at_end = model.ended or self.all_handed_out()
        if ahead and started and not at_end:
            with pytest.raises(RuntimeError, match="in the middle of epoch"):
                self.order(lambda loader: loader.set_epoch(epoch))
            return
        self.order(lambda loader: loader.set_epoch(epoch))
        if ahead:
            model.begin(epoch)
            self.loaded = None

    @rule()
    def save(self) -> None:
        text = json.dumps(self.order(lambda loader: loader.state_dict()))
        assert len(text) < 512
        if self.loaded is not None:
            assert json.loads(text) == json.loads(self.loaded.text)
            self.saved.append(self.loaded)
        else:
            self.saved.append(Saved(text, self.model.copy(), self.stream, self.layout))

    @precondition(lambda self: self.saved)
    @rule(data=st.data(), gently=st.booleans(), same=st.booleans())
    def restart(self, data: st.DataObject, gently: bool, same: bool) -> None:
        """All ranks end, and others begin, perhaps in another layout and with another global batch."""
        saved = data.draw(st.sampled_from(self.saved))
        assert self.cluster is not None
        self.cluster.end(gently=gently)
        self.stream, self.layout = saved.stream, saved.layout
        if not same:
            if self.stream.remainder != "wrap":
                self.stream = replace(self.stream, rows=data.draw(st.sampled_from([12, 24])))
            self.layout = self.draw_layout(data)
            if position_of(self.layout, self.stream) == position_of(saved.layout, saved.stream):
                self.layout = replace(self.layout, options={**self.layout.options, "resume": "step"})
        self.cluster = Cluster(self.stream, self.layout)
        self.load(saved)

    @precondition(lambda self: self.saved)
    @rule(data=st.data())
    def load_again(self, data: st.DataObject) -> None:
        """A state is loaded into a job under way."""
        fitting = [s for s in self.saved if s.layout == self.layout and s.stream == self.stream]
        if fitting:
            self.load(data.draw(st.sampled_from(fitting)))

    def load(self, saved: Saved) -> None:
        state = json.loads(saved.text)

        def into(loader: Loader[Any]) -> None:
            loader.load_state_dict(state)

        self.order(into)
        assert self.order(lambda loader: loader.state_dict()) == state
        self.model, self.loaded = saved.model.copy(), saved
        # A state does not tell whether its end was met: it is met again.
        self.model.ended = self.model.moved = False
        if (
            self.layout.options["resume"] == "step"
            or self.layout != saved.layout
            or self.stream != saved.stream
        ):
            self.model.delivered, self.model.partial = 0, Counter()

    @precondition(lambda self: self.cluster is not None)
    @invariant()
    def the_state_is_the_position(self) -> None:
        state = Cursor.from_dict(self.order(lambda loader: loader.state_dict()))
        expected = self.model.cursor
        if self.loaded is not None:
            expected = replace(self.loaded.model.cursor)
        found = (state.epoch, state.consumed_samples, state.step)
        assert found == (expected.epoch, expected.consumed_samples, expected.step)
        assert state.micro_batch == self.model.shown

    def teardown(self) -> None:
        if self.cluster is not None:
            self.cluster.end(gently=True)


TestTraining = pytest.mark.filterwarnings("ignore:the state stands after")(Training.TestCase)
TestTraining.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_planes_are_left_behind_without_a_thread() -> None:
    before = threading.active_count()
    stream = Stream(kind="step", lengths=(3,) * 24, rows=12)
    cluster = Cluster(stream, Layout(dp=2, options={"micro_batch_size": 1}))
    cluster.order(lambda loader: next(loader))
    cluster.end(gently=False)
    assert isinstance(cluster.planes[0], DataPlane)
    for thread in threading.enumerate():
        if thread.name.startswith("evenstep-"):
            thread.join(5)
    assert threading.active_count() <= before
