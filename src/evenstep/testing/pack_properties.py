"""What is true of every rightly packed row, each told in plain words where it is not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NoReturn

import numpy as np
import torch

from evenstep.packing.fields import as_tensor, token_dim
from evenstep.packing.text import LABEL_FIELDS
from evenstep.testing.document_marks import Places, padding_as_content, untold, wrong_mark

__all__ = [
    "Broken",
    "Conventions",
    "Expected",
    "broken",
    "check_boundaries",
    "check_marks",
    "check_row",
    "check_values",
    "expected_row",
]

Sample = Mapping[str, Any]


class Broken(Exception):  # noqa: N818 - an outcome of a check, shown to users as PackCheckFailed
    """A property that does not hold; ``property`` names it, ``detail`` says in plain words how."""

    def __init__(self, name: str, detail: str) -> None:
        super().__init__(f"{name}: {detail}")
        self.property = name
        self.detail = detail


@dataclass(frozen=True, slots=True)
class Conventions:
    """What ``pack`` was asked to do.

    Attributes:
        ignore_index: Label of tokens without a loss.
        shifted: Whether ``labels[t]`` is the target of the prediction made at ``t``.
    """

    ignore_index: int = -100
    shifted: bool = False


@dataclass(frozen=True, slots=True)
class Expected:
    """A row as it must be, without its padding.

    Attributes:
        samples: The samples of the row.
        ends: Where each document ends.
        columns: Per-token fields, tokens last or first as in the samples: name to (dimension, tensor).
        others: Fields that are not per token.
    """

    samples: Sequence[Sample]
    ends: list[int]
    columns: dict[str, tuple[int, torch.Tensor]]
    others: list[str]

    @property
    def tokens(self) -> int:
        """Tokens of all documents."""
        return self.ends[-1] if self.ends else 0

    @property
    def starts(self) -> list[int]:
        """Where each document starts."""
        return [0, *self.ends[:-1]] if self.ends else []


def expected_row(samples: Sequence[Sample], conventions: Conventions) -> Expected:
    """The row that ``samples`` must become, built document by document."""
    lengths = [len(sample["input_ids"]) for sample in samples]
    columns: dict[str, tuple[int, torch.Tensor]] = {}
    others: list[str] = []
    names = dict.fromkeys(("input_ids", "labels", *(name for sample in samples for name in sample)))
    for name in names:
        values = [as_tensor(s.get(name, s["input_ids"] if name == "labels" else None)) for s in samples]
        dims = [token_dim(name, value, n, {}) for value, n in zip(values, lengths, strict=True)]
        dim = dims[0] if dims else 0
        if dim is None or any(d != dim for d in dims):
            others.append(name)
            continue
        parts = [value for value in values if value is not None]
        if name == "labels" or (conventions.shifted and name in LABEL_FIELDS):
            fill = conventions.ignore_index if name == "labels" else 0
            parts = [_targets(part, conventions.shifted, fill) for part in parts]
        columns[name] = (dim, torch.cat(parts, dim=dim) if parts else torch.empty(0, dtype=torch.int64))
    if "position_ids" not in names:
        columns["position_ids"] = (0, torch.tensor([t for n in lengths for t in range(n)], dtype=torch.int64))
    return Expected(samples, np.cumsum(lengths).tolist(), columns, others)


def _targets(labels: torch.Tensor, shifted: bool, fill: int) -> torch.Tensor:
    """Labels of one document: nothing predicts its first token."""
    nothing = torch.full_like(labels[:1], fill)
    return torch.cat([labels[1:], nothing]) if shifted else torch.cat([nothing, labels[1:]])


def check_row(row: Any, expected: Expected, seq_len: int, conventions: Conventions) -> None:
    """Every property of one packed row.

    Raises:
        Broken: One does not hold.
    """
    if not isinstance(row, Mapping):
        broken("row", f"pack returned a {type(row).__name__}; a row must be a mapping of fields")
    for name in ("input_ids", "labels"):
        if name not in row:
            broken("lost field", f"the row has no {name!r} (it has {sorted(map(str, row))})")
    length = len(row["input_ids"])
    if not expected.tokens <= length <= seq_len:
        broken(
            "lost tokens" if length < expected.tokens else "row length",
            f"the row has {length} tokens; it must hold the {expected.tokens} of its samples and no more than seq_len={seq_len}",
        )
    _check_boundaries(row, expected)
    _check_columns(row, expected, length, conventions)
    check_marks(
        "row", row, Places(length, [list(zip(expected.starts, expected.ends, strict=True))]), [expected]
    )


def check_marks(where: str, fields: Mapping[str, Any], places: Places, expected: Sequence[Expected]) -> None:
    """What tells documents apart, in a row or batch, tells these; fields of the samples are theirs to know."""
    theirs = [name for one in expected for sample in one.samples for name in sample]
    problem = wrong_mark(fields, places, theirs)
    if problem is not None:
        broken("boundaries", problem)
    padding = padding_as_content(fields.get("attention_mask"), places)
    if padding is not None:
        broken("padding mask", f"{padding}, so that padding is content to the model")
    reason = untold(fields, places)
    if reason is not None:
        broken(
            "boundaries",
            f"nothing in the {where} tells its documents apart ({reason}), so they attend to each other",
        )


def _check_boundaries(row: Mapping[str, Any], expected: Expected) -> None:
    right = [0, *expected.ends]
    if "cu_seqlens" in row:
        check_boundaries("cu_seqlens", row["cu_seqlens"], right)
    longest = max((b - a for a, b in pairwise(right)), default=0)
    for name, value in (("max_seqlen", longest), ("num_tokens", expected.tokens)):
        if name in row and int(row[name]) != value:
            broken("boundaries", f"{name} is {int(row[name])}, but it is {value} for these documents")


def check_boundaries(name: str, value: Any, right: list[int]) -> None:
    """Boundaries of documents, which must be ``right``."""
    tensor = as_tensor(value)
    if tensor is None or tensor.dim() != 1:
        broken("boundaries", f"{name} is {value!r}, but it must be one list of integers")
    found = tensor.tolist()
    if any(b == a for a, b in pairwise(found)):
        broken(
            "zero-length document",
            f"{name} is {found}: a document without tokens, which attention kernels divide by; it must be {right}",
        )
    if found != right:
        hint = " (padding is no document)" if found[: len(right)] == right else ""
        broken("boundaries", f"{name} is {found}, but the documents stand at {right}{hint}")
    if isinstance(value, torch.Tensor | np.ndarray) and tensor.dtype != torch.int32:
        broken("boundaries", f"{name} is of type {tensor.dtype}; attention kernels take int32")


def _check_columns(row: Mapping[str, Any], expected: Expected, length: int, conventions: Conventions) -> None:
    given = {name for sample in expected.samples for name in sample}
    for name in (*expected.columns, *expected.others):
        if name in given and name not in row:
            hint = _without(name)
            broken(
                "lost field",
                f"the samples have {name!r}, the row has not (it has {sorted(map(str, row))}){hint}",
            )
    for name, (dim, right) in expected.columns.items():
        if name not in row:
            continue
        found = as_tensor(row[name])
        if found is None or found.dim() != right.dim() or found.shape[dim] != length:
            shape = "no numbers" if found is None else f"shape {list(found.shape)}"
            broken(
                "field length",
                f"{name!r} has {shape} in a row of {length} tokens; they no longer belong together",
            )
        check_values(name, found.narrow(dim, 0, expected.tokens), right, dim, expected, conventions)
    padding = as_tensor(row["labels"])
    if padding is not None:
        check_padding_labels(padding[expected.tokens :], expected.tokens, conventions)


def _without(name: str) -> str:
    """How to check a pack for data that has no such field, of those that the usual samples have."""
    if name != "loss_weights":
        return ""
    return "; if your data has none, pass samples=samples(labels=False, extras=())"


def check_padding_labels(labels: torch.Tensor, start: int, conventions: Conventions) -> None:
    """No padding token has a loss; ``labels`` is 1-d and begins at position ``start``."""
    wrong = (labels != conventions.ignore_index).nonzero()
    if len(wrong):
        at = int(wrong[0])
        broken(
            "padding label",
            f"position {start + at} is padding, but its label is {labels[at].item()}; it must be "
            f"{conventions.ignore_index}, or the model is trained on padding",
        )


def check_values(
    name: str,
    found: torch.Tensor,
    right: torch.Tensor,
    dim: int,
    expected: Expected,
    conventions: Conventions,
) -> None:
    """The real tokens of one field, which must be ``right``."""
    if not expected.tokens:
        return
    same = (found == right).movedim(dim, 0).reshape(expected.tokens, -1).all(dim=1)
    if bool(same.all()):
        return
    at = int((~same).nonzero()[0])
    got, must = found.select(dim, at).tolist(), right.select(dim, at).tolist()
    where = f"{name} at position {at} is {got}, but it must be {must}"
    edge = [end - 1 for end in expected.ends] if conventions.shifted else expected.starts
    if name == "labels" and at in edge:
        document = edge.index(at)
        why = (
            f"the last token of document {document} predicts nothing in its document"
            if conventions.shifted
            else f"it is the first token of document {document}, which nothing in its document predicts"
        )
        broken("label leak", f"{where}: {why}")
    if name == "position_ids":
        broken("running positions", f"{where}: positions start again in every document")
    broken("lost tokens" if name == "input_ids" else "field values", where)


def broken(name: str, detail: str) -> NoReturn:
    """Tells that property ``name`` does not hold."""
    raise Broken(name, detail)
