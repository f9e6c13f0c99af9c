"""`evenstep lengths`: every sample read once, also when it is stopped in between."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evenstep import LoaderConfig, SampleError, SampleMetadata, StepSampler, build_loader
from evenstep.cli import main
from evenstep.lengths import scan_lengths

MODULE = """
class Dataset:
    def __len__(self):
        return 5000

    def __getitem__(self, index):
        return {"input_ids": list(range(index % 7)), "name": "x" * index}

def make():
    return Dataset()

class Sized(Dataset):
    pass

class Rooted(Dataset):
    def __init__(self, root):
        pass

def letters(sample):
    return len(sample["name"])

class Damaged(Dataset):
    def __getitem__(self, index):
        if index % 900 == 7:
            raise OSError("no such\\n block")
        return super().__getitem__(index)

class Scratched(Dataset):
    def __getitem__(self, index):
        return {} if index == 19 else super().__getitem__(index)

dataset = Dataset()
"""


class Dataset:
    def __init__(self, failing: int | None = None) -> None:
        self.failing = failing
        self.read: list[int] = []

    def __len__(self) -> int:
        return 3000

    def __getitem__(self, index: int) -> Any:
        if index == self.failing:
            raise OSError("no such block")
        self.read.append(index)
        return {"input_ids": np.arange(index % 11)}


EXPECTED = np.arange(3000) % 11


@pytest.mark.parametrize(("workers", "worker"), [(0, "process"), (1, "process"), (2, "thread")])
def test_every_length_is_written(tmp_path: Path, workers: int, worker: str) -> None:
    output = tmp_path / "lengths.npy"
    result = scan_lengths(Dataset(), output, num_workers=workers, worker=worker)
    assert result.dtype == np.int64
    assert np.array_equal(result, EXPECTED)
    assert np.array_equal(np.load(output), EXPECTED)
    assert list(tmp_path.iterdir()) == [output]


def test_a_loader_takes_the_file(tmp_path: Path) -> None:
    output = tmp_path / "lengths.npy"
    dataset = Dataset()
    scan_lengths(dataset, output)
    sampler = StepSampler(3000, global_batch_size=100)
    with build_loader(dataset, None, LoaderConfig(seq_len=16), sampler=sampler, metadata=output) as loader:
        assert next(loader)["info"].num_tokens > 0


def test_a_stopped_scan_goes_on_where_it_stopped(tmp_path: Path) -> None:
    output = tmp_path / "lengths.npy"
    message = (
        f"sample 2500: OSError: no such block; {output}.part keeps what has been read, the same command goes on from "
        "there"
    )
    with pytest.raises(SampleError, match=f"^{re.escape(message)}$") as caught:
        scan_lengths(Dataset(2500), output)
    assert caught.value.sample == 2500
    assert not output.exists()
    done: list[tuple[int, int]] = []
    repaired = Dataset()

    class Watch:
        def __init__(self, *counts: int) -> None:
            done.append((counts[0], counts[1]))

        def __enter__(self) -> Any:
            return lambda samples: done.append((samples, 0))

        def __exit__(self, *_: Any) -> None:
            pass

    assert np.array_equal(scan_lengths(repaired, output, progress=Watch), EXPECTED)
    assert repaired.read == list(range(2500, 3000))
    assert done == [(2500, 3000), (500, 0)]


def test_unreadable_samples_may_count_as_empty(tmp_path: Path) -> None:
    result = scan_lengths(Dataset(2500), tmp_path / "lengths.npy", unreadable="empty")
    assert result[2500] == 0
    assert np.array_equal(np.delete(result, 2500), np.delete(EXPECTED, 2500))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (
            "Damaged",
            "6 unreadable, written as empty: sample 7 (OSError: no such block), sample 907 (OSError: no such block), "
            "sample 1807 (OSError: no such block), sample 2707 (OSError: no such block), sample 3607 (OSError: no such "
            "block), 1 more",
        ),
        ("Scratched", "1 unreadable, written as empty: sample 19 (KeyError: 'name')"),
    ],
)
def test_the_command_names_what_it_could_not_read(
    name: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = f"scanned_{name.lower()}_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{module}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["", *sys.path])
    words = ["lengths", f"{module}:{name}", "-o", "out.npy", "--metadata-fn", f"{module}:letters"]
    assert main([*words, "--unreadable", "empty"]) == 0
    assert capsys.readouterr().err == f"evenstep lengths: {told}\n"


def test_an_unfinished_scan_of_another_dataset_is_refused(tmp_path: Path) -> None:
    part = tmp_path / "lengths.npy.part"
    with part.open("wb") as file:
        np.save(file, np.full(7, -1))
    message = (
        f"{part} is an unfinished scan of 7 samples, the dataset has 3000: it is of another dataset. Delete it to "
        "begin again."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        scan_lengths(Dataset(), tmp_path / "lengths.npy")


def test_a_part_file_of_something_else_is_refused(tmp_path: Path) -> None:
    part = tmp_path / "lengths.npy.part"
    with part.open("wb") as file:
        np.save(file, np.zeros((3000, 2)))
    message = f"{part} is no unfinished scan, the dataset has 3000: it is of another dataset. Delete it to begin again."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        scan_lengths(Dataset(), tmp_path / "lengths.npy")


def test_a_metadata_fn_counts_what_it_likes(tmp_path: Path) -> None:
    def metadata_fn(sample: Any) -> SampleMetadata:
        return SampleMetadata(2 * len(sample["input_ids"]))

    assert np.array_equal(scan_lengths(Dataset(), tmp_path / "a.npy", metadata_fn=metadata_fn), 2 * EXPECTED)


def test_a_stream_cannot_be_scanned(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=re.escape("list_iterator has no len() and [index]")):
        scan_lengths(iter([]), tmp_path / "a.npy")


@pytest.mark.parametrize("name", ["dataset", "make", "Dataset", "Sized"])
def test_the_command_imports_and_scans(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = f"scanned_{name.lower()}_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{module}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["", *__import__("sys").path])
    if name == "Dataset":
        code = main(["lengths", f"{module}:make", "-o", "out.npy", "--metadata-fn", f"{module}:letters"])
        expected = np.arange(5000)
    else:
        code = main(
            ["lengths", f"{module}:{name}", "-o", "out.npy", "--num-workers", "1", "--worker", "thread"]
        )
        expected = np.arange(5000) % 7
    assert code == 0
    assert np.array_equal(np.load("out.npy"), expected)
    out = capsys.readouterr().out
    total = int(expected.sum())
    told = (
        f"out.npy: 5000 samples, {total} tokens, mean {total / 5000:.1f}, longest {expected.max()}, "
        f"{int((expected == 0).sum())} empty; "
    )
    assert out.startswith(told)


def test_a_class_that_needs_arguments_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = f"scanned_rooted_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{module}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["", *sys.path])
    assert main(["lengths", f"{module}:Rooted", "-o", "out.npy"]) == 1
    assert capsys.readouterr().err == (
        f"evenstep lengths: {module}:Rooted is the class Rooted, which cannot be called without arguments (missing a "
        "required argument: 'root'): name a dataset, or a function without arguments that returns one\n"
    )


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (
            "nothing",
            "evenstep lengths: 'nothing' names nothing; expected MODULE:NAME, for example my_project.data:train_set, "
            "or FILE.py:NAME",
        ),
        (
            "no_such_module_here:x",
            f"evenstep lengths: no_such_module_here:x: no module 'no_such_module_here' in {Path.cwd()}, nor elsewhere on "
            "Python's path; change to the folder that it lies in, name the file (FOLDER/no_such_module_here.py:NAME), or set "
            "PYTHONPATH=FOLDER",
        ),
        ("no_such.py:x", f"evenstep lengths: no_such.py:x: there is no file no_such.py in {Path.cwd()}"),
        (
            "json:decoder",
            "evenstep lengths: module has no len() and [index]: only a map-style dataset can be scanned",
        ),
    ],
)
def test_the_command_says_what_it_cannot_find(
    dataset: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lengths", dataset, "-o", str(tmp_path / "out.npy")]) == 1
    assert capsys.readouterr().err == message + "\n"


@pytest.mark.parametrize("name", ["lengths.csv", "lengths"])
def test_only_npy_is_written_and_nothing_is_read_before(tmp_path: Path, name: str) -> None:
    dataset = Dataset()
    message = (
        f"{tmp_path / name} ends with {Path(name).suffix!r}, but lengths are written in the format of .npy, and readers "
        f"go by the ending; write to {tmp_path / 'lengths.npy'}"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        scan_lengths(dataset, tmp_path / name)
    assert not dataset.read
    assert not list(tmp_path.iterdir())
