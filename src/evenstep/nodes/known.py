"""Metadata known before anything is read, in the forms people have it; only what a step needs is looked at."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from evenstep.samples import MetadataTable, SampleMetadata

__all__ = ["KnownMetadata", "known_metadata", "open_table", "tells_documents"]

_COLUMNS = ("tokens", "loss_tokens", "documents", "document_offsets")


class KnownMetadata(Protocol):
    """Metadata of a whole dataset. A `MetadataTable` is one."""

    def __len__(self) -> int:
        """Samples of the dataset."""

    def take(self, index: npt.NDArray[np.integer[Any]]) -> MetadataTable:
        """The rows ``index`` (int ``[m]``), in that order."""


class _Records:
    """A sequence of records, from which a step's are taken."""

    def __init__(self, records: Sequence[SampleMetadata]) -> None:
        self._records = records

    def __len__(self) -> int:
        return len(self._records)

    def take(self, index: npt.NDArray[np.integer[Any]]) -> MetadataTable:
        return _checked(MetadataTable.from_samples([self._records[i] for i in index.tolist()]), index)


class _Table:
    """A table, whose rows are looked at when a step needs them."""

    def __init__(self, table: MetadataTable) -> None:
        self._table = table
        self.features = tuple(table.features)

    def __len__(self) -> int:
        return len(self._table)

    def take(self, index: npt.NDArray[np.integer[Any]]) -> MetadataTable:
        return _checked(self._table.take(index), index)


class _Arrays:
    """Columns as they are, also memory maps: nothing of the size of the dataset is made or read."""

    def __init__(self, columns: Mapping[str, npt.NDArray[Any]]) -> None:
        self._columns = columns

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the features."""
        return tuple(name for name in self._columns if name not in _COLUMNS)

    @property
    def has_documents(self) -> bool:
        """Whether it says which documents the samples are made of."""
        return "documents" in self._columns

    def __len__(self) -> int:
        return len(self._columns["tokens"])

    def take(self, index: npt.NDArray[np.integer[Any]]) -> MetadataTable:
        taken = {name: np.asarray(c[index]) for name, c in self._columns.items() if name not in _COLUMNS[2:]}
        tokens = taken.pop("tokens").astype(np.int64)
        table = MetadataTable.from_tokens(tokens)
        loss = taken.pop("loss_tokens", table.loss_tokens).astype(np.int64)
        features = {name: column.astype(np.float64) for name, column in taken.items()}
        documents, offsets = table.documents, table.document_offsets
        if "documents" in self._columns:
            starts, ends = (self._columns["document_offsets"][index + k].astype(np.int64) for k in (0, 1))
            if (ends < starts).any():
                sample = int(index[int(np.argmax(ends < starts))])
                raise ValueError(
                    f"metadata has document_offsets that fall at sample {sample}: its documents have no place"
                )
            offsets = np.concatenate([[0], np.cumsum(ends - starts)])
            flat = np.repeat(starts - offsets[:-1], ends - starts) + np.arange(offsets[-1])
            documents = np.asarray(self._columns["documents"][flat]).astype(np.int64)
        return _checked(MetadataTable(tokens, features, loss, documents, offsets), index)


def _checked(table: MetadataTable, index: npt.NDArray[np.integer[Any]]) -> MetadataTable:
    """The rows ``index`` of a dataset's metadata, which say nothing that cannot be."""
    tokens, ends = table.tokens, np.concatenate([[0], np.cumsum(table.documents)])[table.document_offsets]
    inside = np.diff(ends)
    for wrong, told in (
        (tokens < 0, "a length of {tokens} tokens"),
        (inside != tokens, "documents of {inside} tokens together, but a length of {tokens} tokens"),
        (table.loss_tokens > tokens, "{loss} loss tokens, but a length of {tokens} tokens"),
    ):
        if wrong.any():
            k = int(np.argmax(wrong))
            facts = {"tokens": int(tokens[k]), "inside": int(inside[k]), "loss": int(table.loss_tokens[k])}
            raise ValueError(f"metadata gives sample {int(index[k])} {told.format(**facts)}")
    return table


