from __future__ import annotations

import os

import pytest
import torch.distributed as dist

from evenstep.demo.launch import RanksFailed, launch

pytestmark = pytest.mark.gloo


def test_ranks_are_joined_and_nothing_stays_in_the_environment() -> None:
    before = dict(os.environ)
    assert launch(2, dist.get_world_size) == 2
    assert dict(os.environ) == before


def test_a_failing_rank_is_named_with_its_error() -> None:
    with pytest.raises(RanksFailed, match=r"^rank 0 failed: ValueError: invalid literal for int\(\)"):
        launch(1, int, "no number")
