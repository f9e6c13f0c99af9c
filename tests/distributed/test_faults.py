"""Faults that the ranks survive: each becomes one clear error everywhere, and the next loader works."""

from __future__ import annotations

import copy
import itertools
import random
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from evenstep import Loader, LoaderConfig, StepSampler, build_loader
from evenstep.cursor import Cursor, next_epoch_state
from evenstep.packing import pack_text
from evenstep.sampling import Step
from evenstep.testing import run_ranks

pytestmark = pytest.mark.gloo

LENGTHS = [3, 17, 1, 9, 2, 12, 5, 20, 2, 7, 14, 4, 6, 11, 8, 19, 10, 13, 16, 15, 18, 3, 9, 6]
STEPS = len(LENGTHS) // 4  # of two micro-batches on each of two ranks


class Documents:
    """Documents of known lengths, with a fault at one index."""

    def __init__(self, at: int = -1, fault: Callable[[], Any] | None = None) -> None:
        self.at = at
        self.fault = fault

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> dict[str, Any]:
        value = self.fault() if index == self.at and self.fault is not None else None
        return {"input_ids": torch.arange(LENGTHS[index]), "index": index, "value": value}


EVERYWHERE: dict[str, Any] = {}  # options of every loader of a rank


def build(dataset: Any = None, sampler: Any = None, **options: Any) -> Loader[Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    names = ("metadata_fn", "pack", "collate", "metadata")
    given = {name: options.pop(name) for name in names if name in options}
    chosen = StepSampler(len(LENGTHS), global_batch_size=4, order="sequential")
    settings: dict[str, Any] = {"seq_len": 20, "timeout": timedelta(seconds=20), **EVERYWHERE, **options}
    return build_loader(
        Documents() if dataset is None else dataset,
        mesh,
        LoaderConfig(**settings),
        sampler=chosen if sampler is None else sampler,
        **given,
    )


def told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def drain(batches: Iterable[Any]) -> tuple[int, str]:
    """Batches until the end or an error, and what ended them."""
    count = 0
    try:
        for _ in batches:
            count += 1
    except Exception as error:
        return count, told(error)
    return count, "end"


def run_out(loader: Loader[Any]) -> tuple[int, str]:
    with loader:
        return drain(loader)


def raise_disk() -> Any:
    raise OSError("disk on fire")


def failing_dataset(rank: int) -> tuple[int, str]:
    return run_out(build(Documents(13, raise_disk)))


def chain_of_a_failing_dataset(rank: int) -> tuple[int, str]:
    kinds: list[str] = []
    try:
        with build(Documents(13, raise_disk)) as loader:
            for _ in loader:
                pass
    except Exception as error:
        link: BaseException | None = error
        while link is not None:
            kinds.append(type(link).__name__)
            link = link.__cause__
    return 0, " from ".join(kinds)


def failing_last_window(rank: int) -> tuple[int, str]:
    return run_out(build(Documents(len(LENGTHS) - 1, raise_disk)))


def failing_with_known_lengths(rank: int) -> tuple[int, str]:
    return run_out(build(Documents(13, raise_disk), metadata=LENGTHS))


def unencodable(rank: int) -> tuple[int, str]:
    return run_out(build(Documents(13, object)))


def exiting_dataset(rank: int) -> tuple[int, str]:
    try:
        return run_out(build(Documents(1, lambda: exit(3))))
    except SystemExit as error:
        return 0, told(error)


class FailingPack:
    """Fails on one rank at one call, after all ranks have planned and exchanged."""

    def __init__(self, rank: int, at: int) -> None:
        self.rank = rank
        self.left = at

    def __call__(self, samples: Any, seq_len: int) -> Any:
        self.left -= 1
        if self.left == 0 and dist.get_rank() == self.rank:
            raise ZeroDivisionError("pack divides by zero")
        return pack_text([{"input_ids": sample["input_ids"]} for sample in samples], seq_len)


def failing_pack(rank: int, at: int) -> tuple[int, str]:
    return run_out(build(pack=FailingPack(1, at)))


class EndsEarly(StepSampler):
    """Rank 1's stream is shorter than the others', which nothing can tell ahead."""

    def step_at(self, cursor: Cursor) -> Step | None:
        if dist.get_rank() == 1 and cursor.consumed_samples >= 8:
            return None
        return super().step_at(cursor)


def ending_early(rank: int, uneven: str) -> tuple[int, str]:
    return run_out(build(sampler=EndsEarly(len(LENGTHS), global_batch_size=4), uneven=uneven))


def training_step_raises(rank: int) -> tuple[int, str]:
    with build() as loader:
        try:
            for step, _ in enumerate(loader):
                if rank == 1 and step == 1:
                    raise FloatingPointError("the loss is not finite")
        except Exception as error:
            return step, told(error)
    return step, "end"


def break_on_one_rank(rank: int) -> tuple[int, str]:
    loader = build()
    if rank == 0:
        next(loader)
        loader.close()
        return 1, "closed"
    outcome = drain(loader)
    loader.close()
    return outcome


def break_after_the_last_batch(rank: int) -> tuple[int, str]:
    """All batches have been had: whether a rank asks for the end is its own affair."""
    with build(balance_window=1) as loader:
        if rank == 0:
            return drain(loader)
        return drain(next(loader) for _ in range(2 * STEPS))


def close_seconds_before(rank: int) -> tuple[int, str]:
    loader = build()
    next(loader)
    began = time.monotonic()
    if rank == 1:
        time.sleep(1.5)
    loader.close()
    seconds = time.monotonic() - began
    assert seconds < 3, seconds
    return 1, "closed"


def failing_metadata(rank: int) -> tuple[int, str]:
    return run_out(build(metadata_fn=lambda _: "long"))


def too_long(rank: int) -> tuple[int, str]:
    return run_out(build(seq_len=19))


def building(**options: Any) -> tuple[int, str]:
    try:
        build(**options)
    except Exception as error:
        return 0, told(error)
    return 0, "built"


def undivided_batch(rank: int) -> tuple[int, str]:
    return building(sampler=StepSampler(24, global_batch_size=3))


class Empty(Documents):
    def __len__(self) -> int:
        return 0


def empty_dataset(rank: int) -> tuple[int, str]:
    return building(dataset=Empty())


def different_configuration(rank: int) -> tuple[int, str]:
    return building(min_balance_gain=0.1 * rank)


def bad_configuration_on_one_rank(rank: int) -> tuple[int, str]:
    return building(pack=3) if rank == 1 else building()


def interleaved(rank: int) -> tuple[int, str]:
    """Two loaders at once, train and eval, each with a conversation of its own."""
    with build() as train, build() as validation:
        counts = []
        for number, _ in enumerate(train):
            if number % 4 == 3:
                counts.append(drain(validation)[0])
    return sum(counts), "end"


def new_streams(rank: int, times: int) -> tuple[int, str]:
    """Break on all ranks and begin anew at once, each rank in its own time; windows of two streams never meet.

    Every third time it is a new epoch, else a place in one that was left before.
    """
    chance = random.Random(rank)
    taken = 0
    with build(balance_window=1, pack=keep_indices, collate=list) as loader:
        states = [copy.deepcopy(loader.state_dict())]
        for _ in range(STEPS - 1):
            next(loader), next(loader)
            states.append(loader.state_dict())
        for time_ in range(times):
            step = time_ * 5 % STEPS
            if time_ % 3 == 2:
                step, states[0] = 0, next_epoch_state(states[0])
            loader.load_state_dict(states[step])
            if time_ % 7 == 3 and chance.random() < 0.5:
                continue  # this rank never asks for an item of this stream
            for number, batch in enumerate(itertools.islice(loader, time_ % 4 if time_ % 7 != 3 else 0)):
                place = step * 4 + number // 2 * 4
                assert all(place <= index < place + 4 for row in batch for index in row), (time_, batch)
                taken += 1
            if chance.random() < 0.2:
                time.sleep(0.01 * chance.random())
    return taken, "end"


def keep_indices(samples: Any, seq_len: int) -> list[int]:
    return [sample["index"] for sample in samples]


def told_of(where: str, rank: int, error: str) -> str:
    return f"RemoteRankError: rank {rank} failed{where}: {error} (every rank stops here; the traceback is on rank {rank})"


UNENCODABLE = (
    "TypeError: sample['value']: unsupported type object; supported are tensors, NumPy arrays and scalars, bytes, "
    "bytearray, str, int, float, bool, None, and dict, list, tuple, NamedTuple and dataclass of these; convert it in "
    "the dataset or pass a codec such as PickleCodec"
)
LEFT = (
    "RemoteRankError: rank {} left the loader before the end of the epoch (a break, close() or an exit); the "
    "remaining batches of this epoch cannot be built without it. Leave the loop on the same step on every rank."
)
ENDED = (
    "RemoteRankError: the stream of rank 1 has ended while rank 0 still has data: the ranks would take different "
    "numbers of steps. Give every rank the same number of steps, or choose uneven='stop'."
)
UNDIVIDED = (
    "ValueError: the sampler makes steps of 3 rows, which micro_batch_size=1 x 2 data-parallel ranks = 2 does not "
    "divide: ranks would take different numbers of micro-batches. Choose a global batch that is a multiple of 2."
)
DIFFERENT = (
    "ConfigMismatch: min_balance_gain differs between ranks: rank 0 has 0.0, ranks [1] have 0.1: their plans and "
    "collectives would not fit together. Give every rank the same min_balance_gain."
)
TOO_LONG = (
    "ValueError: it has 20 tokens, seq_len is 19: it fits no row. Raise seq_len, split it "
    "(evenstep.datasets.SplitDocuments), or choose oversized='truncate' or 'single'"
)
NO_METADATA = (
    "TypeError: metadata_fn returned 'long' (str), expected the number of tokens (int) or a SampleMetadata"
)
DIVIDED = "ZeroDivisionError: pack divides by zero"
Said = tuple[range | int, str]  # batches delivered, and how it ended


@dataclass(frozen=True)
class Scenario:
    """A function of a rank, and what ranks 0 and 1 must make of it."""

    function: Callable[..., tuple[int, str]]
    first: Said
    second: Said
    args: tuple[Any, ...] = ()


def same(function: Callable[..., tuple[int, str]], count: range | int, text: str, *args: Any) -> Scenario:
    return Scenario(function, (count, text), (count, text), args)


SOME = range(1, 2 * STEPS + 1)  # whatever was under way when the other left
SURVIVED = {
    "failing dataset": same(failing_dataset, 6, told_of(" at sample 13", 1, "OSError: disk on fire")),
    "chain of a failing dataset": Scenario(
        chain_of_a_failing_dataset,
        (0, "RemoteRankError"),
        (0, "RemoteRankError from SampleError from OSError"),
    ),
    "failing last window": same(
        failing_last_window, 10, told_of(" at sample 23", 1, "OSError: disk on fire")
    ),
    "failing with known lengths": Scenario(
        failing_with_known_lengths,
        (6, "SampleError: sample 13: OSError: disk on fire"),
        (SOME, told_of(" at sample 13", 0, "OSError: disk on fire")),
    ),
    "unencodable": same(unencodable, 6, told_of(" at sample 13", 1, UNENCODABLE)),
    "exiting dataset": Scenario(exiting_dataset, (0, told_of("", 1, "SystemExit: 3")), (0, "SystemExit: 3")),
    "failing pack": Scenario(failing_pack, (SOME, told_of("", 1, DIVIDED)), (2, DIVIDED), (3,)),
    "failing pack, last batch": Scenario(
        failing_pack, (2 * STEPS, told_of("", 1, DIVIDED)), (2 * STEPS - 1, DIVIDED), (2 * STEPS,)
    ),
    "ending early": same(ending_early, 4, ENDED, "error"),
    "stopping early": same(ending_early, 4, "end", "stop"),
    "training step": Scenario(
        training_step_raises, (SOME, LEFT.format(1)), (1, "FloatingPointError: the loss is not finite")
    ),
    "break on one rank": Scenario(break_on_one_rank, (1, "closed"), (SOME, LEFT.format(0))),
    "break after the last batch": same(break_after_the_last_batch, 2 * STEPS, "end"),
    "close seconds before": same(close_seconds_before, 1, "closed"),
    "two loaders": same(interleaved, 6 * STEPS, "end"),
    "new streams": same(new_streams, range(200, 400), "end", 200),
    "failing metadata_fn": same(failing_metadata, 0, told_of(" at sample 0", 0, NO_METADATA)),
    "too long": same(too_long, 2, told_of(" at sample 7", 1, TOO_LONG)),
    "undivided batch": same(undivided_batch, 0, UNDIVIDED),
    "empty dataset": same(empty_dataset, 0, "ValueError: the dataset is empty: there is nothing to train on"),
    "different configuration": same(different_configuration, 0, DIFFERENT),
    "bad configuration on one rank": Scenario(
        bad_configuration_on_one_rank,
        (0, "RemoteRankError: rank 1 could not build its loader: TypeError: pack is 3, expected a function"),
        (0, "TypeError: pack is 3, expected a function"),
    ),
}


def survive(
    rank: int, names: list[str], collectives: str, shared_memory: bool
) -> dict[str, tuple[int, str, float]]:
    EVERYWHERE.update(collectives=collectives, shared_memory=shared_memory)
    outcomes = {}
    for name in names:
        scenario = SURVIVED[name]
        dist.barrier()
        began = time.monotonic()
        count, text = scenario.function(rank, *scenario.args)
        outcomes[name] = (count, text, time.monotonic() - began)
        ours = [t.name for t in threading.enumerate() if t.name.startswith("evenstep")]
        assert not ours, f"{name} left threads {ours}"
    return outcomes


@pytest.fixture(scope="module", params=[("producer", False), ("producer", True), ("caller", True)])
def outcomes(request: pytest.FixtureRequest) -> list[dict[str, tuple[int, str, float]]]:
    return run_ranks(survive, 2, list(SURVIVED), *request.param)


@pytest.mark.parametrize("name", SURVIVED)
def test_every_rank_hears_of_it(outcomes: list[dict[str, tuple[int, str, float]]], name: str) -> None:
    scenario = SURVIVED[name]
    for rank, (expected, text) in enumerate([scenario.first, scenario.second]):
        count, said, seconds = outcomes[rank][name]
        assert said == text
        assert count in expected if isinstance(expected, range) else count == expected
        assert seconds < 10


if __name__ == "__main__":
    for rank, result in enumerate(run_ranks(survive, 2, sys.argv[1:] or list(SURVIVED), "auto", True)):
        for name, (count, text, seconds) in result.items():
            print(rank, name, count, f"{seconds:.2f}", text)
