"""Plans each window and hands out its micro-batches."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from torchdata.nodes import BaseNode

from evenstep.comm.columns import Columns
from evenstep.comm.plane import DataPlane
from evenstep.comm.plans import SharedPlan, compare_plan, send_plan
from evenstep.config import LoaderConfig
from evenstep.cursor import next_epoch_state
from evenstep.nodes.balance import Balance
from evenstep.nodes.items import GatheredWindow, Place, PlannedBatch
from evenstep.nodes.known_windows import KnownWindows
from evenstep.nodes.metadata_gather import MetadataGather
from evenstep.nodes.stage import Stage, call, configured, upstream
from evenstep.nodes.turn import Turn
from evenstep.plan import Plan, plan_window, reference_layout

__all__ = ["Planner"]

_KEPT_PLANS = 64  # besides those in flight, for whoever asks how balanced the last batches were
_SOME_PLAN = 1  # stands for the digest where balance groups have plans of their own


class Planner(Stage[Any, PlannedBatch]):
    """One window in, its micro-batches out; equal on every rank of a balance group.

    Args:
        source: Gathered windows; or windows whose metadata is known ahead, for which it posts the status header.
        plane: The data plane.
        config: Constraints, objective, algorithm and gate; default: that of the nearest node upstream.

    Attributes:
        balances: The last windows planned on this rank, oldest first; empty where plans are only received.
        followed: Whether somebody calls `balance_before` after every batch: then no balance is forgotten before its turn,
            however far ahead of the training loop windows are planned.
    """

    shown_as = "plan"

    def __init__(self, source: BaseNode[Any], plane: DataPlane, config: LoaderConfig | None = None) -> None:
        super().__init__(source)
        config = configured(config, source)
        self.plane = plane
        self._turn = Turn(plane.rounds)
        self.balances: deque[Balance] = deque()
        self.followed: bool = False
        self._kept = _KEPT_PLANS + (config.host_prefetch or 0) + config.device_prefetch
        self._config = config
        gathered = any(isinstance(node, MetadataGather) for node in upstream(source))
        self._known = None if gathered else KnownWindows(source, plane, config, self._share)
        self._pending: deque[PlannedBatch] = deque()
        self._state: dict[str, Any] | None = None

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        """Go to ``initial_state``, or to the epoch after the last micro-batch handed out; its source is ahead of it."""
        with self._turn.reset():
            if initial_state is None and self._state is not None:
                initial_state = next_epoch_state(self._state)
            super().reset(initial_state)

    def clear(self) -> None:
        """Forget the window under way."""
        self._pending.clear()
        self.balances.clear()
        self._state = None
        if self._known is not None:
            self._known.clear()

    def get_state(self) -> dict[str, Any]:
        """The cursor after the last micro-batch handed out."""
        if self._state is None:
            state: dict[str, Any] = self.source.state_dict()
            return state
        return dict(self._state)

    def balance_before(self, cursor: Mapping[str, Any]) -> Balance | None:
        """Balance of the window whose batch was the last before ``cursor``; None if it is not kept here."""
        step, micro_batch = cursor["step"], cursor["micro_batch"]
        last = (step, micro_batch - 1) if micro_batch else (step - 1, float("inf"))
        before = (b for b in reversed(list(self.balances)) if (b.step, b.micro_batch) <= last)
        found = next(before, None)
        if self.followed and found is not None:
            while len(self.balances) > _KEPT_PLANS and self.balances[0] is not found:
                self.balances.popleft()
        return found if found is not None and found.step == last[0] else None

    def produce(self) -> PlannedBatch:
        """The next micro-batch."""
        while not self._pending:
            self._pending.extend(self._plan_next())
        batch = self._pending.popleft()
        self._state = batch.window.place.after(batch.micro_batch + 1, batch.digest)
        return batch

    def following(self) -> PlannedBatch | None:
        """The first micro-batch of the next window, for who begins to read it while this one is used.

        Nobody else hears of it before its turn, so that its header tells all that has gone wrong until then. None
        where the next plan is not this rank's alone to make, and at the end of the stream.
        """
        if self._known is None or self._state is None:
            return None
        planned = self._known.peek()
        if planned is None:
            return None
        window, shared = planned
        window = replace(window, place=_resolved(window.place, shared))
        return PlannedBatch(window, shared.assignment, 0, self._told_digest(shared))

    def _told_digest(self, shared: SharedPlan) -> int:
        topology = self.plane.topology
        return shared.digest if topology.dp_size == topology.balance_group_size else _SOME_PLAN

    def _plan_next(self) -> list[PlannedBatch]:
        if self._known is None:
            window: GatheredWindow = next(self.source)
            shared = call("planning", self._share, window)
        else:
            window, shared = self._known.announced()
        place, digest, count = window.place, self._told_digest(shared), shared.micro_batches
        if place.skip and (digest != place.plan or place.skip >= count):
            return self._begin_again(place)
        resolved = _resolved(place, shared)
        if shared.plan is not None:
            reference, _ = self._reference(window)
            holders = None if window.holders is None else self._holders(window)
            seq_len, counts = self._config.seq_len, window.counts
            self.balances.append(
                Balance(resolved, window.columns, reference, holders, shared.plan, seq_len, counts)
            )
            if not self.followed and len(self.balances) > self._kept:
                self.balances.popleft()
        window = replace(window, place=resolved)
        return [PlannedBatch(window, shared.assignment, m, digest) for m in range(place.skip, count)]

    def _begin_again(self, place: Place) -> list[PlannedBatch]:
        """The plan under which micro-batches were delivered is not the one made now: none can be skipped."""
        warnings.warn(
            f"the state stands after micro-batch {place.first + place.skip} of step {place.start.step}, but its window "
            "is planned differently now (cost model, algorithm, gate, capacity or metadata changed); the step starts "
            "again",
            stacklevel=2,
        )
        self.source.reset(place.begin())
        return []

    def _share(self, window: GatheredWindow) -> SharedPlan:
        group = self.plane.balance
        assert group is not None

        def make() -> Plan:
            return self._plan(window)

        if len(group.ranks) == 1 or self._known is not None:  # where all know everything, nothing is sent
            return SharedPlan.of(make())
        if not self._config.broadcast_plan:
            return compare_plan(group, make)
        planner = group.ranks.index(self.plane.topology.planner)
        return send_plan(group, planner, make, len(window.columns))

    def _plan(self, window: GatheredWindow) -> Plan:
        config, columns = self._config, window.columns
        constraints, dp_size = config.constraints(), self.plane.topology.balance_group_size
        features = {name: columns.feature(name) for name in columns.names}
        reference, micro_batches = self._reference(window)
        keep = config.algorithm == "reference"
        return plan_window(
            columns.tokens,
            columns.costs,
            dp_size=dp_size,
            micro_batches=micro_batches if keep or window.place.count else None,
            rows=config.micro_batch_size,
            reference=reference,
            constraints=constraints,
            objective=config.objective,
            algorithm="lpt" if config.algorithm == "reference" else config.algorithm,
            min_gain=1.0 if keep else config.min_balance_gain,
            features=features,
            holders=self._holders(window),
            payload_bytes=_telling_bytes(columns),
        )

    def _reference(self, window: GatheredWindow) -> tuple[npt.NDArray[np.int32], int]:
        """Where the sampler put each sample, and in how many micro-batches."""
        columns = window.columns
        if window.place.count:
            return columns.rows, window.place.count
        return reference_layout(
            columns.tokens,
            dp_size=self.plane.topology.balance_group_size,
            rows=self._config.micro_batch_size,
            constraints=self._config.constraints(),
            features={name: columns.feature(name) for name in columns.names},
        )

    def _holders(self, window: GatheredWindow) -> npt.NDArray[np.int32]:
        """Dp rank, counted inside the balance group, that holds each sample."""
        group, topology = self.plane.balance, self.plane.topology
        if window.owners is not None:
            # Nobody holds anything, but the plan is the one that would be made if the samples had been read.
            return window.owners - np.int32(topology.group_start)
        assert window.holders is not None, "what nobody was assigned was read"
        assert group is not None
        dp_of = {rank: d for d, replica in enumerate(topology.replicas) for rank in replica}
        by_position = np.array([dp_of[rank] - topology.group_start for rank in group.ranks], dtype=np.int32)
        return by_position[window.holders]


def _resolved(place: Place, shared: SharedPlan) -> Place:
    """``place`` once the plan tells how many micro-batches there are."""
    count = shared.micro_batches
    return replace(place, count=count, total=place.total or count, skip=0, plan=0)


def _telling_bytes(columns: Columns) -> npt.NDArray[np.int64] | None:
    """Encoded sizes where they tell more than tokens do; None where they grow by the token.

    Then a graph that knows only tokens makes the same plan.
    """
    tokens, nbytes = columns.tokens, columns.nbytes
    if not nbytes.any():
        return None
    low, high = int(tokens.argmin()), int(tokens.argmax())
    span = int(tokens[high] - tokens[low])
    affine = (nbytes - nbytes[low]) * span == (tokens - tokens[low]) * (nbytes[high] - nbytes[low])
    return None if affine.all() and (span or int(np.ptp(nbytes)) == 0) else nbytes
