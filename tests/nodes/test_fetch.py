"""Workers: the same samples from wherever they are read, seeds, and faults and deaths by name."""

from __future__ import annotations

import os
import random
import re
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from evenstep import DataPlane, LoaderConfig, StepSampler, build_loader
from evenstep.nodes import (
    Fetcher,
    InlineFetcher,
    ProcessFetcher,
    SamplerReader,
    ThreadFetcher,
    current_sample_seed,
)
from evenstep.nodes.fetch import Unreadable
from evenstep.nodes.sample_seed import SeedKey
from evenstep.nodes.worker_processes import _explain
from evenstep.sampling import sample_seed
from evenstep.testing import SimulatedWorld, assert_same

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:This DataLoader will create:UserWarning"
    ),  # this machine has few cores
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]
KEY = SeedKey(3, 1)


class Odd(Exception):  # noqa: N818
    """Cannot be rebuilt from its arguments, as pickle would."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} of {two}")


class Dataset:
    """Samples of every kind; some cannot be read."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 13:
            raise OSError(5, "bad block")
        if index == 14:
            raise Odd(1, 2)
        return {
            "input_ids": torch.arange(index),
            "half": torch.full((2, 0 if index % 3 else 3), index, dtype=torch.bfloat16),
            "array": np.arange(index, dtype=np.uint16),
            "scalar": torch.tensor(index),
            "text": f"sample {index}",
            "seed": current_sample_seed(),
        }


class Together(Dataset):
    """Has the optional method for many at once."""

    def __getitem__(self, index: int) -> Any:
        if index in (13, 14):
            raise OSError(5, "bad block")
        return index

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


def fetchers(dataset: Any) -> dict[str, Fetcher]:
    return {
        "inline": InlineFetcher(dataset),
        "threads": ThreadFetcher(dataset, 3),
        "processes": ProcessFetcher(dataset, 2),
    }


def test_every_fetcher_gives_the_same_samples() -> None:
    indices = [5, 0, 63, 13, 2, 2, 14, 40]
    for name, fetcher in fetchers(Dataset()).items():
        pending = fetcher.submit(indices, KEY)
        values = pending.take(3) + pending.take(5)
        for index, value in zip(indices, values, strict=True):
            if index in (13, 14):
                assert isinstance(value, Unreadable)
                continue
            assert_same(value, {**Dataset_at(index), "seed": sample_seed(3, 1, index)}, f"{name}, {index}")
            value["input_ids"] += 1  # what is fetched is the reader's to change
        assert isinstance(values[3].error, OSError)
        assert str(values[3].error) == "[Errno 5] bad block"
        assert str(values[6].error) == ("Odd: 1 of 2" if name == "processes" else "1 of 2")
        fetcher.close()
        fetcher.close()


def Dataset_at(index: int) -> dict[str, Any]:  # noqa: N802
    from evenstep.nodes.sample_seed import begin_sample

    begin_sample(KEY, index)
    return Dataset()[index]


def test_an_error_of_a_worker_process_shows_where_it_happened() -> None:
    fetcher = ProcessFetcher(Dataset(), 1)
    (value,) = fetcher.submit([13], KEY).take(1)
    assert 'raise OSError(5, "bad block")' in str(value.error.__cause__)
    fetcher.close()


def test_many_at_once_are_read_at_once_and_the_faulty_one_is_found() -> None:
    for name, fetcher in fetchers(Together()).items():
        values = fetcher.submit(list(range(10, 20)), KEY).take(10)
        assert [isinstance(value, Unreadable) for value in values] == [False] * 3 + [True] * 2 + [
            False
        ] * 5, name
        fetcher.close()


def test_getitems_of_another_length_is_refused() -> None:
    class Short(Together):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            return [0]

    with pytest.raises(ValueError, match=re.escape("Short.__getitems__ returned 1 samples for 2 indices")):
        InlineFetcher(Short()).submit([1, 2], KEY).take(2)


class Drawn:
    """Draws from the global generators, as transforms do."""

    def __getitem__(self, index: int) -> Any:
        return float(torch.rand(())), float(np.random.rand()), random.random()  # noqa: NPY002


def test_global_draws_of_worker_processes_depend_on_seed_epoch_and_index_alone() -> None:
    draws = []
    for workers in (1, 3):
        fetcher = ProcessFetcher(Drawn(), workers)
        first = fetcher.submit([4, 9, 2], KEY).take(3)
        assert fetcher.submit([2, 4, 9], KEY).take(3) == [first[2], first[0], first[1]]
        assert fetcher.submit([4], SeedKey(3, 2)).take(1) != [first[0]]
        draws.append(first)
        fetcher.close()
    assert draws[0] == draws[1]
    assert len({value for draw in draws[0] for value in draw}) == 9


def test_workers_leave_the_users_generators_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    fetcher = ProcessFetcher(Drawn(), 1)
    fetcher.submit([4], KEY).take(1)
    fetcher.close()
    assert torch.equal(torch.rand(3), expected)


