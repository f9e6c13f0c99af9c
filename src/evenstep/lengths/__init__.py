"""``evenstep lengths``: scans a dataset once, so that its lengths are known ahead ever after.

Which file does what:

    named.py       what is scanned: MODULE:NAME on a command line
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from evenstep.config import LoaderConfig
from evenstep.errors import SampleError
from evenstep.lengths.named import named
from evenstep.progress import no_progress, terminal_progress
from evenstep.shown import shown

if TYPE_CHECKING:  # nodes need torch, for which --help does not wait
    from evenstep.nodes.fetch import Fetcher, Pending

__all__ = ["add_arguments", "run", "scan_lengths"]

_UNREAD = -1
_CHUNK = 1024  # samples between two marks that a restart can go on from
_ANY_LENGTH = 1 << 60
_MOST_TOLD = 5  # unreadable samples, by name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``evenstep lengths`` to ``parser``."""
    parser.description = (
        "Reads every sample once and writes how many tokens it has, for build_loader(metadata='lengths.npy'). "
        "Interrupted, it goes on where it stopped."
    )
    parser.add_argument(
        "dataset",
        metavar="MODULE:NAME",
        help="a dataset, or a function or class without arguments that makes one; FILE.py:NAME will do, too",
    )
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE.npy", help="where lengths go"
    )
    parser.add_argument(
        "--metadata-fn",
        metavar="MODULE:NAME",
        help="how a sample's tokens are counted (default: its input_ids)",
    )
    parser.add_argument("--num-workers", type=int, default=0, metavar="N", help="workers (default: none)")
    parser.add_argument(
        "--worker",
        choices=("process", "thread"),
        default="process",
        help="what they are (default: %(default)s)",
    )
    parser.add_argument(
        "--unreadable",
        choices=("error", "empty"),
        default="error",
        help="a sample that cannot be read stops the scan, or counts as empty, which a loader drops "
        "(default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Run ``evenstep lengths``: 0, or 1 with a message on stderr."""
    begin = time.perf_counter()
    unread: list[tuple[int, Exception]] = []
    try:
        dataset: Any = named(args.dataset)
        if isinstance(dataset, type) or (not hasattr(dataset, "__getitem__") and callable(dataset)):
            dataset = _called(dataset, args.dataset)
        metadata_fn: Any = None if args.metadata_fn is None else named(args.metadata_fn)
        lengths = scan_lengths(
            dataset,
            args.output,
            metadata_fn=metadata_fn,
            num_workers=args.num_workers,
            worker=args.worker,
            unreadable=args.unreadable,
            progress=lambda done, total: terminal_progress("samples", total, done),
            on_unreadable=lambda index, error: unread.append((index, error)),
        )
    except (ImportError, AttributeError, OSError, TypeError, ValueError, SampleError) as error:
        print(f"evenstep lengths: {error}", file=sys.stderr)
        return 1
    seconds = time.perf_counter() - begin
    total, longest = int(lengths.sum()), int(lengths.max(initial=0))
    mean = total / max(1, len(lengths))
    if unread:
        print(f"evenstep lengths: {_told(unread)}", file=sys.stderr)
    print(
        f"{args.output}: {len(lengths)} samples, {total} tokens, mean {mean:.1f}, longest {longest}, "
        f"{int((lengths == 0).sum())} empty; {seconds:.1f} s"
    )
    return 0


def scan_lengths(
    dataset: Any,
    output: str | os.PathLike[str],
    *,
    metadata_fn: Callable[[Any], Any] | None = None,
    num_workers: int = 0,
    worker: str = "process",
    unreadable: str = "error",
    progress: Callable[[int, int], Any] | None = None,
    on_unreadable: Callable[[int, Exception], object] | None = None,
) -> npt.NDArray[np.int64]:
    """Write the tokens of every sample to ``output``, an ``.npy`` file of int64 ``[len(dataset)]``.

    While it runs the lengths grow in ``output`` + ``.part``; a scan that was stopped reads only what is missing there.

    Args:
        dataset: Anything with ``dataset[i]`` and ``len``.
        output: The file.
        metadata_fn: ``sample -> int | SampleMetadata``; default ``len(sample["input_ids"])``.
        num_workers: Workers that read; 0: none.
        worker: ``"process"`` or ``"thread"``.
        unreadable: A sample that cannot be read is an ``"error"``, or counts as ``"empty"``.
        progress: ``(done, total) -> context manager of advance(samples)``.
        on_unreadable: Called with the index and the error of each sample that now counts as empty.

    Returns:
        What was written.

    Raises:
        SampleError: A sample cannot be read; what has been read is kept.
        TypeError: The dataset has no length.
        ValueError: The unfinished file is of another dataset, or ``output`` does not end with ``.npy``.
    """
    from evenstep.nodes.fetch import Unreadable

    final = Path(output)
    if final.suffix.lower() != ".npy":
        raise ValueError(
            f"{final} ends with {final.suffix!r}, but lengths are written in the format of .npy, and readers go by the "
            f"ending; write to {final.with_suffix('.npy')}"
        )
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise TypeError(
            f"{type(dataset).__name__} has no len() and [index]: only a map-style dataset can be scanned"
        )
    part = final.with_name(final.name + ".part")
    lengths = _open_part(part, len(dataset))
    missing = np.flatnonzero(lengths == _UNREAD)
    measured = _Measured(dataset, metadata_fn)
    fetcher = _fetcher(measured, num_workers, worker)
    done, total = len(dataset) - len(missing), len(dataset)
    try:
        with no_progress("", total) if progress is None else progress(done, total) as advance:
            for chunk, values in _chunks(fetcher, missing):
                for index, value in zip(chunk.tolist(), values, strict=True):
                    if isinstance(value, Unreadable):
                        if unreadable == "error":
                            error = value.error
                            raise SampleError(
                                f"sample {index}: {type(error).__name__}: {error}; {part} keeps what has been read, the "
                                "same command goes on from there",
                                index,
                            ) from error
                        if on_unreadable is not None:
                            on_unreadable(index, value.error)
                        value = 0
                    lengths[index] = value
                advance(len(chunk))
    finally:
        fetcher.close()
        lengths.flush()
    result = np.array(lengths)
    del lengths
    part.replace(final)
    return result


def _told(unread: list[tuple[int, Exception]]) -> str:
    """The first of the samples that could not be read, each with its error on one line."""
    first = [
        f"sample {index} ({' '.join(f'{type(error).__name__}: {error}'.split())})"
        for index, error in unread[:_MOST_TOLD]
    ]
    more = [f"{len(unread) - len(first)} more"] * (len(unread) > len(first))
    return f"{len(unread)} unreadable, written as empty: {', '.join([*first, *more])}"


def _chunks(
    fetcher: Fetcher, missing: npt.NDArray[np.intp]
) -> Iterator[tuple[npt.NDArray[np.intp], list[Any]]]:
    """The lengths of ``missing``, the next chunk under way while one is written."""
    from evenstep.nodes.sample_seed import SeedKey

    chunks = [missing[k : k + _CHUNK] for k in range(0, len(missing), _CHUNK)]
    asked: list[Pending] = []
    for k, chunk in enumerate(chunks):
        while len(asked) < min(k + 2, len(chunks)):
            asked.append(fetcher.submit(chunks[len(asked)].tolist(), SeedKey()))
        yield chunk, asked[k].take(len(chunk))


def _fetcher(dataset: Any, num_workers: int, worker: str) -> Fetcher:
    from evenstep.nodes.fetch import InlineFetcher, ThreadFetcher
    from evenstep.nodes.worker_processes import ProcessFetcher

    if not num_workers:
        return InlineFetcher(dataset)
    kind = ProcessFetcher if worker == "process" else ThreadFetcher
    return kind(dataset, num_workers, name="evenstep-lengths")


class _Measured:
    """The dataset, of which only lengths leave a worker."""

    def __init__(self, dataset: Any, metadata_fn: Callable[[Any], Any] | None) -> None:
        from evenstep.nodes.describe import Describer

        self._dataset = dataset
        self._describe = Describer(LoaderConfig(seq_len=_ANY_LENGTH), metadata_fn)

    def __getitem__(self, index: int) -> int:
        return int(self._describe(self._dataset[index]).metadata.tokens)


def _open_part(path: Path, size: int) -> np.memmap[Any, np.dtype[np.int64]]:
    if not path.exists():
        created: np.memmap[Any, np.dtype[np.int64]] = np.lib.format.open_memmap(
            path, mode="w+", dtype=np.int64, shape=(size,)
        )
        created[:] = _UNREAD
        return created
    mapped: np.memmap[Any, np.dtype[np.int64]] = np.lib.format.open_memmap(path, mode="r+")
    if mapped.shape != (size,) or mapped.dtype != np.int64:
        found = f"an unfinished scan of {len(mapped)} samples"
        if mapped.ndim != 1 or mapped.dtype != np.int64:
            found = "no unfinished scan"
        raise ValueError(
            f"{path} is {found}, the dataset has {size}: it is of another dataset. Delete it to begin again."
        )
    return mapped


def _called(make: Callable[[], Any], path: str) -> Any:
    """The dataset that ``make`` makes, or what it needs, told by the name that the user knows."""
    try:
        signature(make).bind()
    except TypeError as error:
        raise TypeError(
            f"{path} is {shown(make)}, which cannot be called without arguments ({error}): name a dataset, or a "
            "function without arguments that returns one"
        ) from None
    except ValueError:  # some builtins do not tell their arguments
        pass
    return make()
