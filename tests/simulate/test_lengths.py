"""Lengths come out of every format as they went in, and bad files are named."""

from __future__ import annotations

import json
import re
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from evenstep.simulate import read_lengths

several = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=30)
same_folder = hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def megatron_index(
    sequences: list[int], boundaries: list[int], *, version: int = 1, modes: bool = False
) -> bytes:
    pointers = [2 * sum(sequences[:position]) for position in range(len(sequences))]
    return (
        struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", version, 8, len(sequences), len(boundaries))
        + struct.pack(f"<{len(sequences)}i", *sequences)
        + struct.pack(f"<{len(pointers)}q", *pointers)
        + struct.pack(f"<{len(boundaries)}q", *boundaries)
        + (bytes(len(sequences)) if modes else b"")
    )


def write_npy(path: Path, lengths: list[int]) -> None:
    np.save(path, np.array(lengths, dtype=np.uint32))


def write_npy_floats(path: Path, lengths: list[int]) -> None:
    np.save(path, np.array(lengths, dtype=np.float64))


def write_csv(path: Path, lengths: list[int]) -> None:
    path.write_text("".join(f"{length}\n" for length in lengths))


def write_csv_table(path: Path, lengths: list[int]) -> None:
    lines = [f'"doc {number}",{length},1.5\n' for number, length in enumerate(lengths)]
    path.write_text('id,"Tokens",score\n' + "".join(lines), encoding="utf-8-sig")


def write_tsv(path: Path, lengths: list[int]) -> None:
    path.write_text("length\tid\n" + "".join(f"{length}\t7\n" for length in lengths))


def write_jsonl_numbers(path: Path, lengths: list[int]) -> None:
    path.write_text("\n\n".join(map(str, lengths)))


def write_jsonl_objects(path: Path, lengths: list[int]) -> None:
    path.write_text("".join(json.dumps({"id": "x", "num_tokens": length}) + "\n" for length in lengths))


def write_index(path: Path, lengths: list[int]) -> None:
    path.write_bytes(megatron_index(lengths, list(range(len(lengths) + 1))))


FORMATS: dict[str, tuple[str, Callable[[Path, list[int]], None]]] = {
    "npy": (".npy", write_npy),
    "npy of floats": (".npy", write_npy_floats),
    "csv": (".csv", write_csv),
    "csv with a header": (".csv", write_csv_table),
    "tsv": (".TSV", write_tsv),
    "jsonl of numbers": (".jsonl", write_jsonl_numbers),
    "jsonl of objects": (".jsonl", write_jsonl_objects),
    "megatron": (".idx", write_index),
}


@pytest.mark.parametrize(("ending", "write"), FORMATS.values(), ids=FORMATS.keys())
@same_folder
@given(lengths=several)
def test_what_was_written_is_read(
    tmp_path: Path, ending: str, write: Callable[[Path, list[int]], None], lengths: list[int]
) -> None:
    path = tmp_path / f"lengths{ending}"
    write(path, lengths)
    read = read_lengths(path)
    assert read.dtype == np.int64
    assert read.tolist() == lengths


@same_folder
@given(
    documents=st.lists(st.lists(st.integers(0, 1000), max_size=4), min_size=1, max_size=10),
    modes=st.booleans(),
)
def test_megatron_documents_are_sums_of_their_sequences(
    tmp_path: Path, documents: list[list[int]], modes: bool
) -> None:
    sequences = [length for document in documents for length in document]
    boundaries = [0, *np.cumsum([len(document) for document in documents]).tolist()]
    path = tmp_path / "data.idx"
    path.write_bytes(megatron_index(sequences, boundaries, modes=modes))
    assert read_lengths(path).tolist() == [sum(document) for document in documents]


def test_lists_of_tokens_count_their_tokens(tmp_path: Path) -> None:
    path = tmp_path / "tokens.jsonl"
    path.write_text('{"input_ids": [5, 6, 7], "id": 1}\n{"input_ids": [], "id": 2}\n')
    assert read_lengths(path).tolist() == [3, 0]


def test_a_named_column_is_taken(tmp_path: Path) -> None:
    csv, jsonl = tmp_path / "a.csv", tmp_path / "a.jsonl"
    csv.write_text("tokens,length\n1,2\n3,4\n")
    jsonl.write_text('{"tokens": 1, "length": 2}\n{"tokens": 3, "length": 4}\n')
    for path in (csv, jsonl):
        assert read_lengths(path, column="length").tolist() == [2, 4]


def test_progress_is_told_of_every_byte(tmp_path: Path) -> None:
    seen: list[tuple[str, int]] = []

    @contextmanager
    def progress(description: str, total: int) -> Iterator[Callable[[int], None]]:
        seen.append((description, total))
        yield lambda amount: seen.append(("", amount))

    path = tmp_path / "a.csv"
    path.write_text("".join(f"{length}\n" for length in range(1000)))
    read_lengths(path, progress=progress)
    assert seen[0] == ("reading a.csv", path.stat().st_size)
    assert sum(amount for _, amount in seen[1:]) == path.stat().st_size


