"""Give every model-parallel peer the batch that its constructor built."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Protocol

from torchdata.nodes import BaseNode

from evenstep.comm.batch_spec import BatchSpec
from evenstep.comm.broadcast import BatchBroadcast
from evenstep.comm.communicator import Communicator
from evenstep.device import is_accelerator, streams_of
from evenstep.nodes.epoch_after import epoch_after
from evenstep.nodes.stage import Stage, call

__all__ = ["ModelBroadcast"]


class ModelPlane(Protocol):
    """What `ModelBroadcast` needs of a `DataPlane`."""

    @property
    def model(self) -> Communicator:
        """The ranks of this data-parallel replica, its constructor first."""

    @property
    def is_constructor(self) -> bool:
        """Whether this rank builds batches."""

    @property
    def assists(self) -> bool:
        """Whether this rank builds none but reads for those that do."""


class ModelBroadcast(Stage[Any, Any]):
    """The same batch, and the same state after it, on every rank of a data-parallel replica.

    All ranks call `next` in lockstep, from the training thread. The constructor pulls ``source``; its peers never
    do: their source only knows the state before the first batch. (A peer that reads for its constructor pulls
    what it routes, and drops it.) An end is an end on every rank. An error is
    raised as it is at the constructor and as `RemoteRankError` on its peers. A replica of one rank passes
    batches through. Taking the state, `reset` and closing post nothing.

    Args:
        source: Makes batches, at the constructor.
        plane: Knows the replica.
        spec: What every batch looks like, so that no structure is told; the same on every rank.
    """

    shown_as = "broadcast"

    def __init__(self, source: BaseNode[Any], plane: ModelPlane, spec: BatchSpec | None = None) -> None:
        super().__init__(source)
        self._alone = len(plane.model.ranks) == 1
        self._model = plane.model
        self._is_constructor = plane.is_constructor
        self._assists = plane.assists
        self._wire = BatchBroadcast(plane.model, spec, _aside(plane.model))
        self._begun = False
        self._state: dict[str, Any] | None = None
        self._pulled_state: dict[str, Any] | None = None

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        """Go to ``initial_state``, or to the epoch after the last batch handed out."""
        with self._turn.reset():
            handed = self._state
            behind = handed is not None and handed is not self._pulled_state  # a peer's source never moves
            for state in epoch_after(handed) if initial_state is None and behind else (initial_state,):
                super().reset(state)

    def clear(self) -> None:
        """The next message belongs to another stream, if this one has begun."""
        if self._begun:
            self._wire.restart()
        self._begun = False
        self._state = self._pulled_state = None

    def get_state(self) -> dict[str, Any]:
        """The constructor's state at the batch handed out last."""
        return super().get_state() if self._state is None else self._state

    def produce(self) -> Any:
        """The constructor's next batch."""
        if self._alone:
            return next(self.source)
        self._begun = True
        return self._send() if self._is_constructor else self._receive()

    def close(self) -> None:
        """Have the other ranks of the replica hear of it, should they wait for this one; waits for nobody."""
        say_goodbye = getattr(self._model, "say_goodbye", None)
        if not self._alone and say_goodbye is not None:
            say_goodbye()

    def _send(self) -> Any:
        if self._state is None:
            self._state = self._pulled_state = self.source.state_dict()
        try:
            batch = next(self.source)
            self._pulled_state = self.source.state_dict()
            prepared = call("preparing a batch", self._wire.prepare, batch, self._pulled_state)
        except StopIteration:
            self._state = self._pulled_state = self.source.state_dict()
            try:
                self._wire.send_end(self._state)
            except TypeError as error:  # about the state, before anything was sent
                self._tell(error)
                raise
            raise
        except Exception as error:
            self._tell(error)
            raise
        self._wire.send(prepared)
        self._state = self._pulled_state
        return batch

    def _receive(self) -> Any:
        if self._assists:
            # What ends or fails here does so at the constructor too, which tells it in the message below.
            with suppress(Exception):
                next(self.source)
        message = self._wire.receive()
        if message.error is not None:
            raise message.error
        self._state = message.state
        if message.is_end:
            raise StopIteration
        return message.batch

    def _tell(self, error: Exception) -> None:
        try:
            self._wire.send_error(error)
        except Exception as failure:
            # The peers cannot be reached: what they would have been told is still the first cause.
            error.__context__ = failure


def _aside(model: Communicator) -> Callable[[], AbstractContextManager[Any]]:
    """Where messages travel: their stream stands behind no training step, for which the host would have to wait."""
    if len(model.ranks) == 1 or not is_accelerator(model.device):
        return nullcontext
    streams = streams_of(model.device)
    stream = streams.new_stream()
    return lambda: streams.on(stream)
