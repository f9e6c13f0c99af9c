"""Every Python block of the documentation runs, page by page, and so does every example of a docstring."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import evenstep

DOCS = Path(__file__).resolve().parents[2] / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PAGES = sorted(path for path in DOCS.glob("*.md") if BLOCK.search(path.read_text()))
MODULES = [module.name for module in pkgutil.walk_packages(evenstep.__path__, "evenstep.")]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_the_examples_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # some write files
    text = page.read_text()
    module = sys.modules["__page__"] = ModuleType("__page__")  # dataclasses look their module up
    for block in BLOCK.finditer(text):
        lines = text.count("\n", 0, block.start(1))
        exec(compile("\n" * lines + block[1], str(page), "exec"), vars(module))


def test_the_examples_of_the_docstrings_run() -> None:
    tried = 0
    for name in MODULES:
        if name.endswith("__main__"):
            continue
        failed, attempted = doctest.testmod(importlib.import_module(name))
        assert not failed, name
        tried += attempted
    assert tried > 10


def test_the_pages_with_examples_are_found() -> None:
    assert {"start", "compose", "planning", "costs", "packing", "testing"} <= {page.stem for page in PAGES}
