"""A folder of text files, a document each, in an order that every machine agrees on."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from evenstep.shown import shown

__all__ = ["TextFolder"]

log: logging.Logger = logging.getLogger("evenstep")


class TextFolder:
    """The ``.txt`` files below a folder, sorted by path; without a tokenizer their bytes are the tokens (0 to 255).

    Files of other names are left out, counted and logged; hidden files and folders do not count. Empty files are documents without tokens, which a loader drops and counts.

    Args:
        folder: Where they are.
        encode: ``text -> token ids``, for example ``lambda text: tokenizer.encode(text).ids``; files are UTF-8. Lengths are
            known ahead only without it.
        pattern: Which files, in all folders below; ``"*"`` for all.

    Attributes:
        files: Their paths.
        left_out: How many files have other names.

    Raises:
        ValueError: ``folder`` is none, or no file matches.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        encode: Callable[[str], Sequence[int]] | None = None,
        *,
        pattern: str = "*.txt",
    ) -> None:
        root = Path(folder)
        if not root.is_dir():
            raise ValueError(f"{str(root)!r} is no folder: there is nothing to read; name one that exists")
        self.files: list[Path] = _files(root, pattern)
        if not self.files:
            raise ValueError(
                f"{str(root)!r} holds no file {pattern!r}: there is nothing to read; name another folder or pattern"
            )
        others = sorted(set(_files(root, "*")) - set(self.files))
        self.left_out: int = len(others)
        if others:
            log.warning(
                "evenstep: %r has %d files %r, which are read, and %d of other names, which are not (the first is %s); "
                "TextFolder(..., pattern='*') reads all",
                str(root),
                len(self.files),
                pattern,
                len(others),
                others[0].relative_to(root),
            )
        self._encode = encode

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Document ``index``: ``{"input_ids": int64 [length]}``.

        Raises:
            IndexError: There is no such document; a negative index is none.
            ValueError: The file is not UTF-8, and a tokenizer needs text.
            TypeError: The tokenizer returned no token ids.
            RuntimeError: The tokenizer failed; its error is the cause.
        """
        file = self._file(index)
        if self._encode is None:
            return _sample(np.frombuffer(file.read_bytes(), dtype=np.uint8))
        try:
            text = file.read_bytes().decode()
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{file} is not UTF-8 ({error.reason} at byte {error.start}): it would become other text; convert it, or "
                "leave encode away to train on bytes"
            ) from None
        try:
            ids = self._encode(text)
        except Exception as error:
            raise RuntimeError(f"encode failed on {file}: {type(error).__name__}: {error}") from error
        tokens = np.asarray(ids)
        if tokens.ndim != 1 or (len(tokens) and tokens.dtype.kind not in "iu"):
            raise TypeError(
                f"encode made {shown(ids)} of {file}, expected its token ids, integers [n]: of what a tokenizer returns, "
                "often .ids or ['input_ids']"
            )
        return _sample(tokens)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Bytes of each file, int64 ``[n]``.

        Raises:
            AttributeError: A tokenizer says how long a document is, and every file would have to be read.
        """
        if self._encode is not None:
            raise AttributeError(
                "lengths are known ahead only where bytes are the tokens; `evenstep lengths MODULE:NAME -o lengths.npy` "
                "finds those of a tokenizer"
            )
        return np.array([file.stat().st_size for file in self.files], dtype=np.int64)

    def read(self, index: int, begin: int, end: int) -> dict[str, Any]:
        """Tokens ``begin`` to ``end`` of document ``index``; of bytes only these are read."""
        if self._encode is not None:
            return {"input_ids": self[index]["input_ids"][begin:end]}
        with self._file(index).open("rb") as file:
            file.seek(begin)
            return _sample(np.frombuffer(file.read(end - begin), dtype=np.uint8))

    def _file(self, index: int) -> Path:
        if not 0 <= index < len(self.files):
            raise IndexError(f"document {index} of {len(self.files)}")
        return self.files[index]


def _files(root: Path, pattern: str) -> list[Path]:
    found = (path for path in root.rglob(pattern) if path.is_file() and not _hidden(path.relative_to(root)))
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _sample(tokens: npt.NDArray[Any]) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.from_numpy(tokens.astype(np.int64))}
