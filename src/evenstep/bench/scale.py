"""On how many ranks balance over all of them ends, and groups should begin: ``evenstep bench scale``."""

from __future__ import annotations

import argparse
import json
import sys
from importlib.util import find_spec
from typing import Any

from evenstep.bench.machine import as_line, describe_machine
from evenstep.bench.options import DP_SIZES, GROUPS, QUICK_SIZES
from evenstep.bench.options import scale as add_arguments
from evenstep.bench.scale_measures import ALGORITHMS, Study
from evenstep.bench.scale_network import Network
from evenstep.bench.scale_windows import SEQ_LEN, Step

__all__ = ["add_arguments", "as_text", "groups_begin", "measure", "run"]


IN_ALL = ["--quick"]


def run(args: argparse.Namespace) -> int:
    """Plan what ``args`` says, print it on stdout, and return the exit status."""
    if args.plot is not None and find_spec("matplotlib") is None:
        print(
            "evenstep bench scale: --plot draws with matplotlib: pip install 'evenstep[cli]'", file=sys.stderr
        )
        return 2
    try:
        result = measure(
            dp_sizes=tuple(args.dp_sizes or (QUICK_SIZES if args.quick else DP_SIZES)),
            groups=tuple(args.groups),
            micro_batches=args.micro_batches,
            step_seconds=args.step_seconds,
            alpha=args.alpha_us * 1e-6,
            beta=8 / (args.gbit * 1e9),
            limit=args.limit,
            seed=args.seed,
            show=sys.stderr.isatty(),
        )
    except ValueError as error:
        print(f"evenstep bench scale: {error}", file=sys.stderr)
        return 2
    if args.plot is not None:
        from evenstep.bench.scale_picture import draw

        draw(args.plot, result)
    print(json.dumps(result, indent=1) if args.json else as_text(result))
    return 0


def measure(
    *,
    dp_sizes: tuple[int, ...] = DP_SIZES,
    groups: tuple[int, ...] = GROUPS,
    micro_batches: int = 4,
    step_seconds: float = 10.0,
    alpha: float = 20e-6,
    beta: float = 8 / 25e9,
    limit: float = 30.0,
    seed: int = 0,
    show: bool = False,
) -> dict[str, Any]:
    """Plan one step for each of ``dp_sizes``, over all ranks and in each of ``groups``; see `as_text` for what is what.

    Raises:
        ValueError: A number of ranks is not a multiple of the groups that are smaller.
    """
    _check(dp_sizes, groups)
    step = Step.draw(max(dp_sizes), micro_batches, seed)
    study = Study(step, Network(alpha=alpha, beta=beta), step_seconds, limit, _told if show else _silent)
    planning = study.planning(dp_sizes)
    found = study.groups(planning, groups)
    study.progress("")
    return {
        "machine": describe_machine(),
        "seed": seed,
        "micro_batches": micro_batches,
        "seq_len": SEQ_LEN,
        "step_seconds": step_seconds,
        "alpha_seconds": alpha,
        "beta_seconds": beta,
        "limit_seconds": limit,
        "planning": planning,
        "jobs": found,
        "groups_begin": groups_begin(found, "best"),
        "groups_begin_apart": groups_begin(found, "best_apart"),
    }


def _check(dp_sizes: tuple[int, ...], groups: tuple[int, ...]) -> None:
    for size in dp_sizes:
        if size < 2:
            raise ValueError(f"--dp-sizes has {size}: there is nothing to balance; give at least 2 ranks")
        for group in groups:
            if group < 2:
                raise ValueError(f"--groups has {group}: a group needs at least 2 ranks")
            if group < size and size % group:
                raise ValueError(
                    f"{size} ranks are no whole number of groups of {group}: leave one of them out"
                )


def groups_begin(jobs: list[dict[str, Any]], best: str) -> int | None:
    """The fewest ranks for which groups are the ``best`` way; None if they never are."""
    for job in jobs:
        if job["ways"][job[best]]["group"] < job["dp_size"]:
            return int(job["dp_size"])
    return None


