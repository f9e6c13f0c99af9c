"""How much faster workers read: samples that take their time, with threads and with processes, beside one reader."""

from __future__ import annotations

import argparse
import json
import time
from statistics import median
from typing import Any, Literal

import torch

from evenstep.bench.machine import as_line, describe_machine
from evenstep.bench.options import STEP_SAMPLES
from evenstep.bench.options import workers as add_arguments
from evenstep.build import build_loader
from evenstep.config import LoaderConfig
from evenstep.sampling import StepSampler

__all__ = ["add_arguments", "measure", "run"]

_MICRO_BATCH = 4
_WARM_UP = 2  # steps
_LONGEST = 60
_GRAPHS = {"unknown": "lengths unknown", "known": "lengths known ahead"}
_KINDS: tuple[Literal["thread", "process"], ...] = ("thread", "process")


class _Waiting:
    """Each sample waits as a disk or a network would, so that the number of cores does not matter."""

    def __init__(self, steps: int, read_seconds: float) -> None:
        self._read_seconds = read_seconds
        self.lengths = [1 + index % _LONGEST for index in range(steps * STEP_SAMPLES)]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        time.sleep(self._read_seconds)
        return {"input_ids": torch.arange(self.lengths[index])}


def measure(
    *, workers: int = 4, read_seconds: float = 0.008, steps: int = 16, repeats: int = 3
) -> dict[str, Any]:
    """Samples per second beside those of a loader without workers, and seconds until the first batch.

    The loop does nothing but take batches. The rate is that between the second step and the last but one: before, workers
    are started and have nothing read ahead; after it they run out of samples. ``of_workers`` is the speed-up divided by
    their number, the median over ``repeats`` pairs of runs; ``best_of_workers`` is that of the best runs, which a busy
    machine disturbs least.

    Raises:
        ValueError: There are no steps left to measure.
    """
    if steps < _WARM_UP + 2:
        raise ValueError(
            f"steps={steps}, expected at least {_WARM_UP + 2}: {_WARM_UP} warm up, and the last is not counted"
        )
    # In turn, so that what else the machine does disturbs all alike.
    single: list[float] = []
    runs: dict[tuple[str, str], list[tuple[float, float]]] = {(g, k): [] for g in _GRAPHS for k in _KINDS}
    for _ in range(repeats):
        single.append(_run(read_seconds, _WARM_UP + 2, None, known=False)[0])
        for (graph, kind), found in runs.items():
            options = {"num_workers": workers, "worker": kind}
            found.append(_run(read_seconds, steps, options, known=graph == "known"))
    result: dict[str, Any] = {
        "machine": describe_machine(),
        "workers": workers,
        "read_seconds": read_seconds,
        "steps": steps,
        "samples_per_step": STEP_SAMPLES,
        "single_seconds_per_sample": min(single),
        **{graph: {} for graph in _GRAPHS},
    }
    for (graph, kind), found in runs.items():
        seconds = [per_sample for per_sample, _ in found]
        result[graph][kind] = {
            "of_workers": median(one / many for one, many in zip(single, seconds, strict=True)) / workers,
            "best_of_workers": min(single) / min(seconds) / workers,
            "first_batch_seconds": median(first for _, first in found),
        }
    return result


def _run(
    read_seconds: float, steps: int, options: dict[str, Any] | None, *, known: bool
) -> tuple[float, float]:
    """Seconds per sample once warm, and until the first batch."""
    dataset = _Waiting(steps, read_seconds)
    config = LoaderConfig(seq_len=_LONGEST, micro_batch_size=_MICRO_BATCH, **(options or {}))
    sampler = StepSampler(len(dataset), global_batch_size=STEP_SAMPLES)
    metadata = dataset.lengths if known else None
    with build_loader(dataset, None, config, sampler=sampler, metadata=metadata) as loader:
        begin = time.perf_counter()
        arrivals = [time.perf_counter() - begin for _ in loader]
    ends = arrivals[STEP_SAMPLES // _MICRO_BATCH - 1 :: STEP_SAMPLES // _MICRO_BATCH]
    return (ends[-2] - ends[_WARM_UP - 1]) / (steps - 1 - _WARM_UP) / STEP_SAMPLES, arrivals[0]


def run(args: argparse.Namespace) -> int:
    """Measure what ``args`` says, print it on stdout, and return the exit status."""
    result = measure(
        workers=args.workers, read_seconds=args.read_ms / 1e3, steps=args.steps, repeats=args.repeats
    )
    print(json.dumps(result, indent=2) if args.json else _as_text(result))
    return 0


def _as_text(result: dict[str, Any]) -> str:
    workers = result["workers"]
    lines = [
        as_line(result["machine"]),
        f"{result['read_seconds'] * 1e3:g} ms to read a sample, steps of {result['samples_per_step']} samples; without "
        f"workers {result['single_seconds_per_sample'] * 1e3:.2f} ms a sample",
        "",
        f"{workers} workers                        speed-up   of {workers}x   best run   first batch after",
    ]
    for graph, title in _GRAPHS.items():
        for kind in _KINDS:
            found = result[graph][kind]
            lines.append(
                f"  {title:<20} {kind:<9} {found['of_workers'] * workers:8.2f}x {found['of_workers']:6.0%} "
                f"{found['best_of_workers']:10.0%} {found['first_batch_seconds']:13.2f} s"
            )
    return "\n".join(lines)
