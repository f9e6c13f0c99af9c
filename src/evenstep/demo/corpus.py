"""The documents of the demo: real text that every machine with Python already has."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Corpus", "find_corpus", "read_documents"]

_NOT_THE_LIBRARY = frozenset({"site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True, slots=True)
class Corpus:
    """Which files are documents.

    Attributes:
        root: Folder below which they lie.
        files: Paths relative to ``root``, sorted as POSIX strings, so that every machine counts them alike.
    """

    root: Path
    files: tuple[Path, ...]

    def thinned(self, keep_every: int) -> Corpus:
        """Every ``keep_every``-th document, from the first on."""
        return Corpus(self.root, self.files[::keep_every])


def find_corpus(folder: Path | None = None) -> Corpus:
    """The files of ``folder``, or the ``*.py`` sources of the running Python's standard library.

    Hidden files and folders are left out, and so are installed packages.

    Raises:
        ValueError: ``folder`` is no folder, or holds no file.
    """
    root = Path(sysconfig.get_path("stdlib")) if folder is None else folder
    if not root.is_dir():
        raise ValueError(
            f"the corpus {str(root)!r} is not a folder: nothing could be read; name one that exists"
        )
    pattern = "*.py" if folder is None else "*"
    skip = _NOT_THE_LIBRARY if folder is None else frozenset()
    files = sorted(_files(root, pattern, skip), key=lambda path: path.as_posix())
    if not files:
        raise ValueError(
            f"the corpus {str(root)!r} holds no {pattern} file: there is nothing to train on; "
            "name a folder of text files with --corpus"
        )
    return Corpus(root, tuple(files))


def _files(root: Path, pattern: str, skip: frozenset[str]) -> Iterator[Path]:
    for path in root.rglob(pattern):
        inside = path.relative_to(root)
        hidden = any(part.startswith(".") for part in inside.parts)
        if not hidden and skip.isdisjoint(inside.parts) and path.is_file():
            yield inside


def read_documents(corpus: Corpus, files: Iterable[Path] | None = None) -> Iterator[tuple[str, int]]:
    """Text of each file and how many undecodable places in it became U+FFFD, in the order of ``files``.

    Files are UTF-8 (line ends untouched). A byte that is not, as in tests of other encodings, costs one
    character and not the document. A replacement character that the file itself holds is not counted.
    """
    for file in corpus.files if files is None else files:
        data = (corpus.root / file).read_bytes()
        text = data.decode("utf-8", errors="replace")
        own = data.count("\ufffd".encode())
        yield text, text.count("\ufffd") - own
