"""torch.distributed.checkpoint: real files, saved on four ranks, loaded on two and on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.device_mesh import init_device_mesh

from evenstep import DataPlane
from evenstep.testing import run_ranks
from evenstep.testing.jobs import Layout, Seen, Stream, members_by_step

STREAM = Stream(kind="step", lengths=tuple([7, 3, 12, 1, 9, 20, 5, 2] * 6), rows=12, seed=5)
pytestmark = [
    pytest.mark.gloo,
    # torch.distributed.checkpoint warns of its own insides.
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),
]


def plane() -> DataPlane:
    if not dist.is_initialized():
        return DataPlane.single()
    return DataPlane.from_mesh(init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",)))


def layout(micro_batch_size: int) -> Layout:
    return Layout(options={"micro_batch_size": micro_batch_size})


def save(rank: int, path: str, steps: int) -> tuple[list[Seen], dict[str, Any]]:
    """Train some steps and save as a trainer does: model and loader under one dictionary."""
    model = torch.nn.Linear(2, 2)
    with layout(3).loader(STREAM, plane()) as loader:
        seen: list[Seen] = []
        while loader.step < steps:
            seen.append(Seen.of(next(loader), loader))
        state_dict_saver.save({"model": model.state_dict(), "loader": loader}, checkpoint_id=path)
        return seen, loader.state_dict()


def load(rank: int, path: str, in_use: bool) -> tuple[dict[str, Any], list[Seen]]:
    model = torch.nn.Linear(2, 2)
    with layout(1).loader(STREAM, plane()) as loader:
        if in_use:
            next(loader)
        state_dict_loader.load({"model": model.state_dict(), "loader": loader}, checkpoint_id=path)
        return loader.state_dict(), [Seen.of(batch, loader) for batch in loader]


@pytest.mark.parametrize(("ranks", "in_use"), [(2, False), (1, True)], ids=["two, fresh", "one, in use"])
def test_saved_on_four_ranks_it_goes_on_on_fewer(tmp_path: Path, ranks: int, in_use: bool) -> None:
    path = str(tmp_path / "checkpoint")
    saved = run_ranks(save, 4, path, 2)
    states = [state for _, state in saved]
    assert all(state == states[0] for state in states)
    loaded = run_ranks(load, ranks, path, in_use)
    for state, _ in loaded:
        assert state == states[0]
    before = members_by_step([seen for seen, _ in saved])
    after = members_by_step([seen for _, seen in loaded])
    assert sorted(before) == [0, 1]
    assert sorted(after) == [2, 3]
    assert {**before, **after} == {cursor.step: members for cursor, members in STREAM.steps()}


def test_saved_in_one_process_without_a_group(tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    saved = save(0, path, 3)
    loaded = load(0, path, False)
    assert loaded[0] == saved[1]
    assert list(members_by_step([loaded[1]])) == [3]
