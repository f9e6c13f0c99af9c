"""How good and how fast planning is, beside other planners, in one run: ``evenstep bench plan``."""

from __future__ import annotations

import argparse
import json
from typing import Any

from evenstep.bench.machine import as_line, describe_machine
from evenstep.bench.options import plan as add_arguments
from evenstep.bench.plan_cases import CASES, COST_MODEL
from evenstep.bench.plan_figure import save_growth
from evenstep.bench.plan_measures import compare, growth, interference, movement, speed
from evenstep.bench.plan_peers import PEERS, optional_peers

__all__ = ["add_arguments", "compare", "growth", "interference", "movement", "run", "speed"]


def run(args: argparse.Namespace) -> int:
    """Measure what ``args`` says and print it on stdout; the exit status is 1 where a peer beats ``"auto"``."""
    seeds = range(args.seed, args.seed + args.draws)
    libraries, unusable = optional_peers()
    chosen = [CASES[name] for name in args.cases] if args.cases else list(CASES.values())
    result: dict[str, Any] = {
        "machine": describe_machine("verl", "trl", "grain", "binpacking"),
        "seed": args.seed,
        "cost_model": COST_MODEL,
        "unusable_peers": unusable,
    }
    if "quality" in args.parts:
        result["quality"] = [compare(case, seeds, PEERS | libraries) for case in chosen]
    if "movement" in args.parts:
        result["movement"] = [
            movement(case, seeds) for case in chosen if case.fill and case.micro_batches > 1
        ]
    if "speed" in args.parts:
        result["speed"] = speed(args.seed)
    if "growth" in args.parts or args.plot:
        result["growth"] = growth(args.seed)
    if "interference" in args.parts:
        result["interference"] = interference(args.seed)
    print(json.dumps(result, indent=1) if args.json else _text(result))
    if args.plot:
        save_growth(result["growth"], as_line(result["machine"]), args.plot)
    return int(any(row["better_peers"] or row["fallbacks"] for row in result.get("quality", [])))


def _text(result: dict[str, Any]) -> str:
    lines = [as_line(result["machine"]), f"seed {result['seed']}, cost {result['cost_model']}"]
    for row in result.get("quality", []):
        lines.append(
            f"\n{row['case']}: {row['samples']} samples, dp {row['dp_size']} x {row['micro_batches']} micro-batches, "
            f"{row['draws']} draws, bound {row['bound']:.4f}, auto over bound median {row['over_bound_median']:.4f} "
            f"max {row['over_bound_max']:.4f}, fallbacks {row['fallbacks']}"
            + (f"  BEATEN BY {row['better_peers']}" if row["better_peers"] else "")
        )
        for name, planner in row["planners"].items():
            value = planner["imbalance"]
            score = f"{'-':>9}" if value is None else f"{value:9.5f}"
            broke = f"  broke the limit {planner['broke_limit']}x" if planner["broke_limit"] else ""
            most = f" (max {planner['max_seconds'] * 1e3:.0f})" if name == "auto" else ""
            lines.append(f"  {name:24}{score} {planner['seconds'] * 1e3:9.2f} ms{most}{broke}")
        lines += [f"  {name:24} failed: {why}" for name, why in row["failed_peers"].items()]
    if "quality" in result:
        lines.append(f"\n{_verdict(result['quality'])}")
    lines += [f"{name} cannot be used: {why}" for name, why in result["unusable_peers"].items()]
    for row in result.get("movement", []):
        for name in ("refine", "auto"):
            if name in row:
                part = row[name]
                lines.append(
                    f"moved {row['case']:18} dp {row['dp_size']:3} {name:7} tokens {part['moved_median']:.3f} "
                    f"(max {part['moved_max']:.3f}), over bound {part['over_bound_median']:.4f} "
                    f"(max {part['over_bound_max']:.4f})"
                )
    if "speed" in result:
        fast = result["speed"]
        lines.append(
            f"\n8,572 samples into 1,024 rows: bare heap LPT {fast['heap_lpt_seconds'] * 1e3:.1f} ms, lpt "
            f"{fast['lpt_ratio']:.2f}x, auto {fast['auto_ratio']:.2f}x"
        )
    for point in result.get("growth", []):
        lines.append(
            f"{point['samples']:9,} samples into {point['rows']:6,} rows: bare heap LPT "
            f"{point['heap_lpt_seconds']:6.3f} s, lpt {point['lpt_seconds']:6.3f} s, auto {point['auto_seconds']:6.3f} s"
        )
    if "interference" in result:
        part = result["interference"]
        lines.append(
            f"one plan per {part['step_seconds']:g} s slows small kernels by {part['slowdown_median']:.2%} "
            f"(median of {part['runs']} paired runs)"
        )
    return "\n".join(lines)


def _verdict(quality: list[dict[str, Any]]) -> str:
    draws = sum(row["draws"] - row["unpackable"] for row in quality)
    peers = {name for row in quality for name in row["planners"]} - {"auto", "lpt"}
    beaten = [row["case"] for row in quality if row["better_peers"]]
    fallbacks = sum(row["fallbacks"] for row in quality)
    outcome = f"a peer beats auto in {', '.join(beaten)}" if beaten else "no peer beats auto within the limit"
    return f"{draws} windows of {len(quality)} cases, {len(peers)} peers: {outcome}; {fallbacks} fallbacks"
