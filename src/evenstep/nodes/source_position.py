"""Where a rank-local stream stands: kept beside the shared cursor, under the number of its dp rank."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from evenstep.cursor import Cursor
from evenstep.errors import StateMismatch
from evenstep.nodes.local_streams import LocalStream
from evenstep.nodes.stage import call
from evenstep.nodes.streams import check_serialisable
from evenstep.topology import Topology

__all__ = ["SourcePosition", "has_ended", "mark_ended", "split_state"]


class SourcePosition:
    """This rank's entry of ``state["source"]``.

    Args:
        source: What the stream drives; it may have ``reshard(states, dp_rank, dp_size) -> state``.
        stream: None on ranks that construct nothing.
        topology: Roles of the ranks.

    Attributes:
        here: ``{dp rank: {"epoch": ..., "position": ...}}``, where `mark_ended` may put ``"ended": True``; empty on ranks that construct nothing.
    """

    def __init__(self, source: Any, stream: LocalStream | None, topology: Topology) -> None:
        self.here: dict[str, Any] = {}
        self._stream = stream
        self._reshard = getattr(source, "reshard", None)
        self._dp_rank, self._dp_size = topology.dp_rank, topology.dp_size
        self._checked = False

    def check_size(self, cursor: Cursor) -> None:
        """Refuse a state of another number of ranks.

        Raises:
            StateMismatch: The source cannot be resharded.
        """
        if cursor.dp_size not in (0, self._dp_size) and not callable(self._reshard):
            raise StateMismatch(
                f"the state was saved on {cursor.dp_size} data-parallel ranks, this loader has {self._dp_size}: each "
                "position of an external source belongs to one rank. Resume on as many ranks, or give the source "
                "reshard(states, dp_rank, dp_size)."
            )

    def load(self, cursor: Cursor, sources: Mapping[str, Any]) -> dict[str, Any]:
        """Bring the stream to ``cursor``, and return where it then stands.

        Raises:
            StateMismatch: ``sources`` has no position for this rank.
        """
        self.here = {}
        if self._stream is None:
            return self.here
        if sources:
            epoch, position = _entry(self._mine(cursor, sources))
            self._stream.load(epoch, position)
            if epoch != cursor.epoch:  # the state of an epoch's end, moved on to another epoch
                self._stream.begin(cursor.epoch)
        elif cursor.consumed_samples or cursor.micro_batch:
            raise StateMismatch(
                "the state has no position of an external source beside its cursor: it was saved by a loader "
                "over a dataset. Build the loader it was saved with."
            )
        else:
            self._stream.begin(cursor.epoch)
        return self.move_on(cursor.epoch)

    def move_on(self, epoch: int) -> dict[str, Any]:
        """Where the stream stands now, in ``epoch``."""
        assert self._stream is not None
        position = call("the source's state", self._stream.state)
        if not self._checked:
            check_serialisable(position, "state")
            self._checked = True
        self.here = {str(self._dp_rank): {"epoch": epoch, "position": position}}
        return self.here

    def _mine(self, cursor: Cursor, sources: Mapping[str, Any]) -> Any:
        key, size = str(self._dp_rank), self._dp_size
        if cursor.dp_size != size and callable(self._reshard):
            missing = [str(d) for d in range(cursor.dp_size) if str(d) not in sources]
            if missing:
                raise StateMismatch(
                    f"to go from {cursor.dp_size} to {size} data-parallel ranks the source needs the states of all old "
                    f'ranks, those of {", ".join(missing)} are missing: merge the "source" entries of all ranks'
                )
            epochs, states = zip(*map(_entry, sources.values()), strict=True)
            by_rank = dict(zip(map(int, sources), states, strict=True))
            return {"epoch": epochs[0], "position": self._reshard(by_rank, self._dp_rank, size)}
        if key not in sources:
            raise StateMismatch(
                f"the state has positions of the external sources of dp ranks {sorted(sources)}, not of this rank's "
                f"({key}): it would begin again while the others go on. Load the state that this rank saved."
            )
        return copy.deepcopy(sources[key])


def _entry(entry: Any) -> tuple[int, Any]:
    """Epoch and position of one rank's source."""
    if (
        not isinstance(entry, Mapping)
        or set(entry) - {"ended"} != {"epoch", "position"}
        or type(entry["epoch"]) is not int
    ):
        raise ValueError(
            f"the position of an external source is {entry!r}, expected {{'epoch': ..., 'position': ...}}; pass what "
            "loader.state_dict() returned"
        )
    return entry["epoch"], entry["position"]


def split_state(state: Mapping[str, Any]) -> tuple[Cursor, Mapping[str, Any]]:
    """The cursor, and the positions of external sources beside it."""
    bare = {key: value for key, value in state.items() if key != "source"}
    sources = state.get("source", {})
    if not isinstance(sources, Mapping):
        raise TypeError(f"state['source'] is {sources!r}, expected a mapping from dp ranks to positions")
    return Cursor.from_dict(bare), sources


def mark_ended(state: Mapping[str, Any]) -> None:
    """Note in the positions beside the cursor ``state``, in place, that the epoch has ended there.

    A position does not show it: only asking for one more step does.
    """
    for entry in state.get("source", {}).values():
        entry["ended"] = True


def has_ended(state: Mapping[str, Any]) -> bool:
    """Whether `mark_ended` was told so in the epoch of the cursor ``state``."""
    sources = state.get("source")
    if not isinstance(sources, Mapping) or not sources:
        return False
    return all(
        isinstance(entry, Mapping) and entry.get("ended") is True and entry.get("epoch") == state["epoch"]
        for entry in sources.values()
    )
