"""Documents longer than a row as several samples, so that none has to be cut short or left out."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from evenstep.datasets.text_folder import TextFolder
from evenstep.packing import slice_sample
from evenstep.packing.fields import NOT_PER_TOKEN

__all__ = ["SplitDocuments"]


class SplitDocuments:
    """Each document longer than ``max_tokens`` in pieces of ``max_tokens`` tokens and a rest; the others as they are.

    Nothing is lost and nothing overlaps: the pieces of a document follow each other, and documents keep their order, so
    that an index means the same tokens wherever it is read. A piece is a sample of its own: positions begin at 0 in it, and
    its first token is not predicted. Lengths stay known, for ``metadata=`` and a `TokenBudgetSampler`.

    A piece is read by ``dataset.read(index, begin, end)`` where the dataset has it (`TokenArray` and `TextFolder` do), else
    the whole document is read for each of its pieces and cut: every field that is as long as the tokens alike, all others
    go along as they are.

    Args:
        dataset: Anything with ``dataset[i]`` and ``len``; documents are mappings with ``input_ids``.
        max_tokens: Tokens of a piece, usually ``seq_len``.
        lengths: Tokens of each document, integers ``[len(dataset)]``, or the path of an ``.npy`` file of them; default:
            ``dataset.lengths``, or those of a list.

    Attributes:
        lengths: Tokens of each piece, int64 ``[n]``.
        documents: Document that each piece is of, int64 ``[n]``.
        starts: Its first token in that document, int64 ``[n]``.
        split: How many documents were split.

    Raises:
        TypeError: Nobody says how long the documents are.
        FileNotFoundError: There is no such file of lengths.
        ValueError: ``max_tokens`` is not positive, or the lengths are not those of the documents.

    Example:
        >>> from evenstep.datasets import SplitDocuments, TokenArray
        >>> pieces = SplitDocuments(TokenArray([5, 6, 7, 8, 9], offsets=[0, 4, 5]), max_tokens=3)
        >>> pieces.lengths.tolist(), pieces.documents.tolist(), pieces.split
        ([3, 1, 1], [0, 0, 1], 1)
        >>> pieces[1]["input_ids"].tolist()
        [8]
    """

    def __init__(self, dataset: Any, max_tokens: int, lengths: Any = None) -> None:
        if isinstance(max_tokens, bool) or not isinstance(max_tokens, (int, np.integer)) or max_tokens < 1:
            raise ValueError(
                f"max_tokens={max_tokens!r}: pieces of no tokens never end; give an int of at least 1, such as seq_len"
            )
        self.dataset: Any = dataset
        self.max_tokens: int = int(max_tokens)
        self._whole = _lengths_of(dataset, lengths)
        pieces = np.maximum(1, -(-self._whole // self.max_tokens))
        self.documents: npt.NDArray[np.int64] = np.repeat(np.arange(len(self._whole)), pieces)
        first = np.cumsum(pieces) - pieces
        self.starts: npt.NDArray[np.int64] = (
            np.arange(len(self.documents)) - first[self.documents]
        ) * self.max_tokens
        self.lengths: npt.NDArray[np.int64] = np.minimum(
            self._whole[self.documents] - self.starts, self.max_tokens
        )
        self.split: int = int((pieces > 1).sum())
        if hasattr(dataset, "set_epoch"):  # workers of a dataset without it are kept over epochs
            self.set_epoch: Any = dataset.set_epoch

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> Any:
        """Piece ``index``, with the fields of its document.

        Raises:
            IndexError: There is no such piece; a negative index is none.
            ValueError: The document has another length than was said, or it has images, which belong to no piece alone.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"piece {index} of {len(self)}")
        document, begin = int(self.documents[index]), int(self.starts[index])
        end, known = begin + int(self.lengths[index]), int(self._whole[document])
        if hasattr(self.dataset, "read"):
            # The last piece asks for one token more, so that a document that has grown is noticed.
            sample = self.dataset.read(document, begin, end + (end == known))
            if len(sample["input_ids"]) != end - begin:
                raise self._other_length(document, f"not {known} tokens", known)
            return sample
        sample = self.dataset[document]
        if not isinstance(sample, Mapping) or "input_ids" not in sample:
            raise TypeError(
                f"document {document} is a {type(sample).__name__} without 'input_ids': there is nothing to split"
            )
        if len(sample["input_ids"]) != known:
            raise self._other_length(document, f"{len(sample['input_ids'])} tokens", known)
        if known <= self.max_tokens:
            return sample
        images = sorted(NOT_PER_TOKEN & sample.keys())
        if images:
            raise ValueError(
                f"document {document} has {known} tokens and {', '.join(images)}: every piece of {self.max_tokens} tokens "
                "would repeat them; raise max_tokens, or split it where you know which image belongs to which tokens"
            )
        return slice_sample(sample, begin, end)

    def _other_length(self, document: int, found: str, known: int) -> ValueError:
        file = f" ({self.dataset.files[document]})" if isinstance(self.dataset, TextFolder) else ""
        return ValueError(
            f"document {document} has {found}, its length says {known}: its pieces would miss tokens; the lengths are of "
            f"another version of the dataset, find them anew{file}"
        )


def _lengths_of(dataset: Any, lengths: Any) -> npt.NDArray[np.int64]:
    told = getattr(dataset, "lengths", None) if lengths is None else lengths
    if told is None and isinstance(dataset, (list, tuple)):  # in memory: a look at each costs nothing
        told = [len(document["input_ids"]) for document in dataset]
    if told is None:
        raise TypeError(
            f"{type(dataset).__name__} has no lengths, so nobody knows how many pieces there are; pass "
            "lengths=[len(document['input_ids']) for document in dataset], or the file that `evenstep lengths MODULE:NAME "
            "-o lengths.npy` writes"
        )
    column = np.asarray(_load(Path(told)) if isinstance(told, (str, os.PathLike)) else told)
    if column.ndim != 1 or (len(column) and column.dtype.kind not in "iu"):
        raise ValueError(
            f"lengths are {column.dtype} {list(column.shape)}, expected one integer per document, [n]"
            + "; pass lengths.astype(np.int64)" * (column.ndim == 1)
        )
    if len(column) != len(dataset):
        raise ValueError(
            f"{len(column)} lengths for {len(dataset)} documents: they are of another dataset; scan it again"
        )
    if len(column) and int(column.min()) < 0:
        raise ValueError(
            f"document {int(column.argmin())} has {int(column.min())} tokens, expected at least 0"
        )
    return column.astype(np.int64)


def _load(path: Path) -> Any:
    if not path.exists():
        where = "" if path.is_absolute() else f" in {Path.cwd()}"
        raise FileNotFoundError(
            f"lengths are {str(path)!r}, and there is no such file{where}: nobody knows how many pieces there are; pass the "
            f"path of an .npy file of lengths, `evenstep lengths MODULE:NAME -o {path}` writes one"
        )
    return np.load(path, allow_pickle=False)
