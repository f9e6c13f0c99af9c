"""Other ways to put samples into rows, for comparison: own clean-room versions, and libraries where installed."""

from __future__ import annotations

import heapq
import importlib
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["PACKERS", "PEERS", "heap_lpt", "karmarkar_karp", "optional_peers"]

Int = npt.NDArray[np.int64]
Peer = Callable[[Int, Int, int, int], Int]  # (tokens, costs, rows, seq_len) -> row of each sample


def heap_lpt(tokens: Int, costs: Int, rows: int, seq_len: int) -> Int:  # noqa: ARG001 - it knows no limit
    """Longest first onto the least-loaded row, bare: no limit, no checks."""
    heap = [(0, row) for row in range(rows)]
    row_of = [0] * len(costs)
    costs_list = costs.tolist()
    for sample in np.argsort(-costs, kind="stable").tolist():
        load, row = heap[0]
        row_of[sample] = row
        heapq.heapreplace(heap, (load + costs_list[sample], row))
    return np.array(row_of, dtype=np.int64)


def karmarkar_karp(tokens: Int, costs: Int, rows: int, seq_len: int) -> Int:  # noqa: ARG001 - it knows no limit
    """The largest differencing method for ``rows`` subsets (Karmarkar and Karp, 1982), no limit.

    A partial solution is its subset sums in descending order, and the subsets as trees of samples. The two
    solutions of the widest spread are joined, the largest subset of one with the smallest of the other.
    """
    heap: list[tuple[int, int, list[int], list[Any]]] = []
    for sample, cost in enumerate(costs.tolist()):
        heap.append((-cost, sample, [cost] + [0] * (rows - 1), [sample] + [None] * (rows - 1)))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, order, sums, trees = heapq.heappop(heap)
        _, _, other_sums, other_trees = heapq.heappop(heap)
        joined = [
            (a + b, (x, y) if x is not None and y is not None else (y if x is None else x))
            for a, b, x, y in zip(sums, reversed(other_sums), trees, reversed(other_trees), strict=True)
        ]
        joined.sort(key=lambda subset: -subset[0])
        new_sums = [total for total, _ in joined]
        heapq.heappush(heap, (new_sums[-1] - new_sums[0], order, new_sums, [tree for _, tree in joined]))
    row_of = np.zeros(len(costs), dtype=np.int64)
    for row, tree in enumerate(heap[0][3] if heap else []):
        stack = [] if tree is None else [tree]
        while stack:
            node = stack.pop()
            if isinstance(node, tuple):
                stack += node
            else:
                row_of[node] = row
    return row_of


def first_fit_decreasing(tokens: Int, costs: Int, rows: int, seq_len: int) -> Int:  # noqa: ARG001 - tokens only
    """The packer of most data sets: longest first into the first row with room; it may need more rows."""
    free = np.full(max(rows, len(tokens)), seq_len, dtype=np.int64)
    row_of = np.zeros(len(tokens), dtype=np.int64)
    for sample in np.argsort(-tokens, kind="stable").tolist():
        row = int((free >= tokens[sample]).argmax())
        free[row] -= tokens[sample]
        row_of[sample] = row
    return row_of


def next_fit(tokens: Int, costs: Int, rows: int, seq_len: int) -> Int:  # noqa: ARG001 - tokens only
    """Samples in their order, a new row when one is full; it may need more rows."""
    row_of, row, used = np.zeros(len(tokens), dtype=np.int64), 0, 0
    for sample, need in enumerate(tokens.tolist()):
        if used + need > seq_len:
            row, used = row + 1, 0
        used += need
        row_of[sample] = row
    return row_of


PEERS: dict[str, Peer] = {
    "heap LPT": heap_lpt,
    "Karmarkar-Karp": karmarkar_karp,
    "first-fit decreasing": first_fit_decreasing,
    "next-fit": next_fit,
}

# They fill rows up to the limit, so without one there is nothing to compare.
PACKERS = frozenset({"first-fit decreasing", "next-fit", "TRL best-fit decreasing", "Grain first-fit"})


def optional_peers() -> tuple[dict[str, Peer], dict[str, str]]:
    """Planners and packers of other libraries that are installed here, and why an installed one cannot be used."""
    found: dict[str, Peer] = {}
    failed: dict[str, str] = {}
    for name, module, adapt in (
        ("verl Karmarkar-Karp", "verl.utils.seqlen_balancing", _verl),
        ("binpacking", "binpacking", _binpacking),
        ("TRL best-fit decreasing", "trl.data_utils", _trl),
        ("Grain first-fit", "grain.experimental", _grain),
    ):
        package = module.partition(".")[0]
        if importlib.util.find_spec(package) is None:
            continue
        try:
            if package == "verl":
                _without_init(package)
            found[name] = adapt(importlib.import_module(module))
        except Exception as error:  # another library's failure is a result, too
            failed[name] = f"{type(error).__name__}: {error}"
    return found, failed


def _without_init(package: str) -> None:
    """Let modules of ``package`` be imported without its ``__init__``, which may start all of a trainer."""
    spec = importlib.util.find_spec(package)
    if package not in sys.modules and spec is not None:
        stand_in = ModuleType(package)
        stand_in.__path__ = list(spec.submodule_search_locations or ())
        sys.modules[package] = stand_in


def _subsets(subsets: Any, size: int) -> Int:
    row_of = np.zeros(size, dtype=np.int64)
    for row, members in enumerate(subsets):
        row_of[np.asarray(list(members), dtype=np.int64)] = row
    return row_of


def _verl(module: Any) -> Peer:
    def plan(tokens: Int, costs: Int, rows: int, seq_len: int) -> Int:  # noqa: ARG001 - it knows no limit
        return _subsets(module.karmarkar_karp(costs.tolist(), rows, equal_size=False), len(tokens))

    return plan


def _binpacking(module: Any) -> Peer:
    def plan(tokens: Int, costs: Int, rows: int, seq_len: int) -> Int:  # noqa: ARG001 - it knows no limit
        bins = module.to_constant_bin_number(dict(enumerate(costs.tolist())), rows)
        return _subsets(bins, len(tokens))

    return plan


def _trl(module: Any) -> Peer:
    datasets, pack = importlib.import_module("datasets"), module.pack_dataset
    datasets.disable_progress_bars()

    def plan(tokens: Int, costs: Int, rows: int, seq_len: int) -> Int:  # noqa: ARG001 - tokens only
        ids = [[sample] * int(need) for sample, need in enumerate(tokens)]
        packed = pack(datasets.Dataset.from_dict({"input_ids": ids}), seq_len, strategy="bfd")
        return _subsets([set(row) for row in packed["input_ids"]], len(tokens))

    return plan


def _grain(module: Any) -> Peer:
    grain = importlib.import_module("grain")

    def plan(tokens: Int, costs: Int, rows: int, seq_len: int) -> Int:  # noqa: ARG001 - tokens only
        source = [{"ids": np.full(int(need), sample + 1)} for sample, need in enumerate(tokens)]
        dataset = grain.MapDataset.source(source).to_iter_dataset()
        packed = module.FirstFitPackIterDataset(
            dataset, length_struct={"ids": seq_len}, num_packing_bins=rows
        )
        return _subsets([set(np.unique(row["ids"][row["ids"] > 0]) - 1) for row in packed], len(tokens))

    return plan
