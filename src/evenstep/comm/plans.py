"""One plan for a whole balance group: sent by its planner, or made everywhere and compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from evenstep.comm.communicator import Communicator
from evenstep.comm.remote_errors import describe_error, remote_error
from evenstep.errors import ConfigMismatch
from evenstep.plan import Plan

__all__ = ["SharedPlan", "compare_plan", "send_plan"]

_PLANNED, _FAILED = 1, 2
_HEAD = 4  # int64 words: what follows, micro-batches, digest, bytes of error text
_LEAST = 4096  # bytes behind the head, so that an error text fits


@dataclass(frozen=True, slots=True)
class SharedPlan:
    """A plan as every rank of a group knows it.

    Attributes:
        assignment: Flat row of each sample, int32 ``[n]``.
        micro_batches: Micro-batches of the window.
        digest: Digest of the plan.
        plan: The plan with loads and decision; None where it was only received.
    """

    assignment: npt.NDArray[np.int32]
    micro_batches: int
    digest: int
    plan: Plan | None

    @classmethod
    def of(cls, plan: Plan) -> SharedPlan:
        """What the others may know of ``plan``."""
        return cls(plan.assignment, plan.micro_batches, plan.digest, plan)


def send_plan(group: Communicator, planner: int, make: Callable[[], Plan], samples: int) -> SharedPlan:
    """Broadcast the plan that the rank at position ``planner`` makes of ``samples`` samples.

    Raises:
        RemoteRankError: It could not; on every rank (the planner's own error is its ``__cause__``).
    """
    buffer = np.zeros(8 * _HEAD + max(4 * samples, _LEAST), dtype=np.uint8)
    head, body = buffer[: 8 * _HEAD].view(np.int64), buffer[8 * _HEAD :]
    plan: Plan | None = None
    failure: Exception | None = None
    if group.position == planner:
        try:
            plan = make()
            head[:3] = _PLANNED, plan.micro_batches, np.uint64(plan.digest).astype(np.int64)
            body[: 4 * samples] = plan.assignment.view(np.uint8)
        except Exception as error:
            failure = error
            text = describe_error(error, group.ranks[planner])
            head[:] = _FAILED, 0, 0, len(text)
            body[: len(text)] = np.frombuffer(text, dtype=np.uint8)
    group.broadcast(torch.from_numpy(buffer), planner)
    if head[0] != _PLANNED:
        raise remote_error(body[: int(head[3])].tobytes(), group.ranks[planner]) from failure
    if plan is not None:
        return SharedPlan.of(plan)
    digest = int(head[2].astype(np.uint64))
    return SharedPlan(body[: 4 * samples].view(np.int32), int(head[1]), digest, None)


def compare_plan(group: Communicator, make: Callable[[], Plan]) -> SharedPlan:
    """Make the plan on every rank and compare digests before anything is exchanged by it.

    Raises:
        RemoteRankError: A rank could not plan; on every rank.
        ConfigMismatch: Two ranks planned differently.
    """
    plan: Plan | None = None
    failure: Exception | None = None
    text = b""
    try:
        plan = make()
    except Exception as error:
        failure, text = error, describe_error(error, group.ranks[group.position])
    row = np.zeros(16 + _LEAST, dtype=np.uint8)
    row[:8] = np.array([0 if plan is None else plan.digest], dtype=np.uint64).view(np.uint8)
    row[8:16] = np.array([len(text)], dtype=np.int64).view(np.uint8)
    row[16 : 16 + len(text)] = np.frombuffer(text, dtype=np.uint8)
    rows = group.all_gather(torch.from_numpy(row)).numpy()
    lengths = np.ascontiguousarray(rows[:, 8:16]).view(np.int64).ravel()
    if lengths.any():
        first = int(np.argmax(lengths > 0))
        text = rows[first, 16 : 16 + int(lengths[first])].tobytes()
        raise remote_error(text, group.ranks[first]) from failure
    digests = np.ascontiguousarray(rows[:, :8]).view(np.uint64).ravel()
    odd = np.flatnonzero(digests != digests[0])
    if len(odd):
        raise ConfigMismatch(
            f"rank {group.ranks[int(odd[0])]} planned differently from rank {group.ranks[0]} (digests "
            f"{int(digests[odd[0]]):#x} and {int(digests[0]):#x}): their exchanges would not fit together. Use the "
            "same cost model and configuration on every rank, or broadcast_plan=True."
        )
    assert plan is not None
    return SharedPlan.of(plan)
