"""In which order an epoch goes through the samples: sequential, shuffled or the user's own."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from evenstep.sampling.hashing import stream_digest
from evenstep.sampling.permutation import KeyedPermutation
from evenstep.shown import shown

__all__ = ["Order", "SequentialOrder", "ShuffledOrder"]


@runtime_checkable
class Order(Protocol):
    """A sequence of dataset indices per epoch, with random access.

    An ``identity`` attribute (a string, a number, a tuple of them), if there is one, goes into the
    cursor's ``stream`` digest: a state saved under another identity is refused.
    """

    def index_at(self, epoch: int, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Dataset indices (int64 ``[n]``, each >= 0) at ``positions`` (int64 ``[n]``) of ``epoch``."""


class SequentialOrder:
    """Position i is sample i, in every epoch."""

    def index_at(self, epoch: int, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:  # noqa: ARG002 - the same in every epoch
        """The positions themselves."""
        return positions


class ShuffledOrder:
    """A new keyed permutation in each epoch, in O(1) memory.

    Args:
        size: Number of samples.
        seed: Seed of the permutations.
    """

    def __init__(self, size: int, seed: int) -> None:
        self.size = size
        self.seed = seed
        self._current: tuple[int, KeyedPermutation] | None = None

    def index_at(self, epoch: int, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The samples at ``positions`` of the permutation of ``epoch``."""
        current = self._current
        if current is None or current[0] != epoch:
            current = self._current = (epoch, KeyedPermutation(self.size, (self.seed, epoch)))
        return current[1](positions)


def resolve_order(order: str | Order, size: int, seed: int) -> tuple[str, Order]:
    """The name that a cursor keeps of ``order``, and the order itself."""
    if order == "sequential":
        return "sequential", SequentialOrder()
    if order == "shuffled":
        return "shuffled", ShuffledOrder(size, seed)
    if isinstance(order, str):
        raise ValueError(f"order is {order!r}: expected 'sequential', 'shuffled' or an object with index_at")
    if not callable(getattr(order, "index_at", None)):
        raise TypeError(
            f"order is a {type(order).__name__}: expected 'sequential', 'shuffled' or an object with "
            "index_at(epoch, positions) -> indices; a torch Sampler goes through TorchSamplerAdapter"
        )
    return "custom", order


def order_digest(order: Order) -> int:
    """The cursor's ``stream`` of a custom order: a digest of its ``identity``, or 0 without one."""
    identity: Any = getattr(order, "identity", None)
    return 0 if identity is None else stream_digest("order", identity)


def checked_indices(order: Order, epoch: int, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """What a custom order gives at ``positions``, refused unless it is one index >= 0 per position."""
    indices = np.asarray(order.index_at(epoch, positions))
    name = type(order).__name__
    if indices.shape != positions.shape or indices.dtype.kind not in "iu":
        raise ValueError(
            f"{name}.index_at gave {indices.dtype} {list(indices.shape)} for {len(positions)} positions of "
            f"epoch {epoch}: expected one integer per position"
        )
    if len(indices) and indices.min() < 0:
        at = int(np.argmin(indices))
        raise ValueError(
            f"{name}.index_at gave index {int(indices[at])} for position {int(positions[at])} of epoch {epoch}: "
            "a dataset index is >= 0 (-1 is reserved for padding)"
        )
    return indices.astype(np.int64, copy=False)


def check_count(name: str, value: int, unit: str) -> None:
    """Refuse what is no positive integer."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        is_dataset = hasattr(value, "__getitem__") and not isinstance(value, str)
        remedy = "; of a dataset pass len(dataset)" if is_dataset else ""
        raise TypeError(
            f"{name} must be an integer, the number of {unit}, but is {shown(value)} ({type(value).__name__}){remedy}"
        )
    if value < 1:
        raise ValueError(f"{name} is {value}: expected 1 or more {unit}")


def check_seed(seed: int) -> None:
    """Refuse what does not fit into the cursor's seed."""
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
        raise TypeError(f"seed is {shown(seed)} ({type(seed).__name__}): expected an integer in [0, 2**64)")
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"seed is {seed}: expected an integer in [0, 2**64)")


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Refuse what is none of ``choices``."""
    if value not in choices:
        raise ValueError(f"{name} is {value!r}: expected one of {', '.join(map(repr, choices))}")
