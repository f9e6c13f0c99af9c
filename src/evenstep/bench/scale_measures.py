"""Balance over all ranks beside balance inside groups, from few ranks to many: what each takes and brings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np

from evenstep.bench.scale_network import Network
from evenstep.bench.scale_windows import Algorithm, Planned, Step, Window
from evenstep.comm.columns import Columns
from evenstep.comm.header import OK, Header
from evenstep.plan.metrics import imbalance

__all__ = ["ALGORITHMS", "Study"]

ALGORITHMS: tuple[Algorithm, ...] = ("lpt", "refine", "auto")
_HEADER = Header(OK).pack().numel()
_GROWTH = 1.2  # exponent of planning time over the samples of a window, as measured from 1,024 to 4,096 ranks


@dataclass
class Study:
    """Plans of one step, each made once however many jobs they are part of.

    Attributes:
        step: The step of the largest job.
        network: What collectives take.
        step_seconds: Seconds of a perfectly even optimizer step.
        limit: Seconds of a plan that are not waited for: longer ones are extrapolated, without a layout.
        progress: Told what is done next.
    """

    step: Step
    network: Network
    step_seconds: float
    limit: float
    progress: Callable[[str], object] = print
    _plans: dict[tuple[int, Algorithm], list[Planned]] = field(default_factory=dict)
    _merges: dict[int, float] = field(default_factory=dict)

    def planning(self, sizes: Sequence[int]) -> list[dict[str, Any]]:
        """One window over all ranks, by each algorithm: ``{"dp_size", "samples", "bound", "seconds", ...}``.

        An algorithm that would take longer than ``limit`` has ``"extrapolated"`` seconds and no imbalance.
        """
        rows: list[dict[str, Any]] = []
        for size in sorted(sizes):
            window = next(self.step.windows(size, size))
            row: dict[str, Any] = {"dp_size": size, "samples": len(window.tokens), "bound": None}
            row |= {"seconds": {}, "imbalance": {}, "extrapolated": []}
            for algorithm in ALGORITHMS:
                guess = self._guess(rows, row, algorithm)
                row["seconds"][algorithm] = guess
                row["imbalance"][algorithm] = None
                if guess > self.limit:
                    row["extrapolated"].append(algorithm)
                    continue
                planned = self._first(window, algorithm)
                row["seconds"][algorithm] = planned.seconds
                row["imbalance"][algorithm] = imbalance(planned.loads)
                row["bound"] = planned.bound
            rows.append(row)
        return rows

    def _guess(self, rows: list[dict[str, Any]], row: dict[str, Any], algorithm: Algorithm) -> float:
        if not rows:
            return 0.0
        growth = (row["samples"] / rows[-1]["samples"]) ** (1.0 if algorithm == "lpt" else _GROWTH)
        return float(rows[-1]["seconds"][algorithm] * growth)

    def _first(self, window: Window, algorithm: Algorithm) -> Planned:
        key = (window.ranks, algorithm)
        if key not in self._plans:
            self.progress(f"planning {window.ranks:,} ranks by {algorithm}")
            if (
                window.ranks <= 64
            ):  # the first plans of a process are slower, and short ones are disturbed most
                window.plan(algorithm)
            self._plans[key] = [window.plan(algorithm)]
        return self._plans[key][0]

    def groups(self, planning: list[dict[str, Any]], sizes: Sequence[int]) -> list[dict[str, Any]]:
        """For each job of ``planning``, a row for each way to balance it: over all ranks, and in groups of ``sizes``."""
        rows = []
        for job in planning:
            dp_size = job["dp_size"]
            tried: list[Algorithm] = ["auto"] if "auto" not in job["extrapolated"] else []
            ways: list[tuple[int, Algorithm]] = [(dp_size, algorithm) for algorithm in [*tried, "lpt"]]
            ways += [(size, "auto") for size in sorted(sizes, reverse=True) if size < dp_size]
            found = [self._way(dp_size, size, algorithm) for size, algorithm in ways]
            windows = self.step.windows(dp_size, dp_size)
            row = {"dp_size": dp_size, "unbalanced": imbalance(next(windows).reference_loads), "ways": found}
            for best, seconds in (("best", "step_seconds"), ("best_apart", "step_seconds_apart")):
                row[best] = int(np.argmin([way[seconds] for way in found]))
            rows.append(row)
        return rows

    def _way(self, dp_size: int, size: int, algorithm: Algorithm) -> dict[str, Any]:
        first = next(self.step.windows(size, dp_size))
        plans = self._planned(size, dp_size, algorithm)
        columns = first.columns()
        if size not in self._merges:
            self._merges[size] = min(first.merge_seconds(columns) for _ in range(3))
        plan_seconds = median(plan.seconds for plan in plans)
        whole = imbalance(np.concatenate([plan.loads for plan in plans], axis=1))
        talk = self._talk(dp_size, size, columns, first.plan_bytes(), plans)
        data = self._merges[size] + plan_seconds + sum(talk.values())
        sent = np.concatenate([plan.traffic.sent for plan in plans])
        return {
            "group": size,
            "algorithm": algorithm,
            "imbalance": whole,
            "plan_seconds": plan_seconds,
            "merge_seconds": self._merges[size],
            "header_bytes": dp_size * _HEADER,
            "column_bytes": columns[0].packed_bytes,
            "gathered_bytes": _gathered(columns),
            "plan_bytes": first.plan_bytes(),
            "sent_bytes": float(sent.mean()),
            "sent_bytes_most": int(sent.max()),
            "moved_share": float(np.mean([plan.traffic.moved_share for plan in plans])),
            "peers": float(np.mean([plan.traffic.peers for plan in plans])),
            "messages": size - 1,
            "memory_bytes": _gathered(columns)
            + sum(part.packed_bytes for part in columns)
            + first.plan_bytes()
            + dp_size * _HEADER
            + max(plan.traffic.buffers for plan in plans),
            "talk_seconds": talk,
            "data_seconds": data,
            "step_seconds": max(self.step_seconds * whole + plan_seconds, data),
            "step_seconds_apart": max(self.step_seconds * whole, data),
        }

    def _planned(self, size: int, dp_size: int, algorithm: Algorithm) -> list[Planned]:
        """Plans of the groups of ``size`` among the first ``dp_size`` ranks."""
        count = dp_size // size
        for window in self.step.windows(size, size):
            self._first(window, algorithm)
        have = self._plans[size, algorithm]
        if len(have) < count:
            self.progress(f"planning {count:,} groups of {size:,} ranks by {algorithm}")
            later = list(self.step.windows(size, dp_size))[len(have) :]
            have += [window.plan(algorithm) for window in later]
        return have[:count]

    def _talk(
        self, dp_size: int, size: int, columns: list[Columns], plan_bytes: int, plans: list[Planned]
    ) -> dict[str, float]:
        """Seconds of a step's collectives by the model."""
        busiest = np.max([plan.traffic.busiest for plan in plans], axis=0)
        return {
            "headers": self.network.all_gather(dp_size, _HEADER),
            "columns": self.network.all_gather(size, _gathered(columns) // size),
            "plan": self.network.broadcast(size, plan_bytes),
            "exchanges": sum(self.network.all_to_all(size, float(nbytes)) for nbytes in busiest),
        }


def _gathered(columns: list[Columns]) -> int:
    """Bytes of a gather, in which every rank's part has the size of the largest."""
    return len(columns) * max(part.packed_bytes for part in columns)