def test_a_seed_outside_of_reading_is_refused() -> None:
    with pytest.raises(
        RuntimeError, match=re.escape("current_sample_seed() has a value only inside dataset[i]")
    ):
        current_sample_seed()


def test_a_reader_without_its_dataset_is_told_so() -> None:
    message = "this rank reads samples but was built with dataset=None; pass the dataset on every reader rank"
    config = LoaderConfig(seq_len=8)
    reader = SamplerReader(StepSampler(4, global_batch_size=4), None, DataPlane.single(), config)
    reader.reset()
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        next(reader)


def test_new_epochs_reach_worker_processes() -> None:
    class Epochs:
        epoch = 0

        def __getitem__(self, index: int) -> int:
            return self.epoch

    dataset = Epochs()
    fetcher = ProcessFetcher(dataset, 1)
    assert fetcher.submit([0], KEY).take(1) == [0]
    dataset.epoch = 5
    fetcher.renew()
    assert fetcher.submit([0], KEY).take(1) == [5]
    fetcher.close()


def test_workers_end_when_their_reader_is_closed_or_forgotten() -> None:
    def names() -> list[str]:
        return sorted(t.name for t in threading.enumerate() if t.name.startswith("evenstep-read-test"))

    for close in (True, False):
        processes = ProcessFetcher(Dataset(), 1, name="evenstep-read-test")
        threads = ThreadFetcher(Dataset(), 1, name="evenstep-read-test")
        pids = {v for v in processes.submit([1], KEY).take(1) if isinstance(v, int)}
        threads.submit([1], KEY).take(1)
        assert len(names()) == 2, pids
        if close:
            processes.close()
            threads.close()
        del processes, threads
        deadline = time.monotonic() + 10
        while names() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert names() == []


@pytest.mark.parametrize(
    ("mesh", "options"),
    [({"dp": 2}, {"reader_ranks": (0,)}), ({"dp": 2, "tp": 2}, {"planner_rank": 1})],
)
def test_ranks_that_read_nothing_need_no_dataset(mesh: dict[str, int], options: dict[str, Any]) -> None:
    class Plain:
        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> Any:
            return {"input_ids": torch.arange(4)}

    world = SimulatedWorld(mesh, **options)
    assert any(t.in_data_plane and not t.is_reader for t in world.topologies)

    def rank(plane: DataPlane) -> int:
        dataset = Plain() if plane.topology.is_reader else None
        config = LoaderConfig(seq_len=8, **options)
        sampler = StepSampler(12, global_batch_size=4)
        return sum(1 for _ in build_loader(dataset, plane, config, sampler=sampler))

    assert world.run(rank) == [6] * world.size


class Leaving:
    """Raises what ends a process at one index."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        if index == 5:
            if self.error is None:
                os._exit(3)
            raise self.error
        return {"input_ids": torch.arange(4)}


class LeavingTogether(Leaving):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


@pytest.mark.parametrize("kind", [Leaving, LeavingTogether])
@pytest.mark.parametrize("error", [KeyboardInterrupt("now"), SystemExit("now"), GeneratorExit("now")])
def test_what_would_end_a_worker_process_names_its_sample(error: BaseException, kind: type[Leaving]) -> None:
    fetcher = ProcessFetcher(kind(error), 1)
    try:
        values = fetcher.submit(range(16), SeedKey(0, 0)).take(16)
    finally:
        fetcher.close()
    assert [k for k, value in enumerate(values) if isinstance(value, Unreadable)] == [5]
    assert str(values[5].error) == (
        f"the dataset raised {type(error).__name__}('now'), which would end a worker process"
    )


def test_a_worker_that_leaves_is_named_with_its_exit_code() -> None:
    fetcher = ProcessFetcher(Leaving(None), 1)
    try:
        with pytest.raises(RuntimeError, match=r"that reads samples died with exit code 3, "):
            fetcher.submit(range(16), SeedKey(0, 0)).take(16)
    finally:
        fetcher.close()


def test_a_connection_that_breaks_before_its_process_is_dead_is_told_as_the_death() -> None:
    class Worker:
        """Closes its pipe at once, and can be asked for its exit code a while later, as a process that ends."""

        pid, exitcode = 7, 3

        def __init__(self) -> None:
            self.sentinel, writer = os.pipe()
            os.close(writer)
            self.dead = False

        def is_alive(self) -> bool:
            return not self.dead

        def join(self, timeout: float) -> None:
            self.dead = timeout > 0

    worker = Worker()
    loader: Any = SimpleNamespace(_iterator=SimpleNamespace(_workers=[worker]))
    told = str(_explain(ConnectionResetError("reset by peer"), loader))
    os.close(worker.sentinel)
    assert told.startswith("worker process 0 (pid 7) that reads samples died with exit code 3, ")
