"""The contract that all our nodes share: transparent state, sticky ends, sticky errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Generic, ParamSpec, TypeVar

from torchdata.nodes import BaseNode

from evenstep.config import LoaderConfig
from evenstep.errors import RemoteRankError, SampleError
from evenstep.nodes.spans import Watched, watch
from evenstep.nodes.turn import Turn

__all__ = ["Stage", "call", "configured", "met_again", "nothing_lost", "upstream", "without_stages"]

In = TypeVar("In")
Out = TypeVar("Out", covariant=True)
Args = ParamSpec("Args")
Result = TypeVar("Result")
E = TypeVar("E", bound=BaseException)

_NOTHING_LOST = "evenstep_nothing_lost"


class Stage(BaseNode[Out], Watched, Generic[In, Out]):
    """A node over one ``source``: pulls one item, does one thing, hands out the next kind of item.

    Its state is its source's state at the last item it handed out, so that `state_dict` of any stage, at any
    depth, is the bare cursor. Subclasses implement `produce` and, if they hold anything, extend `clear`;
    a stage that runs ahead or hands out several items for one overrides `get_state`. In traces each item is a span
    named ``evenstep.<shown_as>``.
    """

    def __init__(self, source: BaseNode[In]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torchdata leaves it without annotations
        self.source = source
        self._stopped: Exception | None = None
        self._turn = Turn()

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        """Go to ``initial_state``, or to the epoch after the last item handed out.

        It waits for an item that another thread has begun to make, which belongs to the stream that is left.
        """
        with self._turn.reset():
            super().reset(initial_state)
            self.clear()
            self._stopped = None
            self.source.reset(initial_state)

    def next(self) -> Out:
        """The next item; an end or an error, once met, is met again until `reset`."""
        return self._turn.pull(self._next)

    def _next(self) -> Out:
        if self._stopped is not None:
            raise self._stopped
        try:
            return watch(self, self.produce)
        except BaseException as error:
            self._stopped = met_again(error)
            if isinstance(error, Exception) and not isinstance(error, StopIteration):
                self._report(error)
            raise

    def _report(self, error: Exception) -> None:
        """The other ranks hear of ``error`` in this rank's next header, which is then its last."""
        for node in upstream(self):
            plane = getattr(node, "plane", None)
            if plane is not None:
                plane.fail(error)
                return

    def state_dict(self) -> dict[str, Any]:
        """The position after the last item handed out."""
        self._turn.note()
        return super().state_dict()

    def get_state(self) -> dict[str, Any]:
        """The source's state: this stage adds nothing of its own."""
        state: dict[str, Any] = self.source.state_dict()
        return state

    def produce(self) -> Out:
        """Pull from ``source`` and return the next item, or raise StopIteration."""
        raise NotImplementedError(type(self))

    def clear(self) -> None:
        """Drop what belongs to the stream that a reset leaves."""


def call(name: str, function: Callable[Args, Result], *args: Args.args, **kwargs: Args.kwargs) -> Result:
    """``function(*args, **kwargs)``, which is not the data's source: only that may end a stream (compare PEP 479).

    Raises:
        RuntimeError: It raised StopIteration, which a loop would take for the end of the epoch.
    """
    try:
        return function(*args, **kwargs)
    except StopIteration as error:
        raise RuntimeError(
            f"{name} raised StopIteration, which would end the epoch here and lose the rest of its data; only the "
            "source of the data may. Look for a next() without a default."
        ) from error


def nothing_lost(error: BaseException) -> None:
    """Mark an interrupt of a wait that took nothing: whoever it passes through can go on."""
    error.__dict__[_NOTHING_LOST] = True


def met_again(error: BaseException) -> Exception | None:
    """What a node raises from now on that was left by ``error``; None if it can go on.

    Where an interrupt (Ctrl-C, ``sys.exit``) broke in, what had been taken from the source is gone: going on
    would skip it.
    """
    if isinstance(error, Exception):
        return error
    if _NOTHING_LOST in error.__dict__:
        return None
    stop = RuntimeError(
        f"the loader was interrupted inside a batch ({type(error).__name__}), and going on would skip data; load the "
        "last state to go on: loader.load_state_dict(loader.state_dict())"
    )
    stop.__cause__ = error
    return stop


def without_stages(error: E) -> E:
    """``error`` without the frames of the stages that it came through, and so its causes that are ours.

    What they say is in their words; where user code failed is in the frames of the first cause, which stay.
    """
    ours: BaseException | None = error
    while isinstance(ours, (RemoteRankError, SampleError)):
        ours.__traceback__ = None
        ours = ours.__cause__
    return error


def upstream(node: object) -> Iterator[object]:
    """``node`` and everything it pulls from, nearest first; stock nodes with a ``source`` included."""
    while node is not None:
        yield node
        node = getattr(node, "source", None)


def configured(config: LoaderConfig | None, source: object) -> LoaderConfig:
    """``config``, or where that is None the one of the nearest node that ``source`` pulls from.

    Raises:
        TypeError: No node has one.
    """
    if config is not None:
        return config
    for node in upstream(source):
        found = getattr(node, "_config", None)
        if isinstance(found, LoaderConfig):
            return found
    raise TypeError(
        f"no node that {type(source).__name__} pulls from has a LoaderConfig: pass one, config=LoaderConfig(seq_len=...)"
    )
