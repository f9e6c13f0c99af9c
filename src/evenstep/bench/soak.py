"""A loader that runs for a long time: is every sample right, does memory stay flat, do threads stay constant."""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from evenstep.bench.machine import as_line, describe_machine
from evenstep.bench.options import soak as add_arguments
from evenstep.bench.soak_samples import SEQ_LEN, SoakSamples, digest_of, keep, mix, together
from evenstep.build import build_loader
from evenstep.comm.gather_bytes import gather_bytes
from evenstep.comm.groups import world_communicator
from evenstep.config import LoaderConfig
from evenstep.sampling import StepSampler
from evenstep.testing import run_ranks

__all__ = ["Look", "add_arguments", "judge", "run", "soak"]

_ROWS = 2  # of a micro-batch
_MICRO_BATCHES = 4  # of a step
_STEPS = 50  # of an epoch: many epochs begin and end
_LOOKS = 120
_GROWTH = 0.02  # of the resident memory, between the second quarter of the time and the last
_LEAST_GROWTH = 8 << 20  # allocators give and take so much
_TIMEOUT = timedelta(minutes=5)


def run(args: argparse.Namespace) -> int:
    """Run a loader as ``args`` says; 0 if all samples were right, memory was flat and threads were constant."""
    options = (60 * args.minutes, args.pause_ms / 1e3, args.seed)
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
        mine = soak(dist.get_rank(), *options)
        gathered = gather_bytes(world_communicator(_TIMEOUT), json.dumps(mine).encode())
        rank = dist.get_rank()
        dist.destroy_process_group()
        if rank != 0:
            return 0  # the first rank speaks for all
        ranks = [json.loads(data) for data in gathered]
    else:
        ranks = run_ranks(soak, args.ranks, *options, timeout=options[0] + 300)
    result = {
        "machine": describe_machine(),
        "seed": args.seed,
        "minutes": args.minutes,
        "pause_ms": args.pause_ms,
        "ranks": [{**rank, "verdict": judge([Look(**look) for look in rank["looks"]])} for rank in ranks],
    }
    print(json.dumps(result) if args.json else _as_text(result), flush=True)
    return 0 if all(_passed(rank) for rank in result["ranks"]) else 1


@dataclass(frozen=True, slots=True)
class Look:
    """One look at a rank: seconds since the first batch, bytes resident, threads of the process and of Python."""

    seconds: float
    memory: int
    threads: int
    python_threads: int


def look(seconds: float) -> Look:
    """A look at this process; where there is no /proc, Python's threads stand for all and memory is 0."""
    memory, threads = 0, threading.active_count()
    if Path("/proc/self/statm").exists():
        memory = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        threads = len(list(Path("/proc/self/task").iterdir()))
    return Look(seconds, memory, threads, threading.active_count())


def judge(looks: Sequence[Look]) -> dict[str, Any]:
    """What the looks at one rank say, the first quarter of them left out: then, everything has been met once."""
    quarter = len(looks) // 4
    settled, last = looks[quarter:], looks[-max(quarter, 1) :]
    before = median(one.memory for one in settled[: max(quarter, 1)])
    after = median(one.memory for one in last)
    threads = sorted({one.threads for one in settled})
    return {
        "memory_before": before,
        "memory_after": after,
        "memory_peak": max(one.memory for one in looks),
        "memory_flat": after - before <= max(_LEAST_GROWTH, _GROWTH * before),
        "threads": threads,
        "threads_constant": len(threads) == 1,
    }


