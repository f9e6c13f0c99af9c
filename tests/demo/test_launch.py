from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import SignalException

from evenstep.demo import launch as module
from evenstep.demo.launch import RanksFailed, launch


def stop_by(monkeypatch: pytest.MonkeyPatch, stop: signal.Signals) -> None:
    def elastic_launch(*_: object) -> Any:
        def run(*_: object) -> None:
            raise SignalException("stopped", stop)

        return run

    monkeypatch.setattr(module, "elastic_launch", elastic_launch)


def test_ctrl_c_is_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    stop_by(monkeypatch, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        launch(2, os.getpid)


def test_another_signal_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    stop_by(monkeypatch, signal.SIGTERM)
    with pytest.raises(RanksFailed, match=r"^the ranks were stopped by SIGTERM$"):
        launch(2, os.getpid)


@pytest.mark.gloo
def test_ranks_are_joined_and_nothing_stays_behind() -> None:
    before, handlers = (
        dict(os.environ),
        [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
    )
    assert launch(2, dist.get_world_size) == 2
    assert dict(os.environ) == before
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


@pytest.mark.gloo
def test_a_failing_rank_is_named_with_its_error() -> None:
    with pytest.raises(RanksFailed, match=r"^rank 0 failed: ValueError: invalid literal for int\(\)"):
        launch(1, int, "no number")
