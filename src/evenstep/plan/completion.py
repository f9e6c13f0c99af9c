"""The last resort of packing: a search over whole rows for windows that no greedy rule and no repair can pack."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

__all__ = ["complete_rows"]

_WORDS = 50_000_000  # machine words that rows under way may hold and shift: about a second, and 400 MB
_WORDS_EACH = 8  # of a sample in a row's lists, beside its subset sums
_NODES = 20_000  # rows that are tried


def complete_rows(
    tokens: npt.NDArray[np.int64], cap: int, rows: int, nodes: int = _NODES
) -> npt.NDArray[np.int64] | None:
    """Pack samples into ``rows`` rows of ``cap`` tokens by bin completion (Martello and Toth, 1990; Korf, 2002).

    Each row is built around the largest sample left, the fullest completions first. All rows together may leave only so
    many tokens free, so a completion that leaves more is none, and where none is left an earlier row is built anew.

    Args:
        tokens: int64 ``[n]``, each at most ``cap``.
        cap: Tokens of a row.
        rows: Number of rows.
        nodes: Completions that may be tried.

    Returns:
        The row of each sample, int64 ``[n]``, or None if there is no packing, or none was found in time.
    """
    order = np.argsort(-tokens, kind="stable")
    order = order[tokens[order] > 0]
    waste = rows * cap - int(tokens.sum())
    if waste < 0:
        return None
    found = _search(tokens[order].tolist(), cap, rows, waste, nodes)
    if found is None:
        return None
    row = np.zeros(len(tokens), dtype=np.int64)
    for index, places in enumerate(found):
        row[order[places]] = index
    return row


def _search(sizes: list[int], cap: int, rows: int, waste: int, nodes: int) -> list[list[int]] | None:
    """Places in ``sizes`` (descending) of each row; an explicit stack, as windows have more rows than Python frames."""
    words = _WORDS
    left = list(range(len(sizes)))
    # What is left before each row, the tokens that may stay free, and the completions that were not tried yet.
    stack: list[tuple[list[int], int, Iterator[list[int]]]] = []
    chosen: list[list[int]] = []
    while left:
        assert len(stack) < rows, "completed rows leave no more than may stay free"
        words -= len(left) * (_WORDS_EACH + cap // 64)
        if words < 0:
            return None
        inside = [sizes[place] for place in left]
        stack.append((left, waste, _completions(inside, cap, waste)))
        while stack:
            left, waste, completions = stack[-1]
            del chosen[len(stack) - 1 :]
            members = next(completions, None)
            if members is not None:
                break
            stack.pop()
        else:
            return None
        nodes -= 1
        if nodes < 0:
            return None
        taken = set(members)
        chosen.append([left[at] for at in members])
        waste -= cap - sum(sizes[place] for place in chosen[-1])
        left = [place for at, place in enumerate(left) if at not in taken]
    return chosen


def _completions(sizes: list[int], cap: int, waste: int) -> Iterator[list[int]]:
    """Rows around the first of ``sizes`` (descending) that leave at most ``waste`` tokens, the fullest first."""
    room = cap - sizes[0]
    mask = (1 << (room + 1)) - 1
    # Bit t of reachable[i] is set if some of the samples from i on sum to t tokens.
    reachable = [1]
    for size in reversed(sizes[1:]):
        last = reachable[-1]
        reachable.append(last | (last << size & mask if size <= room else 0))
    reachable.append(0)
    reachable.reverse()
    sums = reachable[1]
    while sums:
        target = sums.bit_length() - 1
        if room - target > waste:
            return
        sums ^= 1 << target
        yield from _subsets(sizes, reachable, target)


def _subsets(sizes: list[int], reachable: list[int], target: int) -> Iterator[list[int]]:
    """The first sample and others that sum to ``target``, large samples first; of equal samples the first ones."""
    stack = [(1, target, [0])]
    while stack:
        at, missing, members = stack.pop()
        if not missing:
            yield members
            continue
        size = sizes[at]
        after = at + 1
        while after < len(sizes) and sizes[after] == size:
            after += 1
        if reachable[after] >> missing & 1:
            stack.append((after, missing, members))
        if size <= missing and reachable[at + 1] >> (missing - size) & 1:
            stack.append((at + 1, missing - size, [*members, at]))
