from __future__ import annotations

import re
from pathlib import Path

import pytest

from evenstep.demo.corpus import Corpus, find_corpus, read_documents


def write(root: Path, name: str, data: bytes) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def test_the_standard_library_is_many_documents_without_installed_packages() -> None:
    corpus = find_corpus()
    assert len(corpus.files) > 150
    assert Path("os.py") in corpus.files
    assert list(corpus.files) == sorted(corpus.files, key=lambda path: path.as_posix())
    parts = {part for path in corpus.files for part in path.parts}
    assert not parts & {"site-packages", "dist-packages", "__pycache__"}
    assert {path.suffix for path in corpus.files} == {".py"}


def test_a_folder_gives_all_its_files_but_hidden_ones(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.md", "a/noext", ".hidden", ".git/config"):
        write(tmp_path, name, b"x")
    assert [path.as_posix() for path in find_corpus(tmp_path).files] == ["a/noext", "a/z.md", "b.txt"]


def test_a_folder_inside_a_hidden_one_is_read(tmp_path: Path) -> None:
    write(tmp_path, ".cache/text/a.txt", b"x")
    assert find_corpus(tmp_path / ".cache/text").files == (Path("a.txt"),)


def test_undecodable_bytes_are_replaced_and_counted(tmp_path: Path) -> None:
    write(tmp_path, "0", b"")
    write(tmp_path, "1", "grün �".encode())
    write(tmp_path, "2", b"a\xffb\xfe")
    read = list(read_documents(find_corpus(tmp_path)))
    assert read == [("", 0), ("grün �", 0), ("a�b�", 2)]


def test_line_ends_stay(tmp_path: Path) -> None:
    write(tmp_path, "dos", b"a\r\nb\r")
    assert list(read_documents(find_corpus(tmp_path))) == [("a\r\nb\r", 0)]


def test_thinning_keeps_documents_evenly_spread() -> None:
    corpus = Corpus(Path(), tuple(Path(str(i)) for i in range(10)))
    assert corpus.thinned(4).files == (Path("0"), Path("4"), Path("8"))


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "nowhere"
    message = f"the corpus {str(missing)!r} is not a folder: nothing could be read; name one that exists"
    with pytest.raises(ValueError, match=re.escape(message)):
        find_corpus(missing)


def test_an_empty_folder_is_named(tmp_path: Path) -> None:
    message = (
        f"the corpus {str(tmp_path)!r} holds no * file: there is nothing to train on; "
        "name a folder of text files with --corpus"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        find_corpus(tmp_path)
