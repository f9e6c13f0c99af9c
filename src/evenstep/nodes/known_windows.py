"""Windows whose metadata every rank knows: each plans them before their turn, and in it they cost one header."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torchdata.nodes import BaseNode

from evenstep.comm.plane import DataPlane
from evenstep.comm.plans import SharedPlan
from evenstep.config import LoaderConfig
from evenstep.nodes.items import GatheredWindow, Window
from evenstep.nodes.metadata_gather import announce
from evenstep.nodes.stage import call

__all__ = ["KnownWindows"]


@dataclass(frozen=True, slots=True)
class _Planned:
    """A window and its plan, or why there is none."""

    read: Window
    window: GatheredWindow
    shared: SharedPlan | Exception


class KnownWindows:
    """The windows of a source that reads nothing, with the plan that this rank makes of each.

    Args:
        source: Windows whose metadata was known.
        plane: The data plane.
        config: The loader's configuration.
        plan: Makes the plan, the same on every rank.
    """

    def __init__(
        self,
        source: BaseNode[Window],
        plane: DataPlane,
        config: LoaderConfig,
        plan: Callable[[GatheredWindow], SharedPlan],
    ) -> None:
        self._source = source
        self._plane = plane
        self._config = config
        self._plan = plan
        self._digest = 0  # of the last plan
        self._ahead: _Planned | Exception | None = None

    def clear(self) -> None:
        """Forget the stream that a reset leaves."""
        self._digest = 0
        self._ahead = None

    def peek(self) -> tuple[GatheredWindow, SharedPlan] | None:
        """The next window, of which nobody else hears yet; None where there is none, or no plan of it."""
        if self._ahead is None:
            try:
                self._ahead = self._next()
            except StopIteration:
                self._ahead = StopIteration()  # without the frames that the one just caught would keep
            except Exception as error:
                self._ahead = error
        if isinstance(self._ahead, Exception) or isinstance(self._ahead.shared, Exception):
            return None
        return self._ahead.window, self._ahead.shared

    def announced(self) -> tuple[GatheredWindow, SharedPlan]:
        """The next window, once every rank has told that it is well.

        Raises:
            StopIteration: The stream has ended on all ranks.
            RemoteRankError: A rank failed or left.
            ConfigMismatch: Two ranks planned the last window differently.
        """
        taken: list[_Planned] = []

        def pull() -> Window:
            ahead, self._ahead = self._ahead, None
            if isinstance(ahead, Exception):
                raise ahead
            taken.append(self._next() if ahead is None else ahead)
            return taken[0].read

        announce(pull, self._plane, plan=self._digest)
        planned = taken[0]
        if isinstance(planned.shared, Exception):
            raise planned.shared
        self._digest = planned.shared.digest  # which the next header compares
        return planned.window, planned.shared

    def _next(self) -> _Planned:
        """The next window; what fails in planning is raised after its header, on every rank alike."""
        read: Window = next(self._source)
        topology, place = self._plane.topology, read.place
        loss = read.columns.known_loss_tokens()
        whole = place.count == place.total and topology.balance_group_size == topology.dp_size
        whole = whole and self._config.on_sample_error == "raise"  # else a sample may be missing
        window = GatheredWindow(
            place=place,
            columns=read.columns,
            holders=None,
            indices=read.indices,
            local={},
            owners=read.owners,
            parts=read.parts,
            step_loss_tokens=loss if whole and loss >= 0 else None,
            counts=read.counts,
        )
        try:
            return _Planned(read, window, call("planning", self._plan, window))
        except Exception as error:
            return _Planned(read, window, error)
