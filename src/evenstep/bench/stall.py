"""How long a training loop waits for its data: the time inside ``next`` beside a compute of known length."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np
import torch

from evenstep.bench.machine import as_line, describe_machine
from evenstep.build import build_loader
from evenstep.config import LoaderConfig
from evenstep.sampling import StepSampler

__all__ = ["add_arguments", "measure", "run"]

_ROWS = 4  # per step: micro-batches of one row
_WARM_UP = _ROWS  # the first window is never there ahead


class _Documents:
    """Documents of log-normal lengths, each of which takes its time to read."""

    def __init__(self, size: int, seq_len: int, read_seconds: float, seed: int) -> None:
        lengths = np.random.default_rng(seed).lognormal(np.log(seq_len / 8), 1.0, size)
        self._lengths = np.clip(lengths.astype(np.int64), 8, seq_len)
        self._read_seconds = read_seconds

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        time.sleep(self._read_seconds)
        return {"input_ids": torch.arange(int(self._lengths[index]))}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``evenstep bench stall``."""
    parser.add_argument(
        "--compute-ms", type=float, default=50.0, metavar="MS", help="compute per micro-batch, simulated"
    )
    parser.add_argument("--read-ms", type=float, default=5.0, metavar="MS", help="reading time of a sample")
    parser.add_argument("--micro-batches", type=int, default=60, metavar="N", help="micro-batches to measure")
    parser.add_argument("--seq-len", type=int, default=8192, metavar="N", help="tokens of a row")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def measure(
    *,
    compute_seconds: float = 0.05,
    read_seconds: float = 0.005,
    micro_batches: int = 60,
    seq_len: int = 8192,
    seed: int = 0,
) -> dict[str, Any]:
    """Seconds in ``next`` per micro-batch, with data prepared ahead and without.

    The compute is a sleep: like a training step on an accelerator, it leaves the processor to the loader.
    ``stalled`` is the share of the whole time that the loop spent in ``next``, without the first window.
    """
    result: dict[str, Any] = {
        "machine": describe_machine(),
        "seed": seed,
        "compute_seconds": compute_seconds,
        "read_seconds": read_seconds,
        "micro_batches": micro_batches,
        "seq_len": seq_len,
    }
    for name, host_prefetch in (("prefetch", None), ("no_prefetch", 0)):
        waits = _waits(compute_seconds, read_seconds, micro_batches, seq_len, seed, host_prefetch)
        total = waits.sum() + compute_seconds * len(waits)
        result[name] = {
            "stalled": float(waits.sum() / total),
            "median_seconds": float(np.median(waits)),
            "p99_seconds": float(np.quantile(waits, 0.99)),
        }
    return result


def _waits(
    compute_seconds: float,
    read_seconds: float,
    count: int,
    seq_len: int,
    seed: int,
    host_prefetch: int | None,
) -> np.ndarray[Any, np.dtype[np.float64]]:
    steps = -(-(count + _WARM_UP) // _ROWS) + 2
    dataset = _Documents(steps * _ROWS, seq_len, read_seconds, seed)
    config = LoaderConfig(seq_len=seq_len, host_prefetch=host_prefetch)
    sampler = StepSampler(len(dataset), global_batch_size=_ROWS, seed=seed)
    waits = []
    with build_loader(dataset, None, config, sampler=sampler) as loader:
        batches = iter(loader)
        for _ in range(count + _WARM_UP):
            begin = time.perf_counter()
            next(batches)
            waits.append(time.perf_counter() - begin)
            time.sleep(compute_seconds)
    return np.array(waits[_WARM_UP:])


def run(args: argparse.Namespace) -> int:
    """Measure what ``args`` says, print it on stdout, and return the exit status."""
    result = measure(
        compute_seconds=args.compute_ms / 1e3,
        read_seconds=args.read_ms / 1e3,
        micro_batches=args.micro_batches,
        seq_len=args.seq_len,
        seed=args.seed,
    )
    print(json.dumps(result, indent=2) if args.json else _as_text(result))
    return 0


def _as_text(result: dict[str, Any]) -> str:
    def line(title: str, found: dict[str, float]) -> str:
        return (
            f"  {title:<12} {found['stalled']:8.2%} of the time   median {found['median_seconds'] * 1e3:7.2f} ms   "
            f"p99 {found['p99_seconds'] * 1e3:7.2f} ms"
        )

    return "\n".join(
        [
            as_line(result["machine"]),
            f"seed {result['seed']}, {result['micro_batches']} micro-batches of one row of {result['seq_len']:,} tokens, "
            f"{result['compute_seconds'] * 1e3:g} ms of compute, {result['read_seconds'] * 1e3:g} ms to read a sample",
            "",
            "waiting for data",
            line("prefetch", result["prefetch"]),
            line("no prefetch", result["no_prefetch"]),
        ]
    )
