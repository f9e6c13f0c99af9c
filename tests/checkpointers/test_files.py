"""Plain files: the state is JSON, and nothing in it needs more than `torch.load` allows by default."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from evenstep import DataPlane, Loader
from evenstep.testing.jobs import Layout, Stream

STREAM = Stream(kind="step", lengths=(3, 5, 2, 7, 1, 4, 6, 2, 9, 1, 8, 3), rows=4, seed=2**64 - 1)

RoundTrip = Callable[[Any, Path], Any]


def by_json(state: Any, path: Path) -> Any:
    path.write_text(json.dumps(state))
    return json.loads(path.read_text())


def by_torch(state: Any, path: Path) -> Any:
    torch.save({"model": torch.nn.Linear(1, 1).state_dict(), "loader": state}, path)
    return torch.load(path, weights_only=True)["loader"]


def by_pickle(state: Any, path: Path) -> Any:
    path.write_bytes(pickle.dumps(state))
    return pickle.loads(path.read_bytes())


def new_loader() -> Loader[Any]:
    layout = Layout(options={"micro_batch_size": 2, "resume": "micro_batch"})
    return layout.loader(STREAM, DataPlane.single())


def rest_of(loader: Loader[Any]) -> list[Any]:
    rest = []
    while (batch := next(loader, None)) is not None:
        rest.append(batch["rows"])
    return rest


@pytest.mark.parametrize("round_trip", [by_json, by_torch, by_pickle])
@pytest.mark.parametrize("batches", range(7))
def test_the_state_comes_back_from_a_file(tmp_path: Path, round_trip: RoundTrip, batches: int) -> None:
    with new_loader() as loader:
        for _ in range(batches):
            next(loader)
        state = loader.state_dict()
        rest = rest_of(loader)
    with new_loader() as loader:
        loader.load_state_dict(round_trip(state, tmp_path / "state"))
        assert loader.state_dict() == state
        assert rest_of(loader) == rest
    assert len(rest) == 6 - batches
