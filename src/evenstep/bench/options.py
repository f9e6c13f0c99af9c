"""The options of every benchmark, in a file of their own: their help need not wait for torch."""

from __future__ import annotations

import argparse
from pathlib import Path

__all__ = [
    "DP_SIZES",
    "GROUPS",
    "KIB",
    "PARTS",
    "QUICK_SIZES",
    "STEP_SAMPLES",
    "broadcast",
    "exchange",
    "pack",
    "plan",
    "resume",
    "scale",
    "soak",
    "stall",
    "train",
    "workers",
]

PARTS = ("quality", "movement", "speed", "growth", "interference")  # of `plan`
KIB = (24, 192, 4096, 16384, 65536)  # of a batch, in `broadcast`
STEP_SAMPLES = 64  # of `workers`, and so samples per window
DP_SIZES = (8, 64, 512, 1024, 4096, 16_384)  # of `scale`
QUICK_SIZES = (8, 64, 512)
GROUPS = (8, 64, 512)


def plan(parser: argparse.ArgumentParser) -> None:
    """The options of ``evenstep bench plan``."""
    from evenstep.bench.plan_cases import CASES

    parser.add_argument("--draws", type=int, default=10, metavar="N", help="windows per case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", nargs="*", choices=sorted(CASES), metavar="CASE", help="default: all")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS[:3], help="what to measure")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the growth of time (.svg, .png)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def exchange(parser: argparse.ArgumentParser) -> None:
    """The options of ``evenstep bench exchange``."""
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[2, 4], metavar="N",
        help="local ranks to start, one run for each number; under torchrun its ranks are used",
    )  # fmt: skip
    parser.add_argument(
        "--mib", type=float, nargs="+", default=[4.0, 8.0, 32.0], metavar="N", help="MiB that each rank sends"
    )
    parser.add_argument(
        "--sample-kib", type=int, nargs="+", default=[128, 16, 2], metavar="N", help="sizes of a sample"
    )
    parser.add_argument("--metadata", type=int, default=2000, metavar="N", help="samples a rank in a gather")
    parser.add_argument("--repeats", type=int, default=15, metavar="N", help="turns of each contender")
    parser.add_argument(
        "--huge-gib", type=float, metavar="N",
        help="instead: one exchange of N GiB a rank (needs twice that in memory, a rank), every sample checked",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def broadcast(parser: argparse.ArgumentParser) -> None:
    """The options of ``evenstep bench broadcast``."""
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="ranks of the replica, over gloo")
    parser.add_argument("--kib", type=int, nargs="+", default=list(KIB), metavar="N", help="KiB of a batch")
    parser.add_argument("--repeats", type=int, default=40, metavar="N", help="batches of each size")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def stall(parser: argparse.ArgumentParser) -> None:
    """The options of ``evenstep bench stall``."""
    parser.add_argument(
        "--ranks",
        type=int,
        default=2,
        metavar="N",
        help="data-parallel ranks, over gloo (default: %(default)s)",
    )
    parser.add_argument(
        "--compute-ms",
        type=float,
        default=50.0,
        metavar="MS",
        help="compute per micro-batch, simulated (default: %(default)s)",
    )
    parser.add_argument(
        "--read-ms",
        type=float,
        default=5.0,
        metavar="MS",
        help="reading time of a sample (default: %(default)s)",
    )
    parser.add_argument(
        "--micro-batches",
        type=int,
        default=60,
        metavar="N",
        help="micro-batches to measure (default: %(default)s)",
    )
    parser.add_argument(
        "--seq-len", type=int, default=8192, metavar="N", help="tokens of a row (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the lengths (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def workers(parser: argparse.ArgumentParser) -> None:
    """The options of ``evenstep bench workers``."""
    parser.add_argument("--workers", type=int, default=4, metavar="N", help="threads or processes")
    parser.add_argument("--read-ms", type=float, default=8.0, metavar="MS", help="reading time of a sample")
    parser.add_argument("--steps", type=int, default=16, metavar="N", help=f"steps of {STEP_SAMPLES} samples")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="runs of each measurement")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def resume(parser: argparse.ArgumentParser) -> None:
    """The options of ``evenstep bench resume``."""
    parser.add_argument("--samples", type=int, default=10**12, metavar="N", help="samples of the epoch")
    parser.add_argument("--position", type=int, default=10**11, metavar="N", help="where to restore")
    parser.add_argument("--global-batch-size", type=int, default=1024, metavar="N")
    parser.add_argument(
        "--fast-forward", type=int, default=2_000_000, metavar="N",
        help="items that torchdata's SamplerWrapper fast-forwards over; its time at the position is scaled up",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="runs of each measurement")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def pack(parser: argparse.ArgumentParser) -> None:
    """The options of ``evenstep bench pack``."""
    parser.add_argument("--seq-len", type=int, default=8192, help="tokens of a row (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=8, help="rows of a micro-batch (default: %(default)s)")
    parser.add_argument(
        "--document", type=int, default=500, help="mean tokens of a document (default: %(default)s)"
    )
    parser.add_argument("--labels", action="store_true", help="samples bring labels of their own")
    parser.add_argument("--shifted", action="store_true", help="labels are shifted by the packer")
    parser.add_argument(
        "--repeats", type=int, default=100, help="runs of each; the best counts (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the lengths (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")


def soak(parser: argparse.ArgumentParser) -> None:
    """The options of ``evenstep bench soak``."""
    parser.add_argument("--minutes", type=float, default=0.5, metavar="N", help="how long; a soak takes 30")
    parser.add_argument(
        "--ranks",
        type=int,
        default=4,
        metavar="N",
        help="local ranks to start; under torchrun its ranks are used",
    )
    parser.add_argument(
        "--pause-ms",
        type=float,
        default=40.0,
        metavar="MS",
        help="compute per micro-batch, simulated by a pause",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--json", action="store_true", help="print JSON instead of text, with every look at a rank"
    )


def scale(parser: argparse.ArgumentParser) -> None:
    """The options of ``evenstep bench scale``."""
    parser.add_argument(
        "--dp-sizes", type=int, nargs="+", metavar="N", help=f"data-parallel ranks (default: {DP_SIZES})"
    )
    parser.add_argument(
        "--groups", type=int, nargs="+", default=list(GROUPS), metavar="N",
        help="ranks of a balance group; 8 is a node of 8 (default: 8 64 512)",
    )  # fmt: skip
    parser.add_argument("--micro-batches", type=int, default=4, metavar="N", help="micro-batches of a step")
    parser.add_argument(
        "--step-seconds", type=float, default=10.0, metavar="S",
        help="a perfectly even step (default: 10; 4 rows of 32,768 tokens of a 7B model on an H100 take longer)",
    )  # fmt: skip
    parser.add_argument("--alpha-us", type=float, default=20.0, metavar="US", help="network: a message")
    parser.add_argument("--gbit", type=float, default=25.0, metavar="N", help="network: Gbit/s of a rank")
    parser.add_argument("--limit", type=float, default=30.0, metavar="S", help="longest plan that is tried")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it: .png or .svg")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_SIZES} ranks only")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def train(parser: argparse.ArgumentParser) -> None:
    """The options of ``evenstep bench train``."""
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="local ranks, over gloo")
    parser.add_argument(
        "--corpus", type=Path, metavar="DIR", help="folder of text files (default: Python's standard library)"
    )
    parser.add_argument("--seq-len", type=int, metavar="N", help="tokens of a row (default: 4096)")
    parser.add_argument(
        "--micro-batch-size", type=int, default=2, metavar="N",
        help="rows of a micro-batch, or documents where each is padded (default: 2)",
    )  # fmt: skip
    parser.add_argument(
        "--documents", type=int, metavar="N", help="documents of an optimizer step (default: 24)"
    )
    parser.add_argument("--steps", type=int, metavar="N", help="optimizer steps of a round (default: 2)")
    parser.add_argument("--rounds", type=int, metavar="N", help="rounds (default: 3)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="rows of 1,024 tokens, 2 rounds of 2 steps")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
