"""Collectives that the training thread starts, on real ranks over gloo, beside those of a training step."""

from __future__ import annotations

import random
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from evenstep import Loader, LoaderConfig, RemoteRankError, StepSampler, build_loader
from evenstep.packing import pack_text
from evenstep.testing import run_ranks

pytestmark = pytest.mark.gloo

LENGTHS = [1 + (7 * i) % 20 for i in range(48)]


class Documents:
    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": torch.arange(100 * index, 100 * index + LENGTHS[index])}


def build(collectives: str, pack: Any = pack_text, **options: Any) -> Loader[Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    settings: dict[str, Any] = {"seq_len": 20, "balance_window": 2, **options}
    return build_loader(
        Documents(),
        mesh,
        LoaderConfig(collectives=collectives, timeout=timedelta(seconds=20), **settings),  # type: ignore[arg-type]
        sampler=StepSampler(len(LENGTHS), global_batch_size=8, seed=3),
        pack=pack,
    )


def train(loader: Loader[Any], rng: random.Random, batches: int | None = None) -> list[Any]:
    """Batches and states; every step has a collective of its own, between hooks at random places."""
    seen = []
    gradient = torch.ones(4)

    def maybe_hooks() -> None:
        for _ in range(rng.choice([0, 0, 1, 2, 4])):
            rng.choice([loader.prefetch_plan, loader.prefetch])()

    for batch in loader:
        seen.append(({k: v for k, v in batch.items() if k != "cu_seqlens"}, loader.state_dict()))
        maybe_hooks()
        dist.all_reduce(gradient)
        maybe_hooks()
        if len(seen) == batches:
            break
    return seen


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def job(collectives: str, rng: random.Random, **options: Any) -> list[Any]:
    """Part of an epoch, a state loaded again, the rest, and another epoch."""
    with build(collectives, **options) as loader:
        parts = [train(loader, rng, 5)]
        state = loader.state_dict()
        parts.append(train(loader, rng, 4))
        loader.load_state_dict(state)
        parts += [train(loader, rng), train(loader, rng)]
    return parts


def jobs_with_random_hooks(rank: int, seeds: list[int]) -> int:
    compared = 0
    for options in ({"host_prefetch": None}, {"host_prefetch": 1, "exchange": "window"}):
        expected = job("producer", random.Random(0), **options)
        for seed in seeds:
            parts = job("caller", random.Random(1000 * seed + rank), **options)
            assert equal(parts, expected), (options, seed)
            compared += sum(map(len, parts))
    assert not [t.name for t in threading.enumerate() if t.name.startswith("evenstep")]
    return compared


@pytest.mark.parametrize("ranks", [2, 4])
def test_random_hooks_give_the_batches_of_the_producer(ranks: int) -> None:
    assert min(run_ranks(jobs_with_random_hooks, ranks, list(range(6 // (ranks // 2))))) > 100


def failing_pack(rank: int) -> str:
    """Rank 1 fails after the exchange and keeps its loader; rank 0 hears of it at the next window."""

    def pack(samples: list[Any], seq_len: int) -> Any:
        if rank == 1 and any(int(sample["input_ids"][0]) >= 2000 for sample in samples):
            raise ZeroDivisionError("pack divides by zero")
        return pack_text(samples, seq_len)

    loader = build("caller", pack)
    try:
        for _ in loader:
            loader.prefetch_plan()
            loader.prefetch()
    except (ZeroDivisionError, RemoteRankError) as error:
        dist.barrier()
        loader.close()
        return f"{type(error).__name__}: {error}"
    return "end"


def test_a_rank_that_fails_to_pack_stops_the_others() -> None:
    first, second = run_ranks(failing_pack, 2)
    assert second == "ZeroDivisionError: pack divides by zero"
    assert first == (
        "RemoteRankError: rank 1 failed: ZeroDivisionError: pack divides by zero (every rank stops here; the traceback "
        "is on rank 1)"
    )


def leave_one_behind(rank: int) -> str:
    loader = build("caller")
    next(loader)
    if rank == 0:
        loader.prefetch_plan()
        loader.prefetch()
        began = time.monotonic()
        loader.close()
        assert time.monotonic() - began < 4
        return "closed"
    try:
        for _ in loader:
            pass
    except RemoteRankError as error:
        return str(error)
    finally:
        loader.close()
    return "end"


def test_the_others_hear_of_a_rank_that_closes() -> None:
    first, second = run_ranks(leave_one_behind, 2)
    assert first == "closed"
    assert second.startswith("rank 0 left the loader before the end of the epoch")


def leave_without_a_word(rank: int) -> None:
    """The process ends with collectives posted on one rank only, and nothing closed."""
    loader = build("caller")
    next(loader)
    if rank == 0:
        for _ in range(5):
            loader.prefetch_plan()
            loader.prefetch()
    globals()["kept"] = loader


def test_processes_end_though_nothing_was_closed() -> None:
    began = time.monotonic()
    run_ranks(leave_without_a_word, 2)
    assert time.monotonic() - began < 20
