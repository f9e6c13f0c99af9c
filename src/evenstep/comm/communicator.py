"""What evenstep asks of a group of ranks: three collectives on bytes, each of which ends or raises."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch

if TYPE_CHECKING:
    from evenstep.comm.shared_memory import SharedMemory

__all__ = ["INHERITED", "Abandoned", "Communicator", "Launcher", "SoloCommunicator", "launch_here"]

# Called with the name of a collective and what starts it without waiting; returns what that returns.
Launcher: TypeAlias = Callable[[str, Callable[[], Any]], Any]


def launch_here(name: str, start: Callable[[], Any]) -> Any:
    """Start a collective in the thread that asks for it."""
    del name
    return start()


# Why a forked child gets `Abandoned`: it has its parent's connections, and some of its memory.
INHERITED = (
    "this process is a forked child: the connections of its loader belong to its parent, so it may not use it"
)


class Abandoned(RuntimeError):  # noqa: N818 - not a fault: this rank itself gave up waiting
    """This rank stopped waiting inside a collective because it is shutting down."""


class Communicator(Protocol):
    """A group of ranks that call the same collectives in the same order, from one thread at a time.

    All buffers are 1-d contiguous uint8 CPU tensors. A collective that cannot finish (a dead peer, the
    timeout, a local shutdown) raises, and every later call raises the same error: nobody waits for ever.

    Attributes:
        ranks: Global rank at each position of the group.
        position: This rank's position.
        device: Where the group's backend wants its tensors; `broadcast` also takes a buffer that lies there.
        launcher: How a collective is started, for backends that want it done by one thread and awaited by another.
        memory: What the ranks share if all are on one host, for who fills send buffers; None: nothing.
    """

    ranks: tuple[int, ...]
    position: int
    device: torch.device
    launcher: Launcher
    memory: SharedMemory | None

    def all_gather(self, row: torch.Tensor) -> torch.Tensor:
        """Gather ``row`` (uint8 ``[n]``, the same ``n`` everywhere) as uint8 ``[size, n]`` by position."""

    def broadcast(self, buffer: torch.Tensor, source: int) -> None:
        """Fill ``buffer`` (uint8 ``[n]``, the same ``n`` everywhere) with position ``source``'s."""

    def broadcast_all(self, buffers: Iterable[torch.Tensor | None], source: int) -> None:
        """`broadcast` of each of ``buffers``, several of them on their way at once.

        The next buffer is asked for while those before it travel: ``source`` may fill it then. None is no buffer, but
        waits for the first of those on their way to arrive. All have arrived when this returns.
        """

    def all_to_all(
        self,
        send: torch.Tensor,
        send_splits: list[int],
        receive: torch.Tensor,
        receive_splits: list[int],
    ) -> None:
        """Send ``send_splits[p]`` bytes to each position and receive ``receive_splits[p]`` from it.

        Both sides derive the splits from the same plan: nothing is negotiated here.
        """

    def share_memory(self) -> None:
        """From now on large bytes go through memory, if all ranks are on one host; all of them call it together."""

    def abandon(self) -> None:
        """Stop waiting, now and in every later call: from another thread, at shutdown."""


class SoloCommunicator:
    """A group of one: collectives are copies."""

    def __init__(self, rank: int = 0) -> None:
        self.ranks: tuple[int, ...] = (rank,)
        self.position = 0
        self.device: torch.device = torch.device("cpu")
        self.launcher: Launcher = launch_here
        self.memory: SharedMemory | None = None

    def all_gather(self, row: torch.Tensor) -> torch.Tensor:
        """The row itself."""
        return row.clone().unsqueeze(0)

    def broadcast(self, buffer: torch.Tensor, source: int) -> None:
        """Nothing to do."""

    def broadcast_all(self, buffers: Iterable[torch.Tensor | None], source: int) -> None:
        """Nothing to do."""

    def all_to_all(
        self,
        send: torch.Tensor,
        send_splits: list[int],
        receive: torch.Tensor,
        receive_splits: list[int],
    ) -> None:
        """Copy what this rank sends itself."""
        assert send_splits == receive_splits
        receive.copy_(send)

    def share_memory(self) -> None:
        """There is nobody to share with."""

    def abandon(self) -> None:
        """Nothing waits."""