def test_parquet_without_pyarrow_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    path = tmp_path / "a.parquet"
    path.touch()
    message = (
        f"reading {path} needs pyarrow, which is not installed; pip install pyarrow, "
        "or save the lengths with numpy.save"
    )
    with pytest.raises(ImportError, match=f"^{re.escape(message)}$"):
        read_lengths(path)


def test_parquet_columns_of_numbers_and_of_tokens(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"tokens": [3, 1], "text_ids": [[1, 2], []]}), path)
    assert read_lengths(path).tolist() == [3, 1]
    assert read_lengths(path, column="text_ids").tolist() == [2, 0]


BAD: list[tuple[str, bytes, str]] = [
    (
        "a.txt",
        b"1\n",
        "{path} ends with '.txt': lengths are read from .npy, .csv, .tsv, .jsonl, .parquet and .idx",
    ),
    ("a.csv", b"", "{path} holds no lengths: there is nothing to simulate"),
    ("a.csv", b"tokens\n", "{path} holds no lengths: there is nothing to simulate"),
    (
        "a.csv",
        b"1\n-2\n",
        "length 1 of {path} is -2.0: a document has a whole number of tokens, 0 or more",
    ),
    (
        "a.csv",
        b"1\n2\nnan\n",
        "length 2 of {path} is nan: a document has a whole number of tokens, 0 or more",
    ),
    (
        "a.csv",
        b"1.5\n",
        "length 0 of {path} is 1.5: a document has a whole number of tokens, 0 or more",
    ),
    (
        "a.csv",
        b"1,2\n3,4\n",
        "{path} has 2 columns and no header: nothing says which one is the length; "
        "add a header or leave only that column",
    ),
    ("a.csv", b"a,b\n3,4\n", "{path} has the columns 'a', 'b': choose the one with the lengths (--column)"),
    (
        "a.jsonl",
        b'"some text"\n',
        "{path} has a line whose length is 'some text', expected a number or a list of tokens; "
        "tokenise the text first",
    ),
    ("a.jsonl", b'{"tokens": 1}\n{"id": 2}\n', "{path} has a line without 'tokens': {{\"id\": 2}}"),
    ("a.jsonl", b"1\n{2\n", "{path} has a line that is no JSON: {{2"),
    ("a.jsonl", b"1,2\n", "{path} has a line that is no JSON: 1,2"),
    (
        "a.idx",
        b"not an index",
        "{path} does not begin with b'MMIDIDX\\x00\\x00': it is no Megatron index; "
        "pass the .idx file that lies beside the .bin file",
    ),
    (
        "a.idx",
        megatron_index([1], [0, 1], version=2),
        "{path} is a Megatron index of version 2, only version 1 is known",
    ),
    (
        "a.idx",
        megatron_index([1, 2], [0, 2])[:-1],
        "{path} has 73 bytes of the 74 that its header asks for: it was cut off; copy it again",
    ),
    (
        "a.idx",
        megatron_index([1], [0, 1])[:20],
        "{path} has 20 bytes of the 34 that its header asks for: it was cut off; copy it again",
    ),
    ("a.idx", megatron_index([4, -1], [0, 2]), "{path} says that sequence 1 has -1 tokens"),
    (
        "a.idx",
        megatron_index([4, 1], [0, 1]),
        "{path} has document boundaries that do not run from 0 to its 2 sequences: "
        "the index is damaged; write it again",
    ),
]


@pytest.mark.parametrize(("name", "content", "message"), BAD, ids=[message[:40] for _, _, message in BAD])
def test_bad_files_are_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"^{re.escape(message.format(path=path))}$"):
        read_lengths(path)


def test_a_matrix_is_no_list_of_lengths(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    np.save(path, np.ones((2, 2), dtype=np.int32))
    message = f"{path} holds int32 [2, 2], expected one whole number per document, [n]"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        read_lengths(path)


@pytest.mark.parametrize("content", ["3\n4\n", "a,b\n3,4\n"], ids=["no header", "other header"])
def test_a_column_that_is_not_there(tmp_path: Path, content: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(content)
    message = (
        f"{path} has no header, so there is no column 'tokens'; leave --column out"
        if content[0] == "3"
        else f"{path} has no column 'tokens', it has 'a', 'b'"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        read_lengths(path, column="tokens")


def test_a_line_without_a_number(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("tokens,id\n3,x\nmany,y\n")
    with pytest.raises(ValueError, match=re.escape(f"{path} has a line without a number in column 1: ")):
        read_lengths(path)
