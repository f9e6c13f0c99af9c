"""Measures how many token bytes a second one core packs and collates, beside what it copies."""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from evenstep.bench.machine import as_line, describe_machine
from evenstep.bench.options import pack as add_arguments
from evenstep.packing import collate_rows, collate_varlen, fused, pack_text

__all__ = ["add_arguments", "measure", "run"]

Rows = list[list[dict[str, torch.Tensor]]]
RUNS = 10
COPIED = 64 * 2**20  # more than caches hold
COLLATES: dict[str, Callable[[list[Any]], Any]] = {"padded": collate_rows, "varlen": collate_varlen}


def run(args: argparse.Namespace) -> int:
    """Measures as ``args`` say and prints the figures; the exit status."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the figure is per core
    try:
        result = measure(
            seq_len=args.seq_len,
            num_rows=args.rows,
            document=args.document,
            labels=args.labels,
            shifted=args.shifted,
            repeats=args.repeats,
            seed=args.seed,
        )
    finally:
        torch.set_num_threads(threads)
    print(json.dumps(result) if args.json else _table(result))
    return 0


def measure(
    *,
    seq_len: int = 8192,
    num_rows: int = 8,
    document: int = 500,
    labels: bool = False,
    shifted: bool = False,
    repeats: int = 100,
    seed: int = 0,
) -> dict[str, Any]:
    """Throughput of the built-in pairs, in one pass and composed, and of a plain copy.

    The payload is ``input_ids`` alone (8 bytes a token), though three fields of that size are written. The copy is of
    64 MiB between buffers that are used again: it pays for memory, not for allocation.

    Returns:
        ``gb_per_s`` (10^9 payload bytes a second) by layout and form, ``ratio_to_memcpy`` of the same, and the setting.

    Raises:
        ValueError: A number is below 1.
    """
    for name, value in (
        ("seq_len", seq_len),
        ("rows", num_rows),
        ("document", document),
        ("repeats", repeats),
    ):
        if value < 1:
            raise ValueError(f"{name} is {value}; there would be nothing to measure; give at least 1")
    rows = _rows(num_rows, seq_len, document, labels, np.random.default_rng(seed))
    payload = num_rows * seq_len * 8
    pack = functools.partial(pack_text, shifted=shifted)
    contenders: dict[str, Callable[[], Any]] = {}
    for layout, collate in COLLATES.items():
        one_pass = fused(pack, collate)
        assert one_pass is not None
        contenders[f"{layout}, one pass"] = functools.partial(one_pass, rows, seq_len)
        contenders[f"{layout}, composed"] = functools.partial(_compose, pack, collate, rows, seq_len)
    source = np.ones(COPIED // 8, dtype=np.int64)
    contenders["memcpy"] = functools.partial(np.copyto, np.empty_like(source), source)
    seconds = _best(contenders, repeats)
    memcpy = seconds.pop("memcpy") * payload / COPIED
    return {
        "gb_per_s": {name: round(payload / s / 1e9, 3) for name, s in seconds.items()},
        "ratio_to_memcpy": {name: round(memcpy / s, 4) for name, s in seconds.items()},
        "memcpy_gb_per_s": round(payload / memcpy / 1e9, 3),
        "setting": {
            "seq_len": seq_len,
            "rows": num_rows,
            "documents": sum(map(len, rows)),
            "labels": labels,
            "shifted": shifted,
            "repeats": repeats,
            "seed": seed,
            "threads": torch.get_num_threads(),
        },
        "machine": describe_machine(),
    }


def _rows(count: int, seq_len: int, document: int, labels: bool, random: np.random.Generator) -> Rows:
    """Full rows of documents between 0.6 and 1.4 times the mean length; the last one fills the row."""
    rows: Rows = []
    for _ in range(count):
        row: list[dict[str, torch.Tensor]] = []
        left = seq_len
        while left:
            length = min(left, max(1, int(random.uniform(0.6, 1.4) * document)))
            left -= length
            sample = {"input_ids": torch.from_numpy(random.integers(0, 50_000, length))}
            if labels:
                sample["labels"] = sample["input_ids"].clone()
            row.append(sample)
        rows.append(row)
    return rows


def _compose(pack: Callable[..., Any], collate: Callable[..., Any], rows: Rows, seq_len: int) -> Any:
    return collate([pack(samples, seq_len) for samples in rows])


def _best(contenders: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Least seconds of each, in turns of ten runs: a busy machine slows all alike, and caches are warm."""
    best = dict.fromkeys(contenders, float("inf"))
    for _ in range(-(-repeats // RUNS)):
        for name, contender in contenders.items():
            contender()
            for _ in range(RUNS):
                start = time.perf_counter()
                contender()
                best[name] = min(best[name], time.perf_counter() - start)
    return best


def _table(result: dict[str, Any]) -> str:
    setting = result["setting"]
    lines = [
        f"{setting['rows']} rows of {setting['seq_len']} int64 tokens in {setting['documents']} documents, "
        f"labels {'given' if setting['labels'] else 'from tokens'}, {'shifted' if setting['shifted'] else 'unshifted'}, "
        f"seed {setting['seed']}, best of {setting['repeats']}",
        f"{as_line(result['machine'])}; {setting['threads']} thread",
        f"{'':20}{'GB/s':>8}{'to memcpy':>12}",
    ]
    lines += [
        f"{name:20}{value:8.2f}{result['ratio_to_memcpy'][name]:12.3f}"
        for name, value in result["gb_per_s"].items()
    ]
    lines.append(f"{'memcpy':20}{result['memcpy_gb_per_s']:8.2f}{1:12.3f}")
    return "\n".join(lines)
