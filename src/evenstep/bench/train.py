"""Tokens per second of training, beside what others do with the same documents: ``evenstep bench train``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from evenstep.bench.machine import as_line, describe_machine
from evenstep.bench.options import train as add_arguments
from evenstep.bench.train_ranks import EVENSTEP, GROUPED, LAYOUTS, PADDED, Contest, Trained, train_all
from evenstep.demo.checks import LEAST_CORE, core_share
from evenstep.demo.corpus import find_corpus
from evenstep.demo.launch import RanksFailed, launch
from evenstep.demo.settings import Settings
from evenstep.demo.tokens import split_documents, tokenize

__all__ = ["add_arguments", "as_text", "run", "summary"]

_SAME = tuple(name for name in LAYOUTS if name != GROUPED)  # the same documents in every step
_MEANING = {
    "padded": "documents in the order that DistributedSampler deals, each micro-batch padded to its longest",
    "packed per rank": "the rank's documents of the step by best-fit decreasing into rows, as TRL packs; rows shuffled",
    "length-grouped": "the round sorted by length, as group_by_length does, then padded: steps of other documents",
    "evenstep": "build_loader: read, planned and exchanged while training, accumulation_steps='auto'",
}

IN_ALL = ["--quick"]


def run(args: argparse.Namespace) -> int:
    """Train what ``args`` says, print it on stdout, and return the exit status."""
    if find_spec("tokenizers") is None:
        print("evenstep bench train needs tokenizers: pip install 'evenstep[cli]'", file=sys.stderr)
        return 2
    with TemporaryDirectory(prefix="evenstep-bench-") as folder:
        try:
            contest = _contest(args, Path(folder))
        except (ValueError, OSError) as error:
            print(f"evenstep bench train: {error}", file=sys.stderr)
            return 2
        try:
            rounds = launch(args.ranks, train_all, contest)
        except RanksFailed as error:
            print(f"evenstep bench train: {error}", file=sys.stderr)
            return 1
    result = summary(contest, rounds)
    print(json.dumps(result, indent=1) if args.json else as_text(result))
    return 0


def _contest(args: argparse.Namespace, folder: Path) -> Contest:
    """The corpus on disk as tokens, and what is trained on it."""
    usual = (1024, 16, 2, 2) if args.quick else (4096, 24, 2, 3)
    given = (args.seq_len, args.documents, args.steps, args.rounds)
    names = ("--seq-len", "--documents", "--steps", "--rounds")
    for name, value in zip(
        ("--ranks", "--micro-batch-size", *names), (args.ranks, args.micro_batch_size, *given), strict=True
    ):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}: there would be nothing to train; give at least 1")
    seq_len, documents, steps, rounds = (a if a is not None else b for a, b in zip(given, usual, strict=True))
    settings = Settings(ranks=args.ranks, out=folder, seq_len=seq_len, seed=args.seed)
    corpus = find_corpus(args.corpus)
    if (
        args.corpus is None
    ):  # as much of the library as is trained, or reading it would take longer than training
        corpus = corpus.thinned(16 if args.quick else 4)
    contest = Contest(
        settings=settings,
        micro_batch_size=args.micro_batch_size,
        documents=documents,
        steps=steps,
        rounds=rounds,
    )
    contest.schedule(split_documents(tokenize(corpus, settings.tokens), seq_len))
    return contest


def summary(contest: Contest, rounds: Sequence[dict[str, list[Trained]]]) -> dict[str, Any]:
    """Figures of every layout; the first round warmed up and does not count."""
    settings = contest.settings
    layouts = {name: _figures(name, rounds, contest) for name in LAYOUTS}
    everything = [trained.record for one in rounds[1:] for name in LAYOUTS for trained in one[name]]
    return {
        "machine": describe_machine("tokenizers"),
        "seed": settings.seed,
        "ranks": settings.ranks,
        "seq_len": settings.seq_len,
        "micro_batch_size": contest.micro_batch_size,
        "documents": contest.documents,
        "steps": contest.steps,
        "rounds": contest.rounds,
        "core_share": core_share(everything),
        "loss_difference": max(
            abs(a - b) / abs(b)
            for name in _SAME
            for a, b in zip(layouts[name]["losses"], layouts[EVENSTEP]["losses"], strict=True)
        ),
        "layouts": layouts,
    }


def _figures(name: str, rounds: Sequence[dict[str, list[Trained]]], contest: Contest) -> dict[str, Any]:
    counted = rounds[1:]
    records = [trained.record for one in counted for trained in one[name]]
    compute = sum(float(record.compute.sum()) for record in records)
    means = sum(float(record.compute.mean(axis=1).sum()) for record in records)
    tokens = sum(int(record.tokens.sum()) for record in records)
    # Without padding to the longest, what a row has left is not computed.
    padding = sum(int(record.padding.sum()) for record in records) if name in (PADDED, GROUPED) else 0
    places = sum(record.tokens.size for record in records)
    places *= contest.micro_batch_size * contest.settings.seq_len
    return {
        "tokens_per_second": median(_speed(one[name]) for one in counted),
        "of_evenstep": median(_speed(one[name]) / _speed(one[EVENSTEP]) for one in counted),
        "computed_of_evenstep": median(
            _computed_speed(one[name]) / _computed_speed(one[EVENSTEP]) for one in counted
        ),
        "efficiency": means / sum(record.computed_makespan for record in records),
        "padding": padding / (padding + tokens),
        "fill": tokens / places,
        "other_work": 1 - compute / sum(trained.processor for one in counted for trained in one[name]),
        "micro_batches": sum(len(record.tokens) for record in records) / len(records),
        "tokens": tokens,
        "losses": [trained.record.loss for one in rounds for trained in one[name]],
    }


def _speed(steps: Sequence[Trained]) -> float:
    """Real tokens per second of the clock, optimizer steps and data included."""
    return _tokens(steps) / sum(trained.record.seconds for trained in steps)


def _computed_speed(steps: Sequence[Trained]) -> float:
    """Real tokens per second of the slowest rank's processor time in each micro-batch."""
    return _tokens(steps) / sum(trained.record.computed_makespan for trained in steps)


