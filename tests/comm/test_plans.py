"""Every rank of a group has the same plan, or every rank has the same error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from evenstep.comm.communicator import Communicator
from evenstep.comm.plane import DataPlane
from evenstep.comm.plans import SharedPlan, compare_plan, send_plan
from evenstep.errors import ConfigMismatch, Infeasible, RemoteRankError
from evenstep.plan import PackingConstraints, Plan, plan_window
from evenstep.testing import SimulatedWorld, windows

Share = Callable[[Communicator, Callable[[], Plan], int], SharedPlan]


def sent(group: Communicator, make: Callable[[], Plan], samples: int) -> SharedPlan:
    return send_plan(group, 1, make, samples)


def compared(group: Communicator, make: Callable[[], Plan], samples: int) -> SharedPlan:
    return compare_plan(group, make)


def share_on(ranks: int, share: Share, make: Callable[[int], Plan], samples: int) -> list[Any]:
    def work(plane: DataPlane) -> SharedPlan:
        assert plane.balance is not None
        return share(plane.balance, lambda: make(plane.topology.rank), samples)

    return SimulatedWorld(ranks, timeout=10).outcomes(work)


@pytest.mark.parametrize("share", [sent, compared])
@settings(max_examples=15)
@given(window=windows())
def test_all_ranks_have_the_plan(share: Share, window: dict[str, Any]) -> None:
    plan = plan_window(**window)
    outcomes = share_on(3, share, lambda _: plan_window(**window), len(window["tokens"]))
    for rank, shared in enumerate(outcomes):
        np.testing.assert_array_equal(shared.assignment, plan.assignment)
        assert shared.assignment.dtype == np.int32
        assert (shared.digest, shared.micro_batches) == (plan.digest, plan.micro_batches)
        assert (shared.plan is None) == (share is sent and rank != 1)


def small(shift: int = 0) -> Plan:
    lengths = np.array([3, 5, 2, 7], dtype=np.int64)
    return plan_window(
        lengths,
        lengths.astype(float),
        dp_size=2,
        micro_batches=2,
        rows=1,
        reference=np.roll(np.arange(4, dtype=np.int32), shift),
        constraints=PackingConstraints(16),
        min_gain=0.99,  # the reference stays
    )


@pytest.mark.parametrize("share", [sent, compared])
def test_a_planner_that_fails_is_heard_everywhere(share: Share) -> None:
    def make(rank: int) -> Plan:
        if rank == 1:
            raise Infeasible("sample 3 fits nowhere")
        return small()

    outcomes = share_on(3, share, make, 4)
    for rank, error in enumerate(outcomes):
        assert isinstance(error, RemoteRankError)
        assert str(error) == (
            "rank 1 failed: Infeasible: sample 3 fits nowhere (every rank stops here; the traceback is on rank 1)"
        )
        assert isinstance(error.__cause__, Infeasible) == (rank == 1)


def test_the_largest_error_text_fits() -> None:
    def make(rank: int) -> Plan:
        raise ValueError("é" * 100_000)

    for error in share_on(2, sent, make, 1):
        assert isinstance(error, RemoteRankError)
        assert error.error_message.startswith("é" * 100)
        assert error.error_message.endswith("[...]")


def test_ranks_that_plan_differently_stop_before_anything_moves() -> None:
    outcomes = share_on(3, compared, lambda rank: small(rank // 2), 4)
    ours, theirs = small(0).digest, small(1).digest
    for error in outcomes:
        assert isinstance(error, ConfigMismatch)
        assert str(error) == (
            f"rank 2 planned differently from rank 0 (digests {theirs:#x} and {ours:#x}): their exchanges would not "
            "fit together. Use the same cost model and configuration on every rank, or broadcast_plan=True."
        )
