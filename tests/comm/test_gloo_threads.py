"""Groups are destroyed at once, but by an old torch only after its threads have let go."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch.distributed as dist

from evenstep.comm import gloo_threads


@pytest.mark.parametrize(("old", "expected"), [(True, [0.1]), (False, [])])
def test_an_old_torch_is_given_a_moment(
    old: bool, expected: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(gloo_threads, "_DESTROYS_UNDER_LOCK", old)
    monkeypatch.setattr(time, "sleep", slept.append)
    gloo_threads.let_go()
    gloo_threads.destroy_process_group()
    assert slept == []  # there is no group
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    gloo_threads.destroy_process_group()
    assert slept == expected
    assert not dist.is_initialized()
