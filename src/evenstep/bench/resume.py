"""What a resume costs: the sampler's restore deep inside a huge epoch, beside item-by-item fast-forward."""

from __future__ import annotations

import argparse
import json
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from torch.utils.data import SequentialSampler
from torchdata.nodes import SamplerWrapper

from evenstep.bench.machine import as_line, describe_machine
from evenstep.bench.options import resume as add_arguments
from evenstep.cursor import Cursor
from evenstep.sampling import KeyedPermutation, StepSampler

__all__ = ["add_arguments", "measure", "run"]


def measure(
    *,
    samples: int = 10**12,
    position: int = 10**11,
    global_batch_size: int = 1024,
    fast_forward: int = 2_000_000,
    seed: int = 0,
    repeats: int = 5,
) -> dict[str, Any]:
    """Time (seconds) and memory (bytes) of a restore, and permuted indices per second.

    A restore goes from the saved dictionary to the first step: a new sampler, its check of the stream, the
    step. ``peak_bytes`` is what Python and NumPy allocated during it.
    """
    saved = replace(
        StepSampler(samples, global_batch_size=global_batch_size, seed=seed).start(),
        consumed_samples=position,
    ).to_dict()

    def restore() -> None:
        sampler = StepSampler(samples, global_batch_size=global_batch_size, seed=seed)
        cursor = Cursor.from_dict(saved)
        cursor.check_stream(sampler.start())
        if sampler.step_at(cursor) is None:
            raise ValueError(f"no step is left at position {position} of {samples} samples: restore earlier")

    def fast_forwarded() -> None:
        node = SamplerWrapper(SequentialSampler(range(samples)))
        node.reset({SamplerWrapper.NUM_YIELDED_KEY: fast_forward, SamplerWrapper.EPOCH_KEY: 0})
        next(node)

    restore()
    peak = _peak_bytes(restore)
    seconds = median(_seconds(restore) for _ in range(4 * repeats))
    forward = min(_seconds(fast_forwarded) for _ in range(min(repeats, 3)))

    count = 1 << 22
    permutation = KeyedPermutation(samples, (seed, 0))
    positions = np.arange(position, position + count, dtype=np.int64) % samples
    keyed = count / min(_seconds(lambda: permutation(positions)) for _ in range(repeats))
    generator = np.random.RandomState(seed)
    numpy_rate = count / min(_seconds(lambda: generator.permutation(count)) for _ in range(repeats))
    return {
        "machine": describe_machine(),
        "seed": seed,
        "samples": samples,
        "position": position,
        "global_batch_size": global_batch_size,
        "restore_seconds": seconds,
        "restore_peak_bytes": peak,
        "state_bytes": len(json.dumps(saved)),
        "fast_forward_items": fast_forward,
        "fast_forward_seconds": forward,
        "fast_forward_scaled_seconds": forward / fast_forward * position,
        "fast_forward_ratio": forward / seconds,
        "permutation_per_second": keyed,
        "numpy_permutation_per_second": numpy_rate,
        "numpy_permutation_size": count,
        "permutation_ratio": keyed / numpy_rate,
    }


def run(args: argparse.Namespace) -> int:
    """Measure what ``args`` says, print it on stdout, and return the exit status."""
    result = measure(
        samples=args.samples,
        position=args.position,
        global_batch_size=args.global_batch_size,
        fast_forward=args.fast_forward,
        seed=args.seed,
        repeats=args.repeats,
    )
    print(json.dumps(result, indent=2) if args.json else _as_text(result))
    return 0


def _as_text(r: dict[str, Any]) -> str:
    hours = r["fast_forward_scaled_seconds"] / 3600
    keyed, numpy_rate = r["permutation_per_second"] / 1e6, r["numpy_permutation_per_second"] / 1e6
    return f"""\
{as_line(r["machine"])}
seed {r["seed"]}, {r["global_batch_size"]:,} samples per step, shuffled

restore at sample {r["position"]:,} of {r["samples"]:,}
  evenstep StepSampler      {r["restore_seconds"] * 1e3:9.3f} ms  {r["restore_peak_bytes"] / 1e3:.0f} kB of memory, \
state of {r["state_bytes"]} bytes
  torchdata SamplerWrapper  {r["fast_forward_seconds"] * 1e3:9.3f} ms  over the first {r["fast_forward_items"]:,} items: \
{r["fast_forward_ratio"]:,.0f}x as long; {hours:,.1f} hours at the position (scaled up, not run)

permuted indices per second and core
  evenstep KeyedPermutation {keyed:9.1f} M   of {r["samples"]:,}, any position, no memory: \
{r["permutation_ratio"]:.2f}x as fast
  numpy.random.permutation  {numpy_rate:9.1f} M   of {r["numpy_permutation_size"]:,}, whole, in memory"""


def _seconds(work: Callable[[], object]) -> float:
    begin = perf_counter()
    work()
    return perf_counter() - begin


def _peak_bytes(work: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
