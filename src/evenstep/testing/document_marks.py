"""Whether the marks of a row or batch, such as ids and masks, tell its documents apart: by what they say, in any convention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from evenstep.packing.fields import as_tensor

__all__ = [
    "DOCUMENT_MARKS",
    "Places",
    "numbers",
    "padding_as_content",
    "untold",
    "wrong_length",
    "wrong_mark",
]

DOCUMENT_MARKS = ("cu_seqlens", "position_ids", "document_ids", "seq_idx", "cu_seq_lens_q", "attention_mask")
_IDS = ("document_ids", "seq_idx")
_BOUNDARIES = ("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k")
_LONGEST = ("max_length_q", "max_length_k")


@dataclass(frozen=True, slots=True)
class Places:
    """Where documents stand in sequences of one width: one row, the rows of a padded batch, or a flat batch.

    Attributes:
        width: Tokens of a sequence.
        spans: Start and end of each document, for each sequence.
    """

    width: int
    spans: Sequence[Sequence[tuple[int, int]]]

    @property
    def longest(self) -> list[int]:
        """Tokens of the longest document of each sequence."""
        return [max((end - start for start, end in spans), default=0) for spans in self.spans]

    @property
    def several(self) -> bool:
        """Whether a sequence has documents that could attend to each other."""
        return any(len(spans) > 1 for spans in self.spans)

    def joined(self, *, padding: bool) -> Places:
        """The sequences one after another as one, with or without the tokens outside of documents."""
        spans, at = [], 0
        for k, sequence in enumerate(self.spans):
            for start, end in sequence:
                begin = k * self.width + start if padding else at
                spans.append((begin, begin + end - start))
                at += end - start
        return Places(len(self.spans) * self.width if padding else at, [spans])


def untold(fields: Mapping[str, Any], places: Places) -> str | None:
    """Why nothing in ``fields`` tells the documents apart; None if something does, or if none could meet."""
    present = [name for name in DOCUMENT_MARKS if name in fields]
    if not places.several:
        return None
    if not present:
        return f"none of {', '.join(DOCUMENT_MARKS)}"
    problems = [_problem(name, fields[name], places) for name in present]
    return None if None in problems else "; ".join(problem for problem in problems if problem)


def wrong_mark(fields: Mapping[str, Any], places: Places, exempt: Sequence[str] = ()) -> str | None:
    """What a mark of ``fields`` says that is not so, but for those named in ``exempt``; None if all are right.

    A mask with one value per token may only say what is padding.
    """
    for name in (*_IDS, *_BOUNDARIES, "attention_mask"):
        if (
            name not in fields
            or name in exempt
            or (name == "attention_mask" and _per_token(fields[name], places))
        ):
            continue
        problem = _problem(name, fields[name], places)
        if problem is not None:
            return problem
    return wrong_length(fields, places, _LONGEST)


def padding_as_content(mask: Any, places: Places) -> str | None:
    """How an ``attention_mask`` takes padding for content; None if it does not, or if its form is unknown here.

    With one value per token, no sequence has the same one for all its tokens and its padding. A mask of pairs of
    tokens lets none see padding. Sequences without documents may say what they like: a softmax over nothing is NaN.
    """
    tensor, width = as_tensor(mask), places.width
    if tensor is None:
        return None
    content = torch.zeros(len(places.spans), width, dtype=torch.bool)
    for k, spans in enumerate(places.spans):
        for start, end in spans:
            content[k, start:end] = True
    per_token = _per_token(mask, places)
    if not per_token and (
        tensor.shape[-2:] != (width, width) or len(places.spans) not in (1, tensor.shape[0])
    ):
        return None
    values = (
        tensor.reshape(len(places.spans), width)
        if per_token
        else tensor.reshape(len(places.spans), -1, width, width)
    )
    for one, real in zip(values, content, strict=True):
        if not bool(real.any()) or bool(real.all()):
            continue
        if per_token:
            if bool((one == one[0]).all()):
                return f"attention_mask is {one[0].item()} for tokens and for padding"
        elif bool((one[:, real][..., ~real] == one.diagonal(dim1=-2, dim2=-1)[:, real, None]).any()):
            return "attention_mask lets tokens see padding"
    return None


def wrong_length(fields: Mapping[str, Any], places: Places, names: Sequence[str]) -> str | None:
    """Which of the greatest lengths ``names`` is less than the longest document; kernels leave out what is beyond."""
    for name in names:
        found = numbers(fields.get(name))
        needed = places.longest if len(found) == len(places.spans) else [max(places.longest, default=0)]
        if len(found) == len(needed) and any(a < b for a, b in zip(found, needed, strict=True)):
            return f"{name} is {_shown(found)}, but the longest document has {_shown(needed)} tokens"
    return None


def numbers(value: Any) -> list[float]:
    """The numbers of a scalar, list or tensor; none if it holds others."""
    if isinstance(value, int | float | np.number):
        return [float(value)]
    tensor = as_tensor(value)
    return [] if tensor is None else [float(number) for number in tensor.reshape(-1).tolist()]


def _problem(name: str, value: Any, places: Places) -> str | None:
    """Why mark ``name`` does not tell documents apart; None if it does, or if its form is unknown here."""
    if name in _BOUNDARIES:
        return _wrong_boundaries(name, value, places)
    if name in _IDS or (name == "attention_mask" and _per_token(value, places)):
        return _same_ids(name, value, places)
    return _seen(name, value, places) if name == "attention_mask" else None


def _per_token(value: Any, places: Places) -> bool:
    tensor = as_tensor(value)
    return tensor is not None and tensor.numel() == len(places.spans) * places.width


def _same_ids(name: str, value: Any, places: Places) -> str | None:
    """One id for all tokens of a document, another one for the next; for ``document_ids``, for every other."""
    tensor = as_tensor(value)
    if tensor is None or tensor.numel() != len(places.spans) * places.width:
        return None
    for ids, spans in zip(tensor.reshape(-1, places.width).tolist(), places.spans, strict=True):
        for k, (start, end) in enumerate(spans):
            if len(set(ids[start:end])) > 1:
                return f"{name} is {ids[start:end]} inside of document {k}, but a document has one id"
            others = range(k) if name == "document_ids" else range(max(k - 1, 0), k)
            same = next((other for other in others if ids[spans[other][0]] == ids[start]), None)
            if same is not None:
                return f"{name} is {ids[start]} in document {same} and in document {k}"
    return None


def _seen(name: str, value: Any, places: Places) -> str | None:
    """No token sees one of an earlier document: where it sees itself, in whatever values, the other must not be alike."""
    tensor, width = as_tensor(value), places.width
    if tensor is None or tensor.shape[-2:] != (width, width):
        return None
    count = len(places.spans)
    if count > 1 and tensor.shape[0] != count:
        return None
    for mask, spans in zip(tensor.reshape(count, -1, width, width), places.spans, strict=True):
        itself = mask.diagonal(dim1=-2, dim2=-1)
        for k, (start, end) in enumerate(spans):
            for j, (first, last) in enumerate(spans[:k]):
                if bool((mask[:, start:end, first:last] == itself[:, start:end, None]).any()):
                    return f"{name} lets tokens of document {k} see those of document {j}"
    return None


def _wrong_boundaries(name: str, value: Any, places: Places) -> str | None:
    """A boundary between all documents and none inside of one; padding may be a segment, or go with the one before."""
    lists = _per_sequence(value, len(places.spans))
    if lists is not None:
        for found, spans in zip(lists, places.spans, strict=True):
            if not _divides(found, spans, places.width):
                return _misplaced(name, found, spans)
        return None
    tensor = as_tensor(value)
    if tensor is None or tensor.dim() != 1:
        return None
    ways = [places.joined(padding=True)]
    if len(places.spans) > 1 or name == "cu_seqlens":
        ways.append(places.joined(padding=False))
    found = tensor.tolist()
    if any(_divides(found, way.spans[0], way.width) for way in ways):
        return None
    return _misplaced(name, found, ways[0].spans[0])


def _per_sequence(value: Any, count: int) -> list[list[int]] | None:
    """``value`` as one list per sequence, if that is what it is."""
    if isinstance(value, list | tuple) and len(value) == count:
        tensors = [as_tensor(one) for one in value]
        if all(tensor is not None and tensor.dim() == 1 for tensor in tensors):
            return [tensor.tolist() for tensor in tensors if tensor is not None]
    tensor = as_tensor(value)
    two = tensor is not None and tensor.dim() == 2 and len(tensor) == count
    return tensor.tolist() if two and tensor is not None else None


def _divides(found: list[int], spans: Sequence[tuple[int, int]], width: int) -> bool:
    if not spans:
        return True
    if not found or found[0] != 0 or found[-1] > width or any(b < a for a, b in pairwise(found)):
        return False
    starts = [*(start for start, _ in spans[1:]), width]
    return all(
        not any(start < b < end for b in found) and any(end <= b <= following for b in found)
        for (start, end), following in zip(spans, starts, strict=True)
    )


def _misplaced(name: str, found: list[int], spans: Sequence[tuple[int, int]]) -> str:
    where = ", ".join(f"{start} to {end}" for start, end in spans)
    return f"{name} is {found}, but the documents stand at {where}"


def _shown(values: Sequence[float]) -> str:
    whole = [f"{value:g}" for value in values]
    return whole[0] if len(whole) == 1 else f"[{', '.join(whole)}]"