def soak(rank: int, seconds: float, pause: float, seed: int) -> dict[str, Any]:
    """Take batches for so long, as a training loop with collectives of its own would; on every rank.

    Every sample is checked against what the dataset gives for its index, again after the next batch has come, and
    each step against the sampler: all its members, once, on whichever rank.
    """
    ranks = dist.get_world_size()
    rows = ranks * _MICRO_BATCHES * _ROWS
    dataset = SoakSamples(rows * _STEPS, seed)
    sampler = StepSampler(len(dataset), global_batch_size=rows, seed=seed)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    config = LoaderConfig(seq_len=SEQ_LEN, micro_batch_size=_ROWS, timeout=_TIMEOUT)
    found = {"steps": 0, "samples": 0, "wrong_samples": 0, "wrong_steps": 0, "epochs": 0}
    looks: list[Look] = []
    with build_loader(dataset, mesh, config, sampler=sampler, pack=keep, collate=together) as loader:
        cursor, members, held = sampler.start(), 0, list[dict[str, Any]]()
        began, over = time.monotonic(), False
        while not over:
            for number, batch in enumerate(loader):
                for sample in [*batch, *held]:
                    found["wrong_samples"] += digest_of(sample) != digest_of(dataset[sample["index"]])
                found["samples"] += len(batch)
                members += mix([sample["index"] for sample in batch])
                held = batch
                time.sleep(pause)
                if (number + 1) % _MICRO_BATCHES:
                    continue
                step = sampler.step_at(cursor)
                assert step is not None
                elapsed = time.monotonic() - began
                told = torch.tensor([_wrapped(members), int(rank == 0 and elapsed > seconds)])
                dist.all_reduce(told)
                found["wrong_steps"] += int(told[0]) != mix(step.indices)
                found["steps"] += 1
                cursor, members = step.next_cursor, 0
                loader.state_dict()
                if elapsed >= len(looks) * seconds / _LOOKS:
                    looks.append(look(elapsed))
                    if rank == 0 and len(looks) % 4 == 1:
                        _report(found, looks[-1])
                if told[1]:
                    over = True
                    break
            else:
                found["epochs"] += 1
                cursor = cursor.at_epoch(cursor.epoch + 1)
    return {**found, "looks": [asdict(one) for one in looks]}


def _wrapped(value: int) -> int:
    """``value`` modulo 2**64, as int64: sums over ranks wrap the same way."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def _report(found: dict[str, int], seen: Look) -> None:
    print(
        f"{seen.seconds:7.0f} s  {found['steps']:,} steps, {found['epochs']} epochs, {seen.memory / 2**20:.1f} MiB, "
        f"{seen.threads} threads, wrong: {found['wrong_samples']} samples, {found['wrong_steps']} steps",
        file=sys.stderr,
        flush=True,
    )


def _passed(rank: dict[str, Any]) -> bool:
    verdict = rank["verdict"]
    right = rank["samples"] > 0 == rank["wrong_samples"] == rank["wrong_steps"]
    return bool(right and verdict["memory_flat"] and verdict["threads_constant"])


def _as_text(result: dict[str, Any]) -> str:
    ranks = result["ranks"]
    lines = [
        as_line(result["machine"]),
        f"seed {result['seed']}, {len(ranks)} ranks over gloo, {result['minutes']:g} minutes, {result['pause_ms']:g} ms "
        f"of compute a micro-batch, {ranks[0]['steps']:,} steps in {ranks[0]['epochs'] + 1:,} epochs",
        "",
        "rank   samples  wrong   MiB in the second quarter   in the last    peak   threads",
    ]
    for number, rank in enumerate(ranks):
        seen = rank["verdict"]
        mib = [seen[f"memory_{name}"] / 2**20 for name in ("before", "after", "peak")]
        threads = "-".join(str(n) for n in dict.fromkeys([seen["threads"][0], seen["threads"][-1]]))
        lines.append(
            f"{number:4d} {rank['samples']:9,} {rank['wrong_samples'] + rank['wrong_steps']:6d} {mib[0]:27.1f} "
            f"{mib[1]:13.1f} {mib[2]:7.1f} {threads:>9}"
        )
    checks = {
        "every sample and every step is right": all(
            r["samples"] > 0 == r["wrong_samples"] == r["wrong_steps"] for r in ranks
        ),
        "memory is flat": all(r["verdict"]["memory_flat"] for r in ranks),
        "threads are constant": all(r["verdict"]["threads_constant"] for r in ranks),
    }
    lines += ["", *(f"  {'ok' if passed else 'FAILED':7} {name}" for name, passed in checks.items())]
    return "\n".join(lines)
