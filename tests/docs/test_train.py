"""The script of the README trains on two ranks, is stopped, and goes on with one as if nothing had happened."""

from __future__ import annotations

import email
import os
import re
import runpy
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from evenstep.testing import run_ranks

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "docs" / "train.py"


def run_script(rank: int, ranks: int, port: int, folder: str, texts: str, steps: int) -> None:
    """As torchrun starts it."""
    os.chdir(folder)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks))
    sys.argv = ["train.py", texts, str(steps)]
    runpy.run_path(str(SCRIPT), run_name="__main__")


def train(ranks: int, folder: Path, texts: Path, steps: int) -> dict[str, Any]:
    """What it saved last."""
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    run_ranks(run_script, ranks, ranks, port, str(folder), str(texts), steps, init=False, timeout=90)
    saved: dict[str, Any] = torch.load(folder / "checkpoint.pt")
    return saved


@pytest.mark.gloo
def test_two_ranks_then_one(tmp_path: Path) -> None:
    texts, stopped, straight = (tmp_path / name for name in ("texts", "stopped", "straight"))
    for folder in (texts, stopped, straight):
        folder.mkdir()
    for source in Path(email.__file__).parent.glob("*.py"):
        (texts / f"{source.stem}.txt").write_bytes(source.read_bytes())
    before = train(2, stopped, texts, 8)
    assert before["loader"]["step"] == 5  # three steps more are in no checkpoint
    resumed = train(1, stopped, texts, 10)
    alone = train(1, straight, texts, 10)
    assert resumed["loader"]["consumed_samples"] == alone["loader"]["consumed_samples"] == 160
    # Adam takes steps of the learning rate also along gradients that are nothing but rounding.
    for name, parameter in resumed["model"].items():
        torch.testing.assert_close(parameter, alone["model"][name], rtol=0, atol=2e-4)
    assert max((before["model"][name] - alone["model"][name]).abs().max() for name in before["model"]) > 2e-3


def test_the_readme_shows_the_script() -> None:
    blocks = re.findall(r"```py\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks == [SCRIPT.read_text()]
