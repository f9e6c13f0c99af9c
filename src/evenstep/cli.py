"""The ``evenstep`` command: finds the subcommand that was asked for, and imports nothing else.

Options are declared without torch, so that every help answers at once; what runs is imported when it runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec

import evenstep

__all__ = ["main"]

COMMANDS = {
    "demo": "train a small model on real text, before and after balancing, and check every claim",
    "simulate": "what balance would bring to a file of document lengths",
    "lengths": "scan a dataset once, so that its lengths are known ahead",
    "trace": "what every stage did when, on all ranks, as a timeline for Perfetto",
    "bench": "benchmarks to run on your own machine",
}
BENCHES = {
    "plan": "how long a plan takes and how close to perfect it is",
    "exchange": "payload that moves between ranks, in bytes per second",
    "broadcast": "a batch on its way to a model-parallel peer, beside the bare bytes",
    "stall": "how long a training step waits for its data",
    "workers": "how much faster samples are read by threads and processes",
    "resume": "how long a resume takes, wherever training stopped",
    "pack": "packing and collating, in tokens per second",
    "soak": "whether a loader that runs for long stays right, and its memory flat",
    "scale": "planning, bytes and memory on up to 16,384 ranks, and where balance groups should begin",
    "train": "tokens per second of training, beside padding, packing per rank and length groups",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Args:
        argv: Arguments after the program's name; None takes those of the process.

    Returns:
        The exit code: 0 for success, 1 if a check failed, 2 for bad usage, 130 after Ctrl-C.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _parser(arguments)
    try:
        args = parser.parse_args(arguments)
    except SystemExit as done:  # argparse has already said why
        return done.code if isinstance(done.code, int) else 2
    if args.module is None:
        args.parser.print_help()
        return 2
    try:
        return _run(args)
    except KeyboardInterrupt:
        print("evenstep: interrupted", file=sys.stderr)
        return 130


def _run(args: argparse.Namespace) -> int:
    if args.module == "all":
        return max(_run_bench(name) for name in _present("evenstep.bench", BENCHES))
    code: int = import_module(args.module).run(args)
    return code


def _run_bench(name: str) -> int:
    """One benchmark without options, or in the short form that its ``IN_ALL`` names."""
    print(f"evenstep bench {name}", flush=True)
    module = import_module(f"evenstep.bench.{name}")
    parser = argparse.ArgumentParser(prog=f"evenstep bench {name}")
    module.add_arguments(parser)
    code: int = module.run(parser.parse_args(getattr(module, "IN_ALL", [])))
    print()
    return code


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of everything, with the options of the one subcommand that ``arguments`` name."""
    parser = argparse.ArgumentParser(
        prog="evenstep",
        description="Packed micro-batches in which every data-parallel rank has the same amount of work.",
        epilog="evenstep COMMAND --help tells the options of a command.",
    )
    parser.add_argument("--version", action="version", version=f"evenstep {evenstep.__version__}")
    parser.set_defaults(module=None, parser=parser)
    words = [word for word in arguments if not word.startswith("-")][:2]
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, text in _present("evenstep", COMMANDS).items():
        command = commands.add_parser(name, help=text, description=_sentence(text))
        if name == "bench":
            _add_benches(command, words)
        elif words[:1] == [name]:
            import_module(f"evenstep.{name}").add_arguments(command)
            command.set_defaults(module=f"evenstep.{name}")
    return parser


def _add_benches(command: argparse.ArgumentParser, words: Sequence[str]) -> None:
    command.set_defaults(parser=command)
    benches = command.add_subparsers(title="benchmarks", metavar="NAME")
    for name, text in _present("evenstep.bench", BENCHES).items():
        bench = benches.add_parser(name, help=text, description=_sentence(text))
        if list(words) == ["bench", name]:
            getattr(import_module("evenstep.bench.options"), name)(bench)
            bench.set_defaults(module=f"evenstep.bench.{name}")
    everything = benches.add_parser(
        "all",
        help="all of them, one after the other",
        description="Run every benchmark without options, the long ones with --quick.",
    )
    everything.set_defaults(module="all")


def _present(package: str, names: Mapping[str, str]) -> dict[str, str]:
    """Those that are installed; a distribution may leave some out."""
    return {name: text for name, text in names.items() if _exists(f"{package}.{name}")}


def _exists(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of its package
        return False


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


if __name__ == "__main__":
    sys.exit(main())