def _begin(dp_size: int | None) -> str:
    return "never, up to here" if dp_size is None else f"at {dp_size:,} ranks"


def _told(text: str) -> None:
    print(f"\r\x1b[K{text}", end="\r", file=sys.stderr, flush=True)


def _silent(text: str) -> None:
    """Nobody watches."""


def as_text(r: dict[str, Any]) -> str:
    """Two tables and the rule."""
    lines = [
        as_line(r["machine"]),
        f"seed {r['seed']}; a step of {r['micro_batches']} micro-batches a rank, rows of {r['seq_len']:,} tokens, "
        "long-context lengths; cost 24576 L + L^2",
        "",
        "One plan over all ranks, measured here: processor seconds of one core",
        "                            seconds                    imbalance",
        "     dp    samples       lpt   refine     auto      lpt  refine    auto   bound",
    ]
    for row in r["planning"]:
        seconds = " ".join(
            f"{'~' if name in row['extrapolated'] else ''}{row['seconds'][name]:.3g}".rjust(8)
            for name in ALGORITHMS
        )
        scores = " ".join(_score(row["imbalance"][name]) for name in ALGORITHMS)
        lines.append(f"{row['dp_size']:7,} {row['samples']:10,}  {seconds}  {scores} {_score(row['bound'])}")
    if any(row["extrapolated"] for row in r["planning"]):
        lines.append(
            "  ~ would take too long to wait for: extrapolated by the samples to the power 1.2, no layout"
        )
    lines += [
        "",
        "Balance over all ranks and inside groups, for each rank and step",
        "                          processor seconds        counted from real plans              alpha-beta model",
        "                   imba-   plan   merge   columns    plan    sent         mes-  memory    talk    data    step",
        "     dp  balanced  lance      s       s        MB      MB      MB  peers sages      MB       s       s       s",
    ]
    for job in r["jobs"]:
        lines.append(f"{job['dp_size']:7,}  no        {job['unbalanced']:6.4f}".rstrip())
        for number, way in enumerate(job["ways"]):
            lines.append(_way(way, job["dp_size"], best=number == job["best"]))
    return "\n".join(
        [
            *lines,
            "",
            f"Groups begin {_begin(r['groups_begin'])}, where the least step = max({r['step_seconds']:g} s x imbalance + "
            "plan, data) is that of groups (*);",
            f"{_begin(r['groups_begin_apart'])} if another process plans, so that step = max({r['step_seconds']:g} s x "
            "imbalance, data).",
            f"  {r['step_seconds']:g} s is an even step (--step-seconds). The plan is added because it may cost the "
            "planner's training thread as much.",
            "  data = merge + plan + talk, hidden while it is shorter than the step; talk is a model, not measured: headers "
            "of all ranks,",
            f"  columns, plan, {r['micro_batches']} exchanges at alpha = {r['alpha_seconds'] * 1e6:g} us a message "
            f"(--alpha-us) and beta = {r['beta_seconds'] * 1e9:.3g} ns a byte (--gbit).",
        ]
    )


def _score(value: float | None) -> str:
    return "      -" if value is None else f"{value:7.4f}"


def _way(way: dict[str, Any], dp_size: int, *, best: bool) -> str:
    whole = way["group"] == dp_size
    name = "all" if whole else f"in {way['group']:,}"
    name += " lpt" if way["algorithm"] == "lpt" else ""
    mb = [way[key] / 1e6 for key in ("gathered_bytes", "plan_bytes", "sent_bytes", "memory_bytes")]
    return (
        f"{'':7}  {name:<9} {way['imbalance']:6.4f} {way['plan_seconds']:6.3f} {way['merge_seconds']:7.4f} "
        f"{mb[0]:9.3f} {mb[1]:7.3f} {mb[2]:7.3f} {way['peers']:6.1f} {way['messages']:5d} {mb[3]:7.2f} "
        f"{sum(way['talk_seconds'].values()):7.3f} {way['data_seconds']:7.3f} {way['step_seconds']:7.3f}"
        f"{' *' if best else ''}"
    )