def _tokens(steps: Sequence[Trained]) -> int:
    return sum(int(trained.record.tokens.sum()) for trained in steps)


def as_text(r: dict[str, Any]) -> str:
    """A table, and what each layout is."""
    busy = r["core_share"] < LEAST_CORE
    lines = [
        as_line(r["machine"]),
        f"seed {r['seed']}, {r['ranks']} ranks over gloo, micro-batches of {r['micro_batch_size']} rows of {r['seq_len']:,} tokens, "
        f"{r['documents']} documents a step; medians of {r['rounds']} rounds of {r['steps']} steps, in turns",
        "",
        "                  tokens/s  of evenstep  by processor time  efficiency  padding   fill  micro-batches  other work",
    ]
    for name, found in r["layouts"].items():
        lines.append(
            f"{name:<16} {found['tokens_per_second']:9,.0f} {found['of_evenstep']:12.2f} "
            f"{found['computed_of_evenstep']:18.2f} {found['efficiency']:11.3f} {found['padding']:8.1%} "
            f"{found['fill']:6.1%} {found['micro_batches']:14.1f} {found['other_work']:11.1%}"
        )
    lines.append("")
    lines += [f"  {name + ':':<16} {_MEANING[name]}" for name in r["layouts"]]
    lines += [
        f"  Losses of {len(r['layouts'][EVENSTEP]['losses'])} steps with the same documents ({', '.join(_SAME)}) differ "
        f"by at most {r['loss_difference']:.1e}.",
        "  tokens/s counts real tokens, and all seconds: reading, planning, exchange, gradients, optimizer. efficiency is "
        "the mean",
        "  rank over the slowest in each micro-batch; padding a share of what is computed; fill the share of the room that "
        "is used;",
        "  other work the share of the processor time that is not forward and backward of the model.",
    ]
    if busy:
        lines.append(
            f"  This machine is busy: each rank had {r['core_share']:.0%} of a core, so that tokens/s measures other programs "
            "too."
        )
    return "\n".join(lines)