def known_metadata(metadata: Any, dataset_size: int, budgets: Collection[str] = ()) -> KnownMetadata:
    """``metadata`` as something to take steps from.

    Args:
        metadata: Lengths ``[n]`` (any integer dtype); the path of an ``.npy`` file of them, which is mapped, not
            read; a mapping of columns (``"tokens"``, optionally ``"loss_tokens"`` and ``"documents"`` with
            ``"document_offsets"``, and features by name); a sequence of `SampleMetadata`; a `MetadataTable`.
        dataset_size: Samples that it must describe; 0 if unknown.
        budgets: Features that it must have, where it has columns.

    Raises:
        TypeError: It is none of these, or a column has the wrong dtype or shape.
        FileNotFoundError: There is no such file.
        ValueError: It describes another number of samples, columns differ in length, or a budget's is missing.
    """
    known = _read(metadata)
    columns = getattr(known, "features", ())
    missing = [] if isinstance(known, _Records) else [name for name in budgets if name not in columns]
    if missing:
        raise ValueError(
            f"metadata has no column {missing[0]!r}, which has a budget: rows would be planned as if it were 0 in every "
            "sample. Pass it as a column, metadata={'tokens': ..., "
            f"{missing[0]!r}: ...}}."
        )
    if dataset_size and len(known) != dataset_size:
        raise ValueError(
            f"metadata has {len(known)} samples, the sampler was made for {dataset_size}: rows would be planned with "
            "the lengths of other samples. Compute the metadata from the dataset as it is now."
        )
    return known


def tells_documents(known: KnownMetadata) -> bool:
    """Whether it says which documents the samples are made of; records may, which only the reading will tell."""
    return not isinstance(known, _Arrays) or known.has_documents


def open_table(
    table: MetadataTable,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], MetadataTable]:
    """The documents of packed samples as samples of their own.

    Returns:
        The sample of each document, int64 ``[m]``; its number in there and how many that has, int64 ``[m, 2]``; and the
        documents, whose loss tokens nobody knows.

    Raises:
        ValueError: Samples have features, which nobody can divide among their documents.
    """
    if table.features:
        raise ValueError(
            f"metadata has the feature {next(iter(table.features))!r} of whole samples, but explode with repack=True plans "
            "their documents one by one: choose repack=False to keep the rows whole, or leave metadata out"
        )
    counts = np.diff(table.document_offsets)
    sample = np.repeat(np.arange(len(table), dtype=np.int64), counts)
    number = np.arange(len(sample), dtype=np.int64) - np.repeat(table.document_offsets[:-1], counts)
    parts = np.column_stack([number, np.repeat(counts, counts)])
    return sample, parts, MetadataTable.from_tokens(table.documents)


def _read(metadata: Any) -> KnownMetadata:
    if isinstance(metadata, (str, os.PathLike)):
        path = Path(metadata)
        if not path.exists():
            where = "" if path.is_absolute() else f" in {Path.cwd()}"
            raise FileNotFoundError(
                f"metadata is {str(path)!r}, and there is no such file{where}: pass the path of an .npy file of lengths on "
                f"every rank; `evenstep lengths MODULE:NAME -o {path}` writes one"
            )
        return _Arrays({"tokens": _column("tokens", np.load(path, mmap_mode="r", allow_pickle=False))})
    if isinstance(metadata, Mapping):
        return _Arrays(_columns(metadata))
    if isinstance(metadata, MetadataTable):
        return _Table(metadata)
    if isinstance(metadata, (_Table, _Arrays, _Records)):
        return metadata
    if isinstance(metadata, Sequence) and len(metadata) and isinstance(metadata[0], SampleMetadata):
        return _Records(metadata)
    return _Arrays({"tokens": _column("tokens", metadata)})


def _columns(metadata: Mapping[str, Any]) -> dict[str, npt.NDArray[Any]]:
    if "tokens" not in metadata:
        raise ValueError(f"metadata has the columns {sorted(metadata)}, expected one named 'tokens'")
    columns = {str(name): _column(name, column) for name, column in metadata.items()}
    if ("documents" in columns) != ("document_offsets" in columns):
        raise ValueError("metadata needs both 'documents' and 'document_offsets', or neither")
    n = len(columns["tokens"])
    for name, column in columns.items():
        expected = n + (name == "document_offsets")
        if name != "documents" and len(column) != expected:
            raise ValueError(f"metadata column {name!r} has {len(column)} entries, expected {expected}")
    return columns


def _column(name: str, column: Any) -> npt.NDArray[Any]:
    array: npt.NDArray[Any] = column if isinstance(column, np.ndarray) else np.asarray(column)
    kinds = "iu" if name in _COLUMNS else "iufb"
    if array.ndim != 1 or array.dtype.kind not in kinds:
        remedy = ": pass .astype(np.int64)" * (array.ndim == 1 and name in _COLUMNS)
        raise TypeError(
            f"metadata column {name!r} has shape {array.shape} and dtype {array.dtype}, expected one "
            f"{'integer' if name in _COLUMNS else 'number'} per sample{remedy}"
        )
    return array
