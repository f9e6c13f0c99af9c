"""The demo from start to end: the corpus, the two launches, the verdict."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from evenstep.demo.checks import (
    Check,
    SpeedUp,
    check_ledger,
    check_losses,
    check_promise,
    check_speed,
    core_share,
)
from evenstep.demo.compare import Comparison, compare
from evenstep.demo.corpus import find_corpus
from evenstep.demo.launch import RanksFailed, launch
from evenstep.demo.records import StepRecord
from evenstep.demo.report import draw_balance, write_summary
from evenstep.demo.resume import audit, resume, write_ledger
from evenstep.demo.settings import Settings
from evenstep.demo.tables import corpus_table, predicted_again, print_resumed
from evenstep.demo.tokens import Pieces, split_documents, tokenize

__all__ = ["run"]

EXTRAS = ("tqdm", "matplotlib", "tokenizers")


def run(args: argparse.Namespace) -> int:
    """Run the demo.

    Returns:
        0 if every check passed, 1 if one failed or a rank did, 2 if the demo could not start.
    """
    missing = [name for name in EXTRAS if find_spec(name) is None]
    if missing:
        print(f"evenstep demo needs {', '.join(missing)}: pip install 'evenstep[cli]'", file=sys.stderr)
        return 2
    make = Settings.quick if args.quick else Settings
    settings = make(ranks=args.ranks, out=args.out, own_corpus=args.corpus is not None)
    begin = time.monotonic()
    try:
        pieces = _prepare(settings, args.corpus)
    except (ValueError, OSError) as error:
        print(f"evenstep demo: {error}", file=sys.stderr)
        return 2
    try:
        comparison, resumed = _train(settings)
    except RanksFailed as error:
        print(f"evenstep demo: {error}", file=sys.stderr)
        return 1
    checks = _verdict(settings, comparison, resumed)
    seconds = time.monotonic() - begin
    write_summary(settings, pieces, comparison, resumed, checks, seconds)
    np.save(settings.lengths, pieces.store.lengths)
    if settings.ranks > 1:
        print(f"\n{predicted_again(settings, comparison.cost, comparison.reference, comparison.balanced)}")
    draw_balance(settings.out / "balance.png", comparison)
    print(f"\n{_results(settings, seconds)}")
    failed = [check.name for check in checks if check.passed is False]
    if failed:
        print(f"evenstep demo: {', '.join(failed)} failed", file=sys.stderr)
    return 1 if failed else 0


def _results(settings: Settings, seconds: float) -> str:
    files = [
        "balance.png",
        "summary.json",
        "ledger.jsonl",
        settings.checkpoint.name,
        settings.lengths.name,
        f"{settings.tokens.name}/",
    ]
    return f"{settings.out}/: {', '.join(files)} ({seconds:.0f} s)"


def _prepare(settings: Settings, folder: Path | None) -> Pieces:
    """The corpus on disk as tokens, shown as a table."""
    corpus = find_corpus(folder).thinned(settings.keep_every)
    settings.out.mkdir(parents=True, exist_ok=True)
    print(f"Corpus: {corpus.root}")
    store = tokenize(corpus, settings.tokens, progress=_bar)
    pieces = split_documents(store, settings.seq_len)
    print(corpus_table(pieces, settings.seq_len))
    needed = settings.compared_steps + settings.resumed_steps
    steps = len(settings.sampler(pieces))
    if steps < needed:
        raise ValueError(
            f"the corpus fills {steps} optimizer steps of {settings.rows_per_step} rows of {settings.seq_len:,} "
            f"tokens, but {needed} are trained; name more text with --corpus, or start fewer ranks"
        )
    return pieces


def _bar(files: Iterable[Path]) -> Iterable[Path]:
    tqdm: Any = import_module("tqdm").tqdm
    bar: Iterable[Path] = tqdm(  # in a log file it would stand before the table's first line
        files, desc="reading lengths", unit=" documents", leave=False, disable=not sys.stderr.isatty()
    )
    return bar


def _train(settings: Settings) -> tuple[Comparison, list[StepRecord]]:
    """The comparison on some ranks, and what follows on others."""
    print(
        f"\nTraining: each step in the reference layout (greedy rows, dealt to the ranks in turn) and balanced; "
        f"{settings.ranks} ranks, {settings.micro_batches} micro-batches a step, rows of {settings.seq_len:,} tokens"
    )
    comparison = launch(settings.ranks, compare, settings)
    assert comparison is not None, "rank 0 has the result"
    print(
        f"\nStopped after {comparison.given_up} of {settings.micro_batches} micro-batches of step "
        f"{settings.compared_steps}; going on with {settings.resumed_ranks} ranks\n"
        "  (the same samples and losses as if it had never stopped, see below; more ranks share this machine, so that their "
        "seconds do not compare)",
        flush=True,
    )
    resumed = launch(settings.resumed_ranks, resume, settings, comparison.cost)
    for record in resumed:
        print_resumed(record)
    return comparison, resumed


def _verdict(settings: Settings, comparison: Comparison, resumed: list[StepRecord]) -> list[Check]:
    compared = settings.compared_steps
    reference, balanced = comparison.reference, comparison.balanced
    trained = [*balanced, *resumed]
    write_ledger(settings.out / "ledger.jsonl", trained)
    speed_up = SpeedUp.of(reference, balanced)
    skip = _why_not_timed(settings)
    checks = [
        check_promise(speed_up, skip=skip or ("this corpus is yours" if settings.own_corpus else "")),
        check_speed(speed_up, share=core_share([*reference[:compared], *balanced]), skip=skip),
        check_losses("same_loss", reference[:compared], balanced, "reference layout and balanced"),
        check_losses("same_loss_resumed", reference[compared:], resumed, "never stopped and resumed"),
        check_ledger(
            audit(settings, trained),
            ranks=(settings.ranks, settings.resumed_ranks),
            stopped_after=f"{compared} steps and {comparison.given_up} micro-batches",
        ),
    ]
    print()
    for check in checks:
        verdict = {True: "ok", False: "FAILED", None: "--"}[check.passed]
        print(f"  {verdict:<6}  {check.text}")
    return checks


def _why_not_timed(settings: Settings) -> str:
    if settings.ranks == 1:
        return "one rank waits for nobody"
    if not settings.check_speed:
        return "a quick run has too few steps"
    return ""
