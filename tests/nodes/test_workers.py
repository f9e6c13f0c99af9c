"""Worker processes as people know them from torch: kept over epochs, begun by a function, gone with their parent."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from torch.utils.data import get_worker_info

from evenstep import DataPlane, LoaderConfig, RemoteRankError, StepSampler, build_loader
from evenstep.nodes import ProcessFetcher
from evenstep.nodes.sample_seed import SeedKey
from evenstep.testing import SimulatedWorld

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]
KEY = SeedKey(3, 1)


class Asked:
    """Says who reads it."""

    def __init__(self) -> None:
        self.begun: list[int] = []

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Any]:
        info: Any = get_worker_info()
        return {
            "input_ids": torch.arange(4),
            "worker": (os.getpid(), info.id, info.num_workers, info.seed),
            "begun": list(self.begun),
        }


class Renewed(Asked):
    """Changes from epoch to epoch, so that workers hold an old copy of it."""

    def set_epoch(self, epoch: int) -> None:
        self.begun = [epoch]


def test_a_function_begins_each_worker_and_torch_tells_it_who_it_is() -> None:
    dataset = Asked()

    def begin(number: int) -> None:
        dataset.begun.append(100 + number)

    fetcher = ProcessFetcher(dataset, 2, worker_init_fn=begin, prefetch_factor=2, seed=7)
    first = fetcher.submit(range(16), KEY).take(16)
    again = fetcher.submit(range(16), KEY).take(16)
    fetcher.close()
    workers = {value["worker"] for value in first}
    assert {(number, of) for _, number, of, _ in workers} == {(0, 2), (1, 2)}
    assert len({seed for *_, seed in workers}) == 2
    assert {value["worker"] for value in again} == workers  # the same processes
    assert all(value["begun"] == [100 + value["worker"][1]] for value in first + again)
    assert dataset.begun == []


@pytest.mark.parametrize(("kind", "kept"), [(Asked, True), (Renewed, False)])
@pytest.mark.parametrize("known", [False, True], ids=["online", "metadata"])
def test_workers_live_as_long_as_the_loader_unless_their_dataset_changes(
    known: bool, kind: type[Asked], kept: bool
) -> None:
    config = LoaderConfig(seq_len=4, num_workers=2, worker="process")
    sampler = StepSampler(16, global_batch_size=8)
    epochs: list[set[Any]] = []
    begun: list[Any] = []
    with build_loader(
        kind(),
        None,
        config,
        sampler=sampler,
        metadata=[4] * 16 if known else None,
        pack=lambda samples, _: samples[0],
        collate=lambda rows: {"rows": rows},
    ) as loader:
        for epoch in range(2):
            loader.set_epoch(epoch)
            rows = [row for batch in loader for row in batch["rows"]]
            epochs.append({row["worker"][0] for row in rows})
            begun.append(rows[-1]["begun"])
    assert len(epochs[0]) == len(epochs[1]) == 2
    assert (epochs[0] == epochs[1]) == kept
    assert begun[1] == ([] if kept else [1])


def test_a_failing_start_of_a_worker_is_told_as_it_is() -> None:
    def begin(number: int) -> None:
        raise OSError(5, "no decoder")

    fetcher = ProcessFetcher(Asked(), 1, worker_init_fn=begin)
    with pytest.raises(OSError, match=r"(?s)Caught OSError in DataLoader worker process 0\..*no decoder"):
        fetcher.submit([0, 1], KEY).take(2)
    fetcher.close()


def test_closed_workers_read_nothing_more() -> None:
    fetcher = ProcessFetcher(Asked(), 1)
    fetcher.close()
    with pytest.raises(RuntimeError, match=r"^the worker processes of this loader have been closed$"):
        fetcher.submit([0], KEY)


class Killed(Asked):
    def __getitem__(self, index: int) -> Any:
        if index == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        return {"input_ids": torch.arange(4)}


@pytest.mark.parametrize("known", [False, True], ids=["online", "metadata"])
def test_a_killed_worker_is_named_with_its_exit_code_on_every_rank(known: bool) -> None:
    def rank(plane: DataPlane) -> None:
        config = LoaderConfig(seq_len=8, num_workers=1, worker="process")
        sampler = StepSampler(16, global_batch_size=8, order="sequential")
        metadata = [4] * 16 if known else None
        with build_loader(Killed(), plane, config, sampler=sampler, metadata=metadata) as loader:
            for _ in loader:
                pass

    outcomes = SimulatedWorld(2).outcomes(rank)
    assert all(" that reads samples died with exit code -9, " in str(outcome) for outcome in outcomes)
    told = [outcome for outcome in outcomes if isinstance(outcome, RemoteRankError)]
    assert len(told) == (1 if known else 2)  # the one that read it after planning raises its own
    assert len({outcome.rank for outcome in told}) == 1


def test_closing_ends_the_workers_that_outlived_one_that_was_killed() -> None:
    others = set(multiprocessing.active_children())
    fetcher = ProcessFetcher(Killed(), 2)
    with pytest.raises(RuntimeError, match="died with exit code -9") as caught:
        fetcher.submit(range(16), KEY).take(16)
    fetcher.close()
    assert set(multiprocessing.active_children()) <= others
    assert caught.tb is not None  # whoever keeps the error keeps no worker


def test_what_workers_load_first_is_there_before_any_thread_that_could_be_loading_it() -> None:
    script = "import sys, evenstep.nodes; print(sorted({'numpy.ma', 'numpy.random'} - set(sys.modules)))"
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert told.stdout == "[]\n"


def _parent(told: Connection) -> None:
    """Starts workers, says which, and waits to be killed."""
    # Torch's workers look for their parent every five seconds, which is long for a test.
    torch.utils.data._utils.worker.MP_STATUS_CHECK_INTERVAL = 0.1  # type: ignore[attr-defined]
    fetcher = ProcessFetcher(Asked(), 2)
    told.send(sorted({value["worker"][0] for value in fetcher.submit(range(16), KEY).take(16)}))
    time.sleep(300)


def _gone(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return False
    return True


def _wait(condition: Callable[[], bool], seconds: float = 60) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def test_workers_end_with_a_parent_that_was_killed() -> None:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    parent = context.Process(target=_parent, args=(there,))
    parent.start()
    assert here.poll(60)
    workers = here.recv()
    assert len(workers) == 2
    assert not any(map(_gone, workers))
    parent.kill()
    parent.join(60)
    assert _wait(lambda: all(map(_gone, workers)))
