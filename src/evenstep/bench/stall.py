"""How long a training loop waits for its data: the time inside the loader beside a compute of known length."""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torchdata.nodes import BaseNode, IterableWrapper

from evenstep.bench.machine import as_line, describe_machine
from evenstep.bench.options import stall as add_arguments
from evenstep.build import build_loader
from evenstep.config import LoaderConfig
from evenstep.nodes import DevicePrefetch, PinMemory
from evenstep.sampling import StepSampler
from evenstep.testing import run_ranks

__all__ = ["add_arguments", "measure", "run"]

_ROWS = 4  # per rank and step: micro-batches of one row
_WARM_UP = 2 * _ROWS  # the first window is never there ahead, and the second begins when it is read
_WAYS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "prefetch": ("producer thread", {"collectives": "producer"}, False),
    "caller": ("caller, with hooks", {"collectives": "caller"}, True),
    "caller_without_hooks": ("caller, without hooks", {"collectives": "caller"}, False),
    "no_prefetch": ("no prefetch", {"host_prefetch": 0}, False),
}


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


def measure(
    *,
    ranks: int = 2,
    compute_seconds: float = 0.05,
    read_seconds: float = 0.005,
    micro_batches: int = 60,
    seq_len: int = 8192,
    seed: int = 0,
) -> dict[str, Any]:
    """Seconds per micro-batch inside the loader, by who starts the collectives, and without look-ahead.

    The compute is a sleep: like a training step on an accelerator, it leaves the processor to the loader.
    ``stalled`` is the share of the whole time that the loop spent in ``next`` and in the hooks, without the first two
    windows, on the rank where it is largest. ``next_seconds`` and ``hook_seconds`` are its parts, per micro-batch;
    ``loop_cpu_seconds`` is the processor time in them, ``worker_cpu_seconds`` that of the loader's thread, where it is
    largest (on the rank that plans).
    ``pass_through_seconds`` is what `PinMemory` and `DevicePrefetch` add to a batch that stays on the CPU.
    """
    result: dict[str, Any] = {
        "machine": describe_machine(),
        "seed": seed,
        "ranks": ranks,
        "compute_seconds": compute_seconds,
        "read_seconds": read_seconds,
        "micro_batches": micro_batches,
        "seq_len": seq_len,
    }
    arguments = compute_seconds, read_seconds, micro_batches, seq_len, seed
    for way in _WAYS:
        found = run_ranks(_rank, ranks, way, *arguments, timeout=600.0)
        result[way] = max(found, key=lambda one: one["stalled"])
        result[way]["worker_cpu_seconds"] = max(one["worker_cpu_seconds"] for one in found)
    result["pass_through_seconds"] = _pass_through()
    return result


def _pass_through(batches: int = 2000, turns: int = 15) -> float:
    """Seconds a batch, the least of turns: `PinMemory` and `DevicePrefetch` on the CPU, less their bare source."""

    def seconds(build: Callable[[Any], BaseNode[Any]]) -> float:
        node = build(IterableWrapper([{"input_ids": torch.zeros(1)}] * (batches + 1)))
        next(node)
        begin = time.perf_counter()
        for _ in range(batches):
            next(node)
        return (time.perf_counter() - begin) / batches

    pairs = [
        (
            seconds(lambda source: DevicePrefetch(PinMemory(source, "cpu"), "cpu")),
            seconds(lambda source: source),
        )
        for _ in range(turns)
    ]
    nodes, bare = zip(*pairs, strict=True)
    least: float = min(nodes) - min(bare)
    return least


