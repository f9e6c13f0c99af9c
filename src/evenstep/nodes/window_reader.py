"""What both beginnings of a graph share: they read, count, renew their workers and leave one stream for another."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

from torchdata.nodes import BaseNode

from evenstep.comm.plane import DataPlane
from evenstep.config import LoaderConfig
from evenstep.nodes.fetch import Fetcher
from evenstep.nodes.items import Counts, Place, Window
from evenstep.nodes.read import SampleReader
from evenstep.nodes.spans import Watched, in_span
from evenstep.nodes.stage import call
from evenstep.nodes.streams import pass_epoch_on
from evenstep.nodes.turn import Turn

__all__ = ["WindowReader"]


class WindowReader(BaseNode[Window], Watched):
    """The source of a graph; where one stream is left and another begun.

    `reset` finishes the conversation with the other ranks (see `evenstep.comm.rounds`) before it moves. Subclasses
    say where they stand (`go_to`), which window comes next (`take`) and what has ``set_epoch`` (`targets`).

    Args:
        plane: The data plane.
        config: The loader's configuration.
        dataset: What indices belong to; None where nothing is read by index.
        reader: Makes a window of what was read.
        fetcher: Reads ``dataset``; None where it is read later or elsewhere.
        allow_changed_dataset: Accept a state of another dataset, order or seed.

    Attributes:
        counts: What this rank has left out or cut since it was built.
    """

    shown_as = "read"

    def __init__(
        self,
        plane: DataPlane,
        config: LoaderConfig,
        dataset: Any,
        reader: SampleReader,
        fetcher: Fetcher | None,
        *,
        allow_changed_dataset: bool,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torchdata leaves it without annotations
        self.plane = plane
        self.dataset = dataset
        self.counts: Counts = Counts()
        self._config = config
        self._reader = reader
        self._fetcher = fetcher
        self._allow_changed = allow_changed_dataset
        self._state: dict[str, Any] = {}
        self._fresh = True
        self._turn = Turn()

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        """Go to ``initial_state``, or to the epoch after the last item handed out."""
        with self._turn.reset():
            super().reset(initial_state)
            if self.plane.rounds is not None:
                self.plane.rounds.restart()
            self.go_to(initial_state)
            self._fresh = False

    @abstractmethod
    def go_to(self, state: dict[str, Any] | None) -> None:
        """Stand at ``state``; None: at the epoch after the last item handed out, or still at the beginning."""

    @abstractmethod
    def take(self) -> tuple[Place, Callable[[], Window]]:
        """The place of the next window, and what reads it; or StopIteration."""

    @in_span
    def next(self) -> Window:
        """The next window."""
        return self._turn.pull(self._next)

    def _next(self) -> Window:
        place, read = self.take()
        window = call("reading", read)
        # The last window's state is the state after its step; "auto" cannot tell yet, and has one window a step.
        self._state = place.end_state() if not place.total else place.after(place.count, 0)
        self.counts += window.counts
        return window

    def state_dict(self) -> dict[str, Any]:
        """The position after the last window handed out."""
        self._turn.note()
        return super().state_dict()

    def get_state(self) -> dict[str, Any]:
        """The state after the last window handed out."""
        return dict(self._state)

    @abstractmethod
    def targets(self) -> tuple[Any, ...]:
        """What hears of a new epoch, where it has ``set_epoch``."""

    def set_epoch(self, epoch: int) -> None:
        """Pass a new epoch on to what the samples come from."""
        for target in self.targets():
            pass_epoch_on(target, epoch)
        if self._fetcher is not None and callable(getattr(self.dataset, "set_epoch", None)):
            self._fetcher.renew()

    def close(self) -> None:
        """End the workers."""
        if self._fetcher is not None:
            self._fetcher.close()
