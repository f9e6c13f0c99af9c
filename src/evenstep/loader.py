"""The loop's end of a graph: one position, continued, saved and loaded without surprises."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Generic, TypeVar

import numpy as np
import torchdata.nodes as tn

from evenstep.comm.plane import DataPlane
from evenstep.cursor import Cursor, find_cursor, next_epoch_state
from evenstep.errors import RemoteRankError, SampleError
from evenstep.nodes.balance import Balance
from evenstep.nodes.balance_teller import BalanceTeller
from evenstep.nodes.external_step_reader import ExternalStepReader
from evenstep.nodes.source_position import has_ended, mark_ended
from evenstep.nodes.stage import Stage, call, met_again, upstream, without_stages
from evenstep.nodes.stock import bare, changes_count, reads_ahead, wrapped_like
from evenstep.nodes.stock_threads import end_threads

__all__ = ["Loader"]

log: logging.Logger = logging.getLogger("evenstep")

_EMPTY_LOOPS = 8  # over a closed loader; more are a program that waits for a step that never comes

T = TypeVar("T")


class Loader(tn.Loader[T], Generic[T]):
    """Iterates a graph and keeps its position.

    It is its own iterator. `iter` on an unfinished epoch continues it; after the end it begins the next one. A
    state taken at an epoch's end restores to that end: the first loop over it is empty, the second is the next epoch.
    After `close` it has ended for good: ``next`` raises StopIteration and a loop over it is empty, which is logged;
    a program that goes on looping meets a RuntimeError, so that nobody trains on nothing for ever.

    Args:
        root: The last node of the graph.
        restart_on_stop_iteration: Let already the first loop after such a restore be the next epoch, as under the
            stock Loader: for trainers that count the epoch as done when they restore it (Lightning). May be set later.
        on_balance: Called with the `Balance` of each window before its first batch is delivered, on the planner rank;
            what it raises ends the loop.
        log_balance: Log the same to the ``"evenstep"`` logger.
    """

    def __init__(
        self,
        root: tn.BaseNode[T],
        restart_on_stop_iteration: bool = False,
        *,
        on_balance: Callable[[Balance], object] | None = None,
        log_balance: bool = False,
    ) -> None:
        super().__init__(root, restart_on_stop_iteration)
        self._teller = BalanceTeller(root, on_balance, log_balance)
        # Resets that the root has not seen yet. Each is passed on, in order, when an item is asked for: ranks
        # count resets to tell their streams apart, also a rank that skipped one without asking for an item.
        self._resets: list[dict[str, Any] | None] = [None]
        self._loaded: dict[str, Any] | None = None
        self._begun = False
        self._handed_out = False  # a batch since the last reset
        self._finished = False
        self._closed = False
        self._empty_loops = 0  # since it was closed
        self._error: Exception | None = None

    def __iter__(self) -> Iterator[T]:
        """This loader, at the next epoch if the last one has been finished.

        It has been, too, if all its batches were handed out and nobody asked for more: loops that count batches
        (``len(loader)``) never meet the end.

        Raises:
            RuntimeError: It is closed, and has been asked several times since.
        """
        if self._closed:
            self._empty_loops += 1
            if self._empty_loops > _EMPTY_LOOPS:
                raise RuntimeError("this loader has been closed; build another one to train on")
            log.warning("evenstep: a loop over a closed loader has no batches; build another one to train on")
            return self
        if self._finished or self._has_handed_out_all():
            self._resets.append(None)
            self._finished = False
        loaded = None if self._error is not None else self._loaded
        if self.restart_on_stop_iteration and loaded is not None and self._is_end(loaded):
            self._go_to(next_epoch_state(loaded))
        return self

    def __next__(self) -> T:
        """The next batch.

        An error, once met, is met again until a state is loaded, and `state_dict` stays where the last batch was handed
        out: the batch that failed, also if ``on_balance`` did, is the first one after
        ``loader.load_state_dict(loader.state_dict())``. An interrupt (Ctrl-C) inside a batch is such an error; one that
        came while this thread waited for the prefetcher is not: the loop may simply go on.
        """
        if self._closed or self._finished:
            raise StopIteration
        if self._error is not None:
            raise self._error
        before = self._loaded
        try:
            call("a reset", self._apply)
            if before is None and isinstance(self.root, Stage):  # whose state costs nothing to take
                before = bare(self.root.state_dict())
            item: T = next(self.root)
            self._loaded = None
            if self._teller.is_asked:
                call("on_balance", self._teller.tell)
        except StopIteration:
            self._finished = True
            self._loaded = None
            raise
        except BaseException as error:
            # Also of a stock or foreign root, which would go on behind the failure.
            self._error = met_again(error)
            self._loaded = before
            if isinstance(error, (RemoteRankError, SampleError)):
                # A hundred lines of stages on every rank would bury the origin.
                raise without_stages(error)  # noqa: B904 - the same error
            raise
        self._handed_out = True
        return item

    def __len__(self) -> int:
        """Batches of a full epoch: of the one under way, or after an end of the next one.

        Raises:
            TypeError: Nobody knows: the source does not, or a node behind it gives another number of items.
        """
        source: Any = self._source()
        if not hasattr(source, "batches_in") and not hasattr(source, "__len__"):
            raise TypeError(f"{type(source).__name__} does not know how many batches an epoch has")
        for node in upstream(self.root):
            if changes_count(node):
                raise TypeError(f"how many batches {type(node).__name__} makes of an epoch is not known")
        if not hasattr(source, "batches_in"):
            return len(source)
        epoch: int = find_cursor(self.state_dict())["epoch"]
        # After an end the next `iter` begins another epoch: what a progress bar asks for before it.
        return int(source.batches_in(epoch + self._finished))

    def state_dict(self) -> dict[str, Any]:
        """The shared cursor: the same on every rank, a copy, taken without waiting.

        Right after `load_state_dict` it is what was loaded.
        """
        if self._loaded is not None:
            return copy.deepcopy(self._loaded)
        if not self._begun:
            self._apply()
        state: Any = self.root.state_dict()
        state = copy.deepcopy(bare(state))
        if self._resets:
            return next_epoch_state(state)  # type: ignore[no-any-return]  # as `state`
        if self._finished and isinstance(self._source(), ExternalStepReader):
            mark_ended(find_cursor(state))
        return state  # type: ignore[no-any-return]  # a dictionary

    save_state = state_dict

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``: a bare cursor, or one under the wrappers of the stock Loader and nodes.

        Raises:
            TypeError, ValueError: It is no state of ours; the message names the key.
            StateMismatch: It belongs to another dataset, order or seed.
        """
        if self._closed:
            raise RuntimeError("this loader has been closed; build another one to load a state")
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"a state is a mapping, got {type(state_dict).__name__} {state_dict!r}")
        state = bare(copy.deepcopy(dict(state_dict)))
        cursor = find_cursor(state)
        if cursor is state and _is_foreign(state):
            state = cursor = Cursor.from_dict(state).to_dict()
        for node in upstream(self.root):
            check = getattr(node, "check_state", None)
            if check is not None:
                check(cursor)
        self._go_to(state)

    def set_epoch(self, epoch: int) -> None:
        """Begin ``epoch`` next; nothing happens if the loader stands in it.

        Raises:
            RuntimeError: The loader is closed, or in the middle of another epoch.
        """
        if isinstance(epoch, bool) or not isinstance(epoch, (int, np.integer)):
            raise TypeError(f"epoch={epoch!r} ({type(epoch).__name__}), expected an integer")
        if epoch < 0:
            raise ValueError(f"epoch={epoch}, expected an integer >= 0")
        epoch = int(epoch)  # as a state has it
        if self._closed:
            raise RuntimeError("this loader has been closed; build another one to train on")
        state = find_cursor(self.state_dict())
        cursor = Cursor.from_dict(_without_source(state))
        if epoch != cursor.epoch:
            started = cursor.consumed_samples or cursor.micro_batch
            if started and not self._finished and not has_ended(state) and not self._at_end(cursor):
                raise RuntimeError(
                    f"set_epoch({epoch}) in the middle of epoch {cursor.epoch} (after {cursor.consumed_samples} "
                    "samples) would skip the rest of it. Finish the epoch, or load a state that stands elsewhere."
                )
            self._go_to({**state, **cursor.at_epoch(epoch).to_dict()})
        for node in upstream(self.root):
            reach = getattr(node, "set_epoch", None)
            if reach is not None:
                reach(epoch)

    @property
    def step(self) -> int:
        """Optimizer steps completed since the start of training."""
        return int(find_cursor(self.state_dict()).get("step", 0))

    @property
    def sampler(self) -> Any:
        """The sampler, or None for a stream that makes its own steps."""
        return getattr(self._source(), "sampler", None)

    @property
    def last_balance(self) -> Balance | None:
        """Balance of the window that the last batch belongs to; None on ranks that did not plan it."""
        if self._loaded is not None or not self._begun:
            return None
        return self._teller.last()

    @property
    def last_host_batch(self) -> Any:
        """Host side of the last batch, with the fields that stayed there; None where no node keeps it."""
        for node in upstream(self.root):
            if hasattr(node, "last_host_batch"):
                return node.last_host_batch
        return None

    def wait_for_prefetch(self) -> None:
        """Wait until everything that may be prepared ahead has been; nothing is dropped or broadcast ahead."""
        for node in upstream(self.root):
            for name in ("wait", "wait_for_prefetch"):
                if hasattr(node, name):
                    getattr(node, name)()

    def prefetch_plan(self) -> None:
        """Start the next plan, once the forward pass is launched (``collectives="caller"``; else it does nothing)."""
        self._hook("prefetch_plan")

    def prefetch(self) -> None:
        """Start the next exchange and copy, once the backward pass is launched.

        It waits for nothing but, at most for a moment, what `evenstep.nodes.CallerPrefetch` may wait for.
        """
        self._hook("prefetch")

    def _hook(self, name: str) -> None:
        """Call a hook of the nodes, those nearest to the data first: what they bring may be copied at once."""
        if self._closed or self._resets:
            return
        for node in reversed(list(upstream(self.root))):
            if hasattr(node, name):
                getattr(node, name)()

    def close(self) -> None:
        """Leave the other ranks and end every thread within seconds. Idempotent; raises nothing undelivered."""
        if self._closed:
            return
        self._closed = True
        nodes = list(upstream(self.root))
        planes: list[DataPlane] = [node.plane for node in nodes if getattr(node, "plane", None) is not None]  # type: ignore[attr-defined]  # as all that have one
        stock = [node for node in nodes if reads_ahead(node)]
        for plane in planes if stock else ():
            plane.shut()  # before what their threads read from is closed
        for node in stock:
            end_threads(node)
        for node in nodes:
            if hasattr(node, "close"):
                node.close()
        for plane in planes:
            plane.close()

    def __enter__(self) -> Loader[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _source(self) -> object:
        return list(upstream(self.root))[-1]

    def _has_handed_out_all(self) -> bool:
        if not self._handed_out or self._resets or self._error is not None:
            return False
        return self._is_end(self.state_dict())

    def _is_end(self, state: Mapping[str, Any]) -> bool:
        if _is_foreign(state):
            return False
        return has_ended(state) or self._at_end(Cursor.from_dict(_without_source(state)))

    def _at_end(self, cursor: Cursor) -> bool:
        is_end = getattr(self._source(), "is_end", None)
        return is_end is not None and bool(is_end(cursor))

    def _go_to(self, state: dict[str, Any]) -> None:
        self._resets.append(state)
        self._loaded = state
        self._finished = False
        self._error = None

    def _apply(self) -> None:
        """Pass on the resets that have been waiting."""
        self._begun = True
        while self._resets:
            self._handed_out = False
            state = self._resets.pop(0)
            self.root.reset(state if state is None else wrapped_like(self.root, state))


def _without_source(state: Mapping[str, Any]) -> dict[str, Any]:
    """The cursor without the rank-local state that may ride beside it."""
    return {key: value for key, value in state.items() if key != "source"}


def _is_foreign(state: Mapping[str, Any]) -> bool:
    """Whether ``state`` is a position under the names of another loader."""
    return "consumed_samples" not in state
