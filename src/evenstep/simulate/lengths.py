"""Document lengths from the files that people have them in."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from evenstep.progress import Progress, no_progress

__all__ = ["read_lengths"]

_NAMES = ("tokens", "num_tokens", "n_tokens", "token_count", "length", "lengths", "len", "input_ids")
_CHUNK = 1 << 24  # bytes of text that are parsed at once

Advance = Callable[[int], None]


def read_lengths(
    path: str | Path, *, column: str | None = None, progress: Progress = no_progress
) -> npt.NDArray[np.int64]:
    """Tokens of each document in ``path``: int64 ``[n]``, each >= 0.

    The ending says what is in the file: ``.npy`` (one-dimensional, whole numbers), ``.csv`` or ``.tsv`` (with
    or without a header), ``.jsonl`` (numbers, objects with a number or with a list of tokens), ``.parquet``
    (needs pyarrow), ``.idx`` (Megatron).

    Args:
        path: The file.
        column: Which column or key has the lengths; None means the only one, or one with a usual name
            (``tokens``, ``num_tokens``, ``length``, ...).
        progress: Shows how far a long text has been read.

    Raises:
        FileNotFoundError: There is no such file.
        ImportError: pyarrow is needed and not installed.
        ValueError: The ending is unknown, the column is missing, or a length is no whole number >= 0.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(
            f"No such file: {path}; `evenstep lengths MODULE:NAME -o lengths.npy` writes the lengths of a dataset"
        )
    ending = path.suffix.lower()
    if ending == ".npy":
        values = np.load(path, mmap_mode="r", allow_pickle=False)
    elif ending == ".idx":
        from evenstep.datasets.megatron_index import MegatronIndex  # its package needs torch

        values = MegatronIndex.read(path).document_lengths()
    elif ending == ".parquet":
        values = _read_parquet(path, column)
    elif ending in (".csv", ".tsv"):
        values = _read_text(path, progress, _csv_parser(path, column, "\t" if ending == ".tsv" else ","))
    elif ending == ".jsonl":
        values = _read_text(path, progress, _jsonl_parser(path, column))
    else:
        raise ValueError(
            f"{path} ends with {ending!r}: lengths are read from .npy, .csv, .tsv, .jsonl, .parquet and .idx"
        )
    return _checked(path, values)


def _checked(path: Path, values: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    if values.ndim != 1 or values.dtype.kind not in "iuf":
        raise ValueError(
            f"{path} holds {values.dtype} {list(values.shape)}, expected one whole number per document, [n]"
        )
    if not len(values):
        raise ValueError(f"{path} holds no lengths: there is nothing to simulate")
    whole = (values >= 0) & (values < 2**62) & (values == np.floor(values))
    if not whole.all():
        first = int(np.argmin(whole))
        raise ValueError(
            f"length {first} of {path} is {values[first]}: a document has a whole number of tokens, 0 or more"
        )
    return values.astype(np.int64)


def _read_text(
    path: Path, progress: Progress, parse: Callable[[list[str]], npt.NDArray[np.float64]]
) -> npt.NDArray[np.float64]:
    parts = []
    with (
        path.open(encoding="utf-8-sig") as file,
        progress(f"reading {path.name}", path.stat().st_size) as advance,
    ):
        for lines in _chunks(file):
            parts.append(parse(lines))
            advance(sum(map(len, lines)))
    return np.concatenate(parts) if parts else np.zeros(0)


def _chunks(file: Any) -> Iterator[list[str]]:
    while lines := file.readlines(_CHUNK):
        yield lines


def _csv_parser(
    path: Path, column: str | None, delimiter: str
) -> Callable[[list[str]], npt.NDArray[np.float64]]:
    with path.open(encoding="utf-8-sig") as file:
        names = [name.strip().strip('"') for name in file.readline().rstrip("\n").split(delimiter)]
    header = not all(map(_is_number, names))
    if header:
        position = names.index(_choose(path, names, column))
    elif column is not None:
        raise ValueError(f"{path} has no header, so there is no column {column!r}; leave --column out")
    elif len(names) == 1:
        position = 0
    else:
        raise ValueError(
            f"{path} has {len(names)} columns and no header: nothing says which one is the length; "
            "add a header or leave only that column"
        )
    skip = int(header)

    def parse(lines: list[str]) -> npt.NDArray[np.float64]:
        nonlocal skip
        body, skip = lines[skip:], 0
        if not body:
            return np.zeros(0)
        try:
            return np.loadtxt(body, delimiter=delimiter, usecols=position, ndmin=1, quotechar='"')
        except ValueError as error:
            raise ValueError(
                f"{path} has a line without a number in column {position + 1}: {error}"
            ) from None

    return parse


def _jsonl_parser(path: Path, column: str | None) -> Callable[[list[str]], npt.NDArray[np.float64]]:
    key = column

    def length(value: Any, line: str) -> float:
        nonlocal key
        if isinstance(value, dict):
            if key is None:
                key = _choose(path, list(value), None)
            if key not in value:
                raise ValueError(f"{path} has a line without {key!r}: {line.strip()[:80]}")
            value = value[key]
        if isinstance(value, list):
            return float(len(value))
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(
                f"{path} has a line whose length is {str(value)[:40]!r}, expected a number or a list of tokens; "
                "tokenise the text first"
            )
        return float(value)

    def parse(lines: list[str]) -> npt.NDArray[np.float64]:
        full = [line for line in lines if not line.isspace()]
        return np.array(list(map(length, _json_values(path, full), full)), dtype=np.float64)

    return parse


def _json_values(path: Path, lines: list[str]) -> list[Any]:
    try:
        together = json.loads(f"[{','.join(lines)}]")  # three times as fast as line by line
        if len(together) == len(lines):
            return list(together)
    except json.JSONDecodeError:
        pass
    try:
        return [json.loads(line) for line in lines]
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} has a line that is no JSON: {error.doc.strip()[:80]}") from None


def _read_parquet(path: Path, column: str | None) -> npt.NDArray[Any]:
    try:
        arrow: Any = import_module("pyarrow")
        compute: Any = import_module("pyarrow.compute")
        parquet: Any = import_module("pyarrow.parquet")
    except ImportError:
        raise ImportError(
            f"reading {path} needs pyarrow, which is not installed; pip install pyarrow, "
            "or save the lengths with numpy.save"
        ) from None
    file = parquet.ParquetFile(path)
    name = _choose(path, file.schema_arrow.names, column)
    values = file.read(columns=[name]).column(name)
    if arrow.types.is_list(values.type) or arrow.types.is_large_list(values.type):
        values = compute.list_value_length(values)
    return np.asarray(values.to_numpy())


def _choose(path: Path, names: list[str], column: str | None) -> str:
    if column is not None:
        if column not in names:
            raise ValueError(f"{path} has no column {column!r}, it has {', '.join(map(repr, names))}")
        return column
    usual = [name for name in names if name.lower() in _NAMES]
    if len(usual) == 1 or len(names) == 1:
        return (usual or names)[0]
    raise ValueError(
        f"{path} has the columns {', '.join(map(repr, names))}: choose the one with the lengths (--column)"
    )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
