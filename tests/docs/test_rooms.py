"""The maps of the house cannot rot: every room is on them, and nothing else."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import evenstep
import evenstep.errors
from evenstep import cli

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "src" / "evenstep"
DOCS = ROOT / "docs"
MAPPED = re.compile(r"^\| `([\w./]+)` \|", re.MULTILINE)


def rooms() -> set[str]:
    """Files, and folders of Python files with a slash, at the top of the package."""
    files = {path.name for path in SOURCES.iterdir() if path.is_file()} - {"README.md"}
    return files | {f"{path.parent.name}/" for path in SOURCES.glob("*/__init__.py")}


def test_every_room_is_on_the_map_once() -> None:
    mapped = MAPPED.findall((SOURCES / "README.md").read_text())
    assert len(mapped) == len(set(mapped))
    inner = {name for name in mapped if name.count("/") > 1}
    assert set(mapped) - inner == rooms()
    assert [name for name in inner if not (SOURCES / name).is_dir()] == []


def test_the_map_fits_one_screen() -> None:
    assert len((SOURCES / "README.md").read_text().splitlines()) <= 45


def test_the_files_that_the_map_speaks_of_exist() -> None:
    text = (SOURCES / "README.md").read_text()
    named = set(re.findall(r"`((?:\w+/)+\w+\.py|tests/\w+/)`", text))
    assert named
    assert [name for name in named if not ((SOURCES / name).exists() or (ROOT / name).exists())] == []


def test_every_public_package_is_in_the_reference() -> None:
    documented = "".join(path.read_text() for path in (DOCS / "api").glob("*.md"))
    packages = {path.parent.name for path in SOURCES.glob("*/__init__.py")} - {"bench", "demo"}
    public = {f"evenstep.{name}" for name in packages}
    assert [name for name in public if f"automodule:: {name}\n" not in documented] == []


def test_every_public_name_is_documented_somewhere() -> None:
    pages = "".join(path.read_text() for path in (DOCS / "api").glob("*.md"))
    modules = [importlib.import_module(name) for name in re.findall(r"automodule:: (\S+)", pages)]
    documented = {name for module in modules for name in module.__all__}
    assert set(evenstep.__all__) - documented == set()


def test_every_benchmark_has_a_section() -> None:
    text = (DOCS / "benchmarks.md").read_text()
    assert [name for name in cli.BENCHES if f"evenstep bench {name}" not in text] == []


def test_every_error_class_is_explained() -> None:
    text = (DOCS / "faults.md").read_text()
    assert [name for name in evenstep.errors.__all__ if f"| `{name}` |" not in text] == []


def test_the_messages_that_are_explained_are_those_of_the_sources() -> None:
    """Between its placeholders (capitals and ellipses), each message is literally in the sources."""
    sources = "".join(path.read_text() for path in SOURCES.rglob("*.py"))
    sources = re.sub(r'"\s*\n\s*f?"', "", sources)  # a text that is written over several lines
    sources = re.sub(r"\{[^{}]*\}", "{}", sources)
    rows = re.findall(r"^\| (`[^|]+) \|", (DOCS / "faults.md").read_text(), re.MULTILINE)
    messages = [text for row in rows for text in re.findall(r"`([^`]+)`", row) if " " in text]
    assert len(messages) > 30
    unknown = []
    for message in messages:
        parts = re.split(r"\.\.\.|\b[A-Z]+\b|=|'", message)
        longest = max((part.strip(" :") for part in parts), key=len)
        if longest not in sources:
            unknown.append((message, longest))
    assert unknown == []
