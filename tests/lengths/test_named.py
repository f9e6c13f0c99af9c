"""``MODULE:NAME`` is found where a user expects it, or the message says where it was sought."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from evenstep.lengths.named import named


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [path for path in sys.path if path])
    monkeypatch.setattr("sys.modules", dict(sys.modules))
    return tmp_path


def test_a_module_of_the_working_directory(folder: Path) -> None:
    (folder / "named_here.py").write_text("class Box:\n    inner = 3\n")
    assert named("named_here:Box.inner") == 3
    assert named("named_here.Box") is named("named_here:Box")


def test_a_module_on_the_path() -> None:
    assert named("json:dumps")([]) == "[]"


@pytest.mark.parametrize("absolute", [True, False])
def test_a_file_elsewhere(absolute: bool, folder: Path) -> None:
    stem = f"named_elsewhere_{absolute}".lower()
    (folder / "data").mkdir()
    (folder / "data" / f"{stem}.py").write_text("from named_beside import number\n")
    (folder / "data" / "named_beside.py").write_text("number = 5\n")
    file = Path("data", f"{stem}.py")
    assert named(f"{folder / file if absolute else file}:number") == 5


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        ("json", ValueError, "'json' names nothing; expected MODULE:NAME, for example my_project.data:train_set, or FILE.py:NAME"),
        ("data.py", ValueError, "'data.py' names nothing; expected MODULE:NAME, for example my_project.data:train_set, or FILE.py:NAME"),
        (
            "nosuch.data:train",
            ModuleNotFoundError,
            "nosuch.data:train: no module 'nosuch' in HERE, nor elsewhere on Python's path; change to the folder that it lies "
            "in, name the file (FOLDER/nosuch.py:NAME), or set PYTHONPATH=FOLDER",
        ),
        ("a/b.py:train", FileNotFoundError, "a/b.py:train: there is no file a/b.py in HERE"),
        ("named_has:data", AttributeError, "named_has:data: named_has has no 'data'; it has train_set, make"),
        ("named_empty:data", AttributeError, "named_empty:data: named_empty has no 'data'"),
        ("json:dumps.x", AttributeError, "json:dumps.x: json has no 'dumps.x'"),
        (
            "named_needy:x",
            ModuleNotFoundError,
            "named_needy:x: named_needy was found, but imports 'nosuch_package', which is not installed here",
        ),
    ],
)  # fmt: skip
def test_what_is_not_found(words: str, error: type[Exception], message: str, folder: Path) -> None:
    (folder / "named_needy.py").write_text("import nosuch_package\n")
    (folder / "named_has.py").write_text("import os\n_seed = 0\ntrain_set = []\ndef make(): ...\n")
    (folder / "named_empty.py").write_text("")
    with pytest.raises(error, match=f"^{re.escape(message.replace('HERE', str(folder)))}$"):
        named(words)
