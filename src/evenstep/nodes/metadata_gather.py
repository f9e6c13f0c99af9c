"""Brings the metadata of a whole window to every rank of a balance group, after a status header."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from torchdata.nodes import BaseNode

from evenstep.comm.columns import Columns, as_bytes
from evenstep.comm.header import EXHAUSTED, FAILED, OK, Header
from evenstep.comm.plane import DataPlane
from evenstep.errors import ConfigMismatch, RemoteRankError
from evenstep.nodes.items import Counts, GatheredWindow, Place, Window
from evenstep.nodes.stage import Stage
from evenstep.nodes.turn import Turn

__all__ = ["MetadataGather", "announce", "window_header"]

log: logging.Logger = logging.getLogger("evenstep")


class MetadataGather(Stage[Window, GatheredWindow]):
    """One header from every rank, then one padded gather of columns.

    A source that raises on one rank raises RemoteRankError on all of them, here, before anything else is posted.

    Args:
        source: Where the windows come from.
        plane: The data plane.
        uneven: What to do when the streams of some ranks end before others': ``"error"`` or ``"stop"``.

    Attributes:
        left_out: Samples of this rank that were read but left out because another rank's stream had ended.
    """

    shown_as = "gather"

    def __init__(self, source: BaseNode[Window], plane: DataPlane, *, uneven: str = "error") -> None:
        super().__init__(source)
        self.plane = plane
        self._turn = Turn(plane.rounds)
        self.left_out: int = 0
        self._uneven = uneven

    def produce(self) -> GatheredWindow:
        """Gather the next window."""
        window, headers = announce(
            lambda: next(self.source), self.plane, self._uneven, leave_out=self._leave_out
        )
        group = self.plane.balance
        assert group is not None
        mine = window.columns
        sizes = [headers[rank].column_bytes for rank in group.ranks]
        rows = group.all_gather(as_bytes(mine, max(1, *sizes))).numpy()
        parts = [
            Columns.unpack(
                rows[p, : headers[rank].column_bytes], headers[rank].samples, mine.stages, mine.names
            )
            for p, rank in enumerate(group.ranks)
        ]
        columns, holders = Columns.gather(parts)
        local = np.flatnonzero(holders == group.position)
        return GatheredWindow(
            place=window.place,
            columns=columns,
            holders=holders,
            indices=None,
            local=dict(zip(local.tolist(), window.samples, strict=True)),
            step_loss_tokens=step_loss_tokens(window.place, headers),
            counts=sum((counts_of(headers[rank]) for rank in group.ranks), Counts()),
        )

    def _leave_out(self, window: Window) -> None:
        self.left_out += len(window.columns)
        log.warning(
            "uneven='stop': %d samples of rank %d at step %d are left out, because another rank's stream has ended",
            len(window.columns),
            self.plane.topology.rank,
            window.place.start.step,
        )


def announce(
    pull: Callable[[], Window],
    plane: DataPlane,
    uneven: str = "error",
    plan: int = 0,
    leave_out: Callable[[Window], None] | None = None,
) -> tuple[Window, dict[int, Header]]:
    """Pull a window and exchange headers; whatever ``pull`` does, every rank hears of it.

    Args:
        pull: Gives the next window, or raises StopIteration.
        plane: The data plane.
        uneven: What to do when the streams of some ranks end before others'.
        plan: Digest of the last window's plan, where every rank has made its own; else 0.
        leave_out: Called with the window that an uneven end leaves out.

    Returns:
        The window and the header of every rank of the data plane.

    Raises:
        StopIteration: The stream has ended on all ranks.
        RemoteRankError: A rank failed or left.
        ConfigMismatch: Two ranks of the balance group planned the last window differently.
    """
    assert plane.rounds is not None, "only ranks of the data plane gather"
    window: Window | None = None
    failure: BaseException | None = None
    header = Header(EXHAUSTED, plan=plan)
    try:
        window = pull()
        header = replace(window_header(window), plan=plan)
    except StopIteration:
        pass
    except KeyboardInterrupt:
        raise  # the user waits for the prompt, and would wait for the slowest rank below
    except BaseException as error:
        failure, header = error, Header(FAILED)
    try:
        headers = plane.rounds.begin(header, failure, uneven=uneven)
    except RemoteRankError as error:
        if isinstance(failure, Exception):
            raise error from failure
        if failure is None:
            raise
        raise failure from None
    _check_plans(headers, plane)
    if window is None or any(h.status != OK for h in headers.values()):
        if window is not None and leave_out is not None:
            leave_out(window)
        raise StopIteration
    return window, headers


def _check_plans(headers: dict[int, Header], plane: DataPlane) -> None:
    group = plane.balance
    assert group is not None, "every rank of the data plane is in one"
    # Who leaves after its last batch says nothing of plans.
    telling = [rank for rank in group.ranks if headers[rank].status in (OK, EXHAUSTED)]
    first = headers[telling[0]].plan
    for rank in telling:
        if headers[rank].plan != first:
            raise ConfigMismatch(
                f"rank {rank} planned the last window differently from rank {telling[0]} (digests "
                f"{headers[rank].plan % 2**64:#x} and {first % 2**64:#x}): their batches do not fit together. Use the "
                "same metadata, cost model and versions on every rank."
            )


def counts_of(header: Header) -> Counts:
    """What a rank left out of its window."""
    return Counts(header.dropped, header.skipped, header.truncated)


def window_header(window: Window) -> Header:
    """What this rank says of its window."""
    start, place = window.place.start, window.place
    return Header(
        OK,
        epoch=start.epoch,
        step=start.step,
        consumed=start.consumed_samples,
        first=place.first,
        count=place.count,
        samples=len(window.columns),
        column_bytes=window.columns.packed_bytes,
        schema=window.columns.schema,
        dropped=window.counts.dropped,
        skipped=window.counts.skipped,
        truncated=window.counts.truncated,
        loss_tokens=window.columns.known_loss_tokens(),
    )


def step_loss_tokens(place: Place, headers: dict[int, Header]) -> int | None:
    """Loss tokens of the optimizer step on all ranks, where the window is the step and every rank knows its own."""
    told = [h.loss_tokens for h in headers.values()]
    return sum(told) if place.count == place.total and min(told) >= 0 else None