def _rank(
    _: int, way: str, compute_seconds: float, read_seconds: float, count: int, seq_len: int, seed: int
) -> dict[str, float]:
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",)) if ranks > 1 else None
    steps = -(-(count + _WARM_UP) // _ROWS) + 3
    dataset = _Documents(steps * _ROWS * ranks, seq_len, read_seconds, seed)
    options, hooks = _WAYS[way][1:]
    sampler = StepSampler(len(dataset), global_batch_size=_ROWS * ranks, seed=seed)
    in_next, in_hooks = [], []
    loop_cpu = worker_cpu = 0.0
    with build_loader(dataset, mesh, LoaderConfig(seq_len=seq_len, **options), sampler=sampler) as loader:
        batches = iter(loader)
        for number in range(count + _WARM_UP):
            if number == _WARM_UP:
                loop_cpu, worker_cpu = 0.0, _worker_cpu()
            times = [time.perf_counter(), time.thread_time()]
            next(batches)
            in_next.append(time.perf_counter() - times[0])
            loop_cpu += time.thread_time() - times[1]
            time.sleep(compute_seconds / 3)  # the forward pass
            in_hooks.append(0.0)
            for hook in (loader.prefetch_plan, loader.prefetch) if hooks else ():
                times = [time.perf_counter(), time.thread_time()]
                hook()
                in_hooks[-1] += time.perf_counter() - times[0]
                loop_cpu += time.thread_time() - times[1]
                time.sleep(compute_seconds / 3)
            if not hooks:
                time.sleep(compute_seconds * 2 / 3)
        worker_cpu = _worker_cpu() - worker_cpu
    waits = np.array(in_next[_WARM_UP:]) + np.array(in_hooks[_WARM_UP:])
    return {
        "stalled": float(waits.sum() / (waits.sum() + compute_seconds * count)),
        "median_seconds": float(np.median(waits)),
        "p99_seconds": float(np.quantile(waits, 0.99)),
        "next_seconds": float(np.mean(in_next[_WARM_UP:])),
        "hook_seconds": float(np.mean(in_hooks[_WARM_UP:])),
        "loop_cpu_seconds": loop_cpu / count,
        "worker_cpu_seconds": worker_cpu / count,
    }


def _worker_cpu() -> float:
    """Processor time of the loader's thread so far, in seconds; 0 without one, or where the platform cannot say."""
    clock_of = getattr(time, "pthread_getcpuclockid", None)
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("evenstep-prefetch")]
    if clock_of is None or not threads:
        return 0.0
    return sum(time.clock_gettime(clock_of(thread.ident)) for thread in threads)


def run(args: argparse.Namespace) -> int:
    """Measure what ``args`` says, print it on stdout, and return the exit status."""
    result = measure(
        ranks=args.ranks,
        compute_seconds=args.compute_ms / 1e3,
        read_seconds=args.read_ms / 1e3,
        micro_batches=args.micro_batches,
        seq_len=args.seq_len,
        seed=args.seed,
    )
    print(json.dumps(result, indent=2) if args.json else _as_text(result))
    return 0


def _as_text(result: dict[str, Any]) -> str:
    lines = [
        as_line(result["machine"]),
        f"seed {result['seed']}, {result['ranks']} ranks over gloo, {result['micro_batches']} micro-batches of one row of "
        f"{result['seq_len']:,} tokens, {result['compute_seconds'] * 1e3:g} ms of compute, "
        f"{result['read_seconds'] * 1e3:g} ms to read a sample",
        "",
        "waiting for data         of the time   median ms   p99 ms   mean ms in next   in hooks   CPU ms: loop   worker",
    ]
    for way, (title, _, _) in _WAYS.items():
        found = {key: 1e3 * value for key, value in result[way].items()}
        lines.append(
            f"  {title:<22} {result[way]['stalled']:11.2%} {found['median_seconds']:11.2f} {found['p99_seconds']:8.2f} "
            f"{found['next_seconds']:17.2f} {found['hook_seconds']:10.2f} {found['loop_cpu_seconds']:14.2f} "
            f"{found['worker_cpu_seconds']:8.2f}"
        )
    lines += [
        "",
        f"PinMemory and DevicePrefetch on the CPU: {result['pass_through_seconds'] * 1e6:.1f} us a batch",
    ]
    return "\n".join(lines)
