"""What a terminal shows of an error: where user code failed, and not the stages that it came through."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from evenstep import LoaderConfig, RemoteRankError, SampleError, StepSampler, build_loader
from evenstep.testing import SimulatedWorld

HERE = Path(__file__).name


class Broken:
    """Sample 5 cannot be read."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        if index == 5:
            raise OSError("the disk is gone")
        return {"input_ids": torch.arange(10)}


def shown(plane: Any, known: bool) -> list[str]:
    """The lines of the traceback."""
    loader = build_loader(
        Broken(),
        plane,
        LoaderConfig(seq_len=10),
        sampler=StepSampler(8, global_batch_size=8, order="sequential"),
        metadata=[10] * 8 if known else None,
    )
    with loader:
        for _ in range(2):  # it is met again
            with pytest.raises((RemoteRankError, SampleError)) as caught:
                list(loader)
    return "".join(traceback.format_exception(caught.value)).splitlines()


def files(lines: list[str]) -> list[str]:
    return [Path(line.split('"')[1]).name for line in lines if line.startswith('  File "')]


def test_the_origin_comes_first_and_the_stages_are_left_out() -> None:
    first, second = SimulatedWorld(2).run(shown, False)
    told = "rank 1 failed at sample 5: OSError: the disk is gone (every rank stops here; the traceback is on rank 1)"
    for lines in (first, second):
        assert lines[-1] == f"evenstep.errors.RemoteRankError: {told}"
        assert not {"planner.py", "metadata_gather.py", "host_prefetch.py"} & set(files(lines))
    assert set(files(first)) == {HERE, "loader.py"}
    assert len(first) < 25
    origin = second.index("OSError: the disk is gone")
    assert files(second[:origin]) == ["read.py", "fetch.py", HERE]
    assert "evenstep.errors.SampleError: sample 5: OSError: the disk is gone" in second
    assert len(second) < 50


def test_where_lengths_are_known() -> None:
    lines = shown(None, known=True)
    assert files(lines[: lines.index("OSError: the disk is gone")])[-1] == HERE
    assert "planned_reader.py" not in files(lines[lines.index("OSError: the disk is gone") :])
    assert lines[-1] == "evenstep.errors.SampleError: sample 5: OSError: the disk is gone"
