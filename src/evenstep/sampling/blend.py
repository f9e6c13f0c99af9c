"""Weighted round-robin with random access: which stream a position takes from, and how often before."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

__all__ = ["Blend"]

_I64 = npt.NDArray[np.int64]
_U64 = npt.NDArray[np.uint64]
_32 = np.uint64(32)
_LOW = np.uint64((1 << 32) - 1)


@dataclass(frozen=True, slots=True)
class _Fork:
    left: _Fork | int
    right: _Fork | int
    share: np.uint64  # of the positions that go left, in units of 2**-64


class Blend:
    """A deterministic sequence of stream numbers in given proportions.

    A position goes down a Huffman tree of the streams. At a fork with share ``w`` to the left, the first
    ``p`` positions send ``round(p * w)`` left, so the next fork again sees a gapless count: each lookup costs
    O(log streams) for streams of like weight and no memory. After ``p`` positions a stream of weight ``w``
    was taken ``p * w`` times, give or take less than 2, whatever ``p`` and the number of streams: a fork adds
    at most 1/2 and hands down its share of the error above, and in a Huffman tree two shares below each other
    multiply to at most 1/2.

    Args:
        weights: One positive exact weight per stream, on any scale.
    """

    def __init__(self, weights: Sequence[Fraction]) -> None:
        self.num_streams: int = len(weights)
        heap: list[tuple[Fraction, int, _Fork | int]] = [(w, i, i) for i, w in enumerate(weights)]
        heapq.heapify(heap)
        for number in range(len(weights), 2 * len(weights) - 1):
            left, _, a = heapq.heappop(heap)
            right, _, b = heapq.heappop(heap)
            share = np.uint64(round(left / (left + right) * 2**64))  # left <= right: at most one half
            heapq.heappush(heap, (left + right, number, _Fork(a, b, share)))
        self._root = heap[0][2]

    def __call__(self, positions: _I64) -> tuple[_I64, _I64]:
        """Streams at ``positions`` (int64 ``[n]``, >= 0), and how often each was taken before.

        Returns:
            ``(streams, counts)``, int64 ``[n]`` each.
        """
        streams = np.zeros(len(positions), dtype=np.int64)
        counts = positions.astype(np.int64)
        pending: list[tuple[_Fork | int, _I64]] = [(self._root, np.arange(len(positions)))]
        while pending:
            node, where = pending.pop()
            if isinstance(node, int):
                streams[where] = node
                continue
            reached = counts[where].view(np.uint64)
            before = _rounded_share(reached, node.share)
            goes_left = _rounded_share(reached + np.uint64(1), node.share) > before
            counts[where] = np.where(goes_left, before, reached - before).view(np.int64)
            pending += [
                (child, part)
                for child, part in ((node.left, where[goes_left]), (node.right, where[~goes_left]))
                if len(part)
            ]
        return streams, counts


def _rounded_share(count: _U64, share: np.uint64) -> _U64:
    """``round(count * share / 2**64)``, exact: the 128-bit product from four 64-bit ones."""
    high, low = count >> _32, count & _LOW
    share_high, share_low = share >> _32, share & _LOW
    cross_1, cross_2 = high * share_low, low * share_high
    middle = ((low * share_low) >> _32) + (cross_1 & _LOW) + (cross_2 & _LOW)
    whole = high * share_high + (cross_1 >> _32) + (cross_2 >> _32) + (middle >> _32)
    half: _U64 = whole + ((middle >> np.uint64(31)) & np.uint64(1))
    return half
