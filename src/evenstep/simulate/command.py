"""``evenstep simulate``: the command line of the simulator."""

from __future__ import annotations

import argparse
import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

from evenstep.cost import DEFAULT_COST, CostModel, LinearQuadraticCost, TransformerCost
from evenstep.errors import Infeasible
from evenstep.plan import Algorithm
from evenstep.progress import no_progress, terminal_progress
from evenstep.simulate.lengths import read_lengths
from evenstep.simulate.settings import Oversized, Reference, Settings, usual_seq_len
from evenstep.simulate.simulation import simulate
from evenstep.simulate.summary import as_json, as_text

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``evenstep simulate`` to ``parser``."""
    parser.description = (
        "What balance would bring: sampled optimizer steps of a file of document lengths, laid out as a packing "
        "loader would and as evenstep would, for several numbers of ranks, windows and algorithms."
    )
    parser.add_argument(
        "lengths", type=Path, metavar="LENGTHS", help=".npy, .csv, .tsv, .jsonl, .parquet or a Megatron .idx"
    )
    parser.add_argument(
        "--column", help="column or key of the lengths (default: the only one, or a usual name)"
    )
    layout = parser.add_argument_group("layout")
    layout.add_argument(
        "--seq-len",
        type=int,
        help="tokens of a row (default: the power of two that holds 99%% of the documents)",
    )
    layout.add_argument(
        "--oversized",
        choices=get_args(Oversized),
        default="truncate",
        help="what happens to documents longer than a row (default: %(default)s)",
    )
    layout.add_argument(
        "--dp-sizes",
        type=int,
        nargs="+",
        default=[8, 64],
        metavar="N",
        help="data-parallel ranks (default: 8 64)",
    )
    layout.add_argument(
        "--windows",
        type=int,
        nargs="+",
        default=[1, 2, 4, 8],
        metavar="N",
        help="micro-batches planned together (default: 1 2 4 8)",
    )
    layout.add_argument(
        "--algorithms", nargs="+", default=["refine", "auto"], choices=get_args(Algorithm), metavar="NAME",
        help=f"of {', '.join(get_args(Algorithm))} (default: refine auto)",
    )  # fmt: skip
    layout.add_argument(
        "--micro-batch-size",
        type=int,
        default=1,
        metavar="N",
        help="rows of a micro-batch (default: %(default)s)",
    )
    layout.add_argument(
        "--accumulation-steps", type=int, metavar="N",
        help="micro-batches of a rank and step (default: the largest window)",
    )  # fmt: skip
    layout.add_argument(
        "--fill", type=float, help="end a step at this share of its room (default: as full as it gets)"
    )
    layout.add_argument(
        "--reference", choices=get_args(Reference), default="shuffled",
        help="where documents are before planning: packed rows in random order, or as evenstep's sampler puts them, or rows "
        "that are filled as documents come, what `evenstep demo` compares with (default: %(default)s)",
    )  # fmt: skip
    layout.add_argument(
        "--order",
        choices=("shuffled", "sequential"),
        default="shuffled",
        help="in which documents are read (default: %(default)s)",
    )
    cost = parser.add_argument_group("cost")
    which = cost.add_mutually_exclusive_group()
    which.add_argument(
        "--cost",
        metavar="A,B",
        help=f"cost of a document of L tokens is A*L + B*L^2 (default: {DEFAULT_COST.a:g},{DEFAULT_COST.b:g}, a dense "
        "transformer of width 4096)",
    )
    which.add_argument(
        "--model", metavar="NAME=N,...",
        help="FLOPs of a transformer, such as hidden=4096,layers=32,ffn=14336,vocab=128256,heads=32,kv_heads=8",
    )  # fmt: skip
    cost.add_argument("--padded", action="store_true", help="the model computes the padding of rows as well")
    cost.add_argument(
        "--sync", choices=("micro_batch", "step"), default="micro_batch",
        help="where ranks wait for each other: FSDP, ZeRO-3 and pipelines at every micro-batch, DDP once a step "
        "(default: %(default)s)",
    )  # fmt: skip
    cost.add_argument(
        "--bytes-per-token",
        type=int,
        default=8,
        metavar="N",
        help="payload that moves with a token (default: %(default)s)",
    )
    cost.add_argument(
        "--min-gain",
        type=float,
        default=0.0,
        help="gain below which the planner moves nothing (default: %(default)s)",
    )
    sample = parser.add_argument_group("sample and output")
    sample.add_argument("--steps", type=int, default=5, metavar="N", help="steps to sample (default: 5)")
    sample.add_argument(
        "--consecutive", action="store_true", help="the first steps of the epoch, not some spread over it"
    )
    sample.add_argument(
        "--seconds", type=float, default=20.0, metavar="S",
        help="sample fewer steps once planning has taken this long (default: 20)",
    )  # fmt: skip
    sample.add_argument("--seed", type=int, default=0, help="of the random orders (default: %(default)s)")
    sample.add_argument(
        "--out", type=Path, metavar="FILE", help="write a report (.html) and its pictures (.png)"
    )
    sample.add_argument("--json", action="store_true", help="print JSON instead of a table")
    sample.add_argument("--quiet", action="store_true", help="no progress bar")


def run(args: argparse.Namespace) -> int:
    """Simulate what ``args`` says, print the outcome on stdout, and return the exit status."""
    progress = no_progress if args.quiet else terminal_progress
    try:
        _check_out(args.out)
        lengths = read_lengths(args.lengths, column=args.column, progress=progress)
        simulation = simulate(lengths, _settings(args, usual_seq_len(lengths)), progress=progress)
        if args.out is not None:
            from evenstep.simulate.report import write_report

            written = write_report(args.out, simulation, lengths, source=args.lengths.name)
            print("wrote", ", ".join(map(str, written)), file=sys.stderr)
    except (OSError, ImportError, ValueError, TypeError, Infeasible) as error:
        print(f"evenstep simulate: {error}", file=sys.stderr)
        return 2
    print(json.dumps(as_json(simulation), indent=2) if args.json else as_text(simulation))
    return 0


def _check_out(path: Path | None) -> None:
    if path is None:
        return
    if path.suffix.lower() not in (".html", ".png"):
        raise ValueError(f"--out {path} ends with {path.suffix!r}: a report is written as .html or .png")
    try:
        import_module("matplotlib")  # before the work, not after it
    except ImportError:
        raise ImportError(
            "--out draws with matplotlib, which is not installed; pip install 'evenstep[cli]', "
            "or leave --out away for the table alone"
        ) from None


def _settings(args: argparse.Namespace, seq_len: int) -> Settings:
    return Settings(
        seq_len=seq_len if args.seq_len is None else args.seq_len,
        dp_sizes=tuple(args.dp_sizes),
        windows=tuple(args.windows),
        algorithms=tuple(args.algorithms),
        micro_batch_size=args.micro_batch_size,
        accumulation_steps=max(args.windows) if args.accumulation_steps is None else args.accumulation_steps,
        cost=_cost(args.cost, args.model, padded=args.padded),
        sync=args.sync,
        oversized=args.oversized,
        fill=args.fill,
        reference=args.reference,
        order=args.order,
        seed=args.seed,
        steps=args.steps,
        consecutive=args.consecutive,
        seconds=args.seconds,
        bytes_per_token=args.bytes_per_token,
        min_gain=args.min_gain,
    )


def _cost(coefficients: str | None, model: str | None, *, padded: bool) -> CostModel:
    if model is not None:
        return TransformerCost(**_dimensions(model), padded=padded)
    a, b = DEFAULT_COST.a, DEFAULT_COST.b
    if coefficients is not None:
        try:
            a, b = map(float, coefficients.split(","))
        except ValueError:
            raise ValueError(f"--cost {coefficients} is not A,B: two numbers, such as 24576,1") from None
    return LinearQuadraticCost(a, b, padding=a if padded else 0.0)


def _dimensions(model: str) -> dict[str, Any]:
    known = [name for name in TransformerCost.__dataclass_fields__ if name != "padded"]
    dimensions: dict[str, Any] = {}
    for part in model.split(","):
        name, _, value = part.partition("=")
        if name.strip() not in known:
            raise ValueError(f"--model has no {name.strip()!r}; it knows {', '.join(known)}")
        dimensions[name.strip()] = _value(value.strip())
    missing = [name for name in ("hidden", "layers", "ffn", "vocab") if name not in dimensions]
    if missing:
        raise ValueError(f"--model needs {', '.join(missing)} as well, such as hidden=4096,layers=32,...")
    return dimensions


def _value(text: str) -> int | bool | str:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    return int(text) if text.lstrip("-").isdigit() else text
