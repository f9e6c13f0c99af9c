"""A folder of text: the same documents in the same order on every machine."""

from __future__ import annotations

import email
import re
from pathlib import Path

import pytest
import torch

from evenstep import LoaderConfig, RemoteRankError, StepSampler, build_loader
from evenstep.datasets import SplitDocuments, TextFolder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    files = {
        "b.txt": "zwei",
        "a/z.txt": "ein\r\nß",
        "c.txt": "",
        ".hidden.txt": "x",
        ".git/x.txt": "x",
        "d.md": "y",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(text.encode())
    return tmp_path


def test_files_are_sorted_and_hidden_ones_left_out(folder: Path) -> None:
    texts = TextFolder(folder)
    assert [file.relative_to(folder).as_posix() for file in texts.files] == ["a/z.txt", "b.txt", "c.txt"]
    assert len(texts) == 3
    assert [len(texts[k]["input_ids"]) for k in range(3)] == texts.lengths.tolist() == [7, 4, 0]
    for k, file in enumerate(texts.files):
        tokens = texts[k]["input_ids"]
        assert tokens.dtype == torch.int64
        assert bytes(tokens.tolist()) == file.read_bytes()
    assert len(TextFolder(str(folder), pattern="*.md")) == 1


def test_files_of_other_names_are_counted_and_named(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    texts = TextFolder(folder)
    assert texts.left_out == 1
    assert [record.getMessage() for record in caplog.records] == [
        f"evenstep: {str(folder)!r} has 3 files '*.txt', which are read, and 1 of other names, which are not (the first is d.md); "
        "TextFolder(..., pattern='*') reads all"
    ]
    caplog.clear()
    assert TextFolder(folder, pattern="*").left_out == 0
    assert not caplog.records


def test_a_tokenizer_gets_the_text(folder: Path) -> None:
    texts = TextFolder(folder, lambda text: [ord(c) for c in text])
    assert texts[0]["input_ids"].tolist() == [ord(c) for c in "ein\r\nß"]
    assert texts[2]["input_ids"].dtype == torch.int64
    assert not hasattr(texts, "lengths")
    with pytest.raises(AttributeError, match=r"^lengths are known ahead only where bytes are the tokens; "):
        _ = texts.lengths


def test_pieces_are_read_alone() -> None:
    plain = TextFolder(Path(email.__file__).parent, pattern="*.py")
    coded = TextFolder(Path(email.__file__).parent, lambda text: list(text.encode()), pattern="*.py")
    for texts in (plain, coded):
        pieces = SplitDocuments(texts, 1000, lengths=plain.lengths)
        assert pieces.split > 5
        joined = [token for k in range(len(pieces)) for token in pieces[k]["input_ids"].tolist()]
        assert bytes(joined) == b"".join(file.read_bytes() for file in plain.files)


def test_a_file_that_grew_is_noticed(folder: Path) -> None:
    pieces = SplitDocuments(TextFolder(folder), 3)
    (folder / "b.txt").write_text("zwei!")
    assert bytes(pieces[3]["input_ids"].tolist()) == b"zwe"
    message = (
        "document 1 has not 4 tokens, its length says 4: its pieces would miss tokens; the lengths are of another version of "
        f"the dataset, find them anew ({folder / 'b.txt'})"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        pieces[4]


@pytest.mark.parametrize("error", [KeyError("ß"), StopIteration(), OverflowError("too long")])
def test_the_file_that_a_tokenizer_fails_on_is_named_up_to_the_loop(error: Exception, folder: Path) -> None:
    def encode(text: str) -> list[int]:
        if "ß" in text:
            raise error
        return [1]

    message = f"encode failed on {folder / 'a' / 'z.txt'}: {type(error).__name__}: {error}"
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}$") as caught:
        TextFolder(folder, encode)[0]
    assert caught.value.__cause__ is error
    sampler = StepSampler(3, global_batch_size=3)
    with (
        build_loader(TextFolder(folder, encode), None, LoaderConfig(seq_len=8), sampler=sampler) as loader,
        pytest.raises(RemoteRankError, match=f"^.*sample 0: .*{re.escape(message)}.*$"),
    ):
        next(iter(loader))


def test_refusals(folder: Path) -> None:
    missing = str(folder / "nosuch")
    message = f"{missing!r} is no folder: there is nothing to read; name one that exists"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        TextFolder(missing)
    message = (
        f"{str(folder)!r} holds no file '*.rst': there is nothing to read; name another folder or pattern"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        TextFolder(folder, pattern="*.rst")
    (folder / "b.txt").write_bytes(b"a\xff")
    message = (
        f"{folder / 'b.txt'} is not UTF-8 (invalid start byte at byte 1): it would become other text; convert it, or "
        "leave encode away to train on bytes"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        TextFolder(folder, lambda text: [len(text)])[1]


@pytest.mark.parametrize(
    ("made", "told"),
    [
        ({"input_ids": [1]}, "{'input_ids': [1]}"),
        (["a", "b"], "['a', 'b']"),
        (object, "the class object"),
    ],
)
def test_what_is_no_token_ids(made: object, told: str, folder: Path) -> None:
    message = (
        f"encode made {told} of {folder / 'b.txt'}, expected its token ids, integers [n]: of what a tokenizer returns, often "
        ".ids or ['input_ids']"
    )
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        TextFolder(folder, lambda _: made)[1]  # type: ignore[arg-type, return-value]
