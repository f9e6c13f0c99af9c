"""Notebooks are committed as a reader wants them: run from top to bottom, with pictures and with checks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "notebooks").glob("*.ipynb"))


def cells(notebook: Path) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]


def test_there_are_six() -> None:
    assert [notebook.stem[:2] for notebook in NOTEBOOKS] == ["01", "02", "03", "04", "05", "06"]


def test_all_are_on_the_page_that_one_starts_with() -> None:
    text = (NOTEBOOKS[0].parents[1] / "docs" / "start.md").read_text()
    assert [notebook.stem for notebook in NOTEBOOKS if f"`{notebook.stem}`" not in text] == []


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_was_run_in_order_and_shows_pictures(notebook: Path) -> None:
    code = cells(notebook)
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert [output["ename"] for output in outputs if output["output_type"] == "error"] == []
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not any(output.get("name") == "stderr" for output in outputs), "a warning is shown to the reader"


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_checks_what_it_says(notebook: Path) -> None:
    source = "".join("".join(cell["source"]) for cell in cells(notebook))
    assert source.count("assert") >= 3
    assert "http" not in source, "a notebook runs offline"
