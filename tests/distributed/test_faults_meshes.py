"""Faults on meshes where ranks read for others, receive from others, or balance in groups: still one error each."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from evenstep import Loader, LoaderConfig, StepSampler, build_loader
from evenstep.packing import pack_text
from evenstep.testing import run_ranks

pytestmark = pytest.mark.gloo

SAMPLES, STEPS = 64, 8
OPTIONS: dict[str, dict[str, Any]] = {
    "receivers": {},
    "all read": {"reader_ranks": "all"},
    "one reads": {"reader_ranks": (3,)},
    "groups": {"balance_group_size": 1, "reader_ranks": "all"},
    "no broadcast": {"broadcast_plan": False, "exchange": "window"},
    "no thread": {"host_prefetch": 0},
    "planner apart": {"planner_rank": 3},
}


class Documents:
    """Documents of several lengths; one index cannot be read."""

    def __init__(self, at: int) -> None:
        self.at = at

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == self.at:
            raise OSError("disk on fire")
        return {"input_ids": torch.arange(1 + index * 7 % 13)}


class Pack:
    """Fails at one call of one rank."""

    def __init__(self, rank: int, at: int) -> None:
        self.left = at if dist.get_rank() == rank else -1

    def __call__(self, samples: Any, seq_len: int) -> Any:
        self.left -= 1
        if self.left == 0:
            raise ZeroDivisionError("pack divides by zero")
        return pack_text(samples, seq_len)


def build(options: dict[str, Any], at: int = -1, pack: Any = pack_text) -> Loader[Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    config = LoaderConfig(seq_len=16, balance_window=2, timeout=timedelta(seconds=20), **options)
    sampler = StepSampler(SAMPLES, global_batch_size=8, order="sequential")
    return build_loader(Documents(at), mesh, config, sampler=sampler, pack=pack)


def drain(loader: Loader[Any]) -> tuple[int, str]:
    count = 0
    try:
        with loader:
            for _ in loader:
                count += 1
    except Exception as error:
        return count, f"{type(error).__name__}: {error}"
    return count, "end"


def fine(options: dict[str, Any]) -> tuple[int, str]:
    return drain(build(options))


def reading(options: dict[str, Any]) -> tuple[int, str]:
    return drain(build(options, at=21))


def packing(options: dict[str, Any]) -> tuple[int, str]:
    return drain(build(options, pack=Pack(2, 6)))


def again(options: dict[str, Any]) -> tuple[int, str]:
    """Break and begin anew on all ranks, several times, then run to the end."""
    loader = build(options)
    start = loader.state_dict()
    for breaks in (1, 3, 4, 0, 2):
        for _ in range(breaks):
            next(loader)
        loader.load_state_dict(start)
    return drain(loader)


FAULTS: dict[str, Callable[[dict[str, Any]], tuple[int, str]]] = {
    f.__name__: f for f in (fine, reading, packing, again)
}


def run(rank: int, cases: list[tuple[str, str]]) -> dict[tuple[str, str], tuple[int, str, float]]:
    outcomes = {}
    for fault, name in cases:
        dist.barrier()
        began = time.monotonic()
        count, text = FAULTS[fault](OPTIONS[name])
        outcomes[fault, name] = (count, text, time.monotonic() - began)
        ours = [t.name for t in threading.enumerate() if t.name.startswith("evenstep")]
        assert not ours, f"{fault}, {name} left threads {ours}"
    return outcomes


CASES = [(fault, name) for fault in FAULTS for name in OPTIONS]


@pytest.fixture(scope="module")
def outcomes() -> list[dict[tuple[str, str], tuple[int, str, float]]]:
    return run_ranks(run, 4, CASES, timeout=150)


@pytest.mark.parametrize("case", CASES, ids=lambda case: ", ".join(case))
def test_every_rank_hears_of_it(
    outcomes: list[dict[tuple[str, str], tuple[int, str, float]]], case: tuple[str, str]
) -> None:
    said = [outcome[case] for outcome in outcomes]
    for rank, (count, text, seconds) in enumerate(said):
        assert seconds < 10
        if case[0] in ("fine", "again"):
            assert (count, text) == (4 * STEPS, "end")
        elif case[0] == "reading":
            assert text.startswith("RemoteRankError: rank ")
            assert " failed at sample 21: OSError: disk on fire (every rank stops here; " in text
            assert count == 10
        elif rank == 2:
            assert (count, text) == (5, "ZeroDivisionError: pack divides by zero")
        else:
            assert text == (
                "RemoteRankError: rank 2 failed: ZeroDivisionError: pack divides by zero (every rank stops here; the "
                "traceback is on rank 2)"
            )
            assert count >= 5
    if case[0] == "reading":
        assert len({text for _, text, _ in said}) == 1


if __name__ == "__main__":
    cases = [case for case in CASES if not sys.argv[1:] or case[0] in sys.argv[1:] or case[1] in sys.argv[1:]]
    for rank, result in enumerate(run_ranks(run, 4, cases, timeout=150)):
        for case, (count, text, seconds) in result.items():
            print(rank, *case, count, f"{seconds:.2f}", text)
