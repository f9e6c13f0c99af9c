"""Random transforms: the same sample in the same epoch, on any number of ranks, by any worker, after any resume."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from evenstep import DataPlane, LoaderConfig, StepSampler, build_loader
from evenstep.nodes import current_sample_seed
from evenstep.testing import SimulatedWorld

N = 48


class Augmented:
    """Documents whose tokens are drawn anew each time they are read; their lengths too."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> dict[str, Any]:
        rng = np.random.default_rng(current_sample_seed())
        return {"index": index, "input_ids": rng.integers(1, 1000, 6)}


def train(
    plane: DataPlane, known: bool, epochs: int, state: dict[str, Any] | None = None, **options: Any
) -> tuple[dict[tuple[int, int], list[int]], dict[str, Any]]:
    """Tokens of each sample by epoch and index, and the state in the middle of the first epoch."""
    config = LoaderConfig(seq_len=16, **{"micro_batch_size": 2, **options})
    sampler = StepSampler(N, global_batch_size=12, seed=9)
    seen: dict[tuple[int, int], list[int]] = {}
    middle: dict[str, Any] = {}
    with build_loader(
        Augmented(),
        plane,
        config,
        sampler=sampler,
        metadata=np.full(N, 6) if known else None,
        pack=_pack,
        collate=_collate,
    ) as loader:
        if state is not None:
            loader.load_state_dict(state)
        for _ in range(epochs):
            for batch in loader:
                epoch = loader.state_dict()["epoch"]
                for sample in batch["samples"]:
                    assert (epoch, sample["index"]) not in seen
                    seen[epoch, sample["index"]] = sample["input_ids"].tolist()
                if loader.step == 2 and not middle:
                    middle = loader.state_dict()
    return seen, middle


def _pack(samples: list[Any], seq_len: int) -> Any:
    assert len(samples) * 6 <= seq_len
    return {"samples": samples}


def _collate(rows: list[Any]) -> Any:
    return {"samples": [sample for row in rows for sample in row["samples"]]}


def everything(world: int, known: bool, epochs: int, **arguments: Any) -> dict[tuple[int, int], list[int]]:
    ranks = SimulatedWorld(world).run(lambda plane: train(plane, known, epochs, **arguments))
    return {key: value for seen, _ in ranks for key, value in seen.items()}


@pytest.fixture(scope="module")
def expected() -> tuple[dict[tuple[int, int], list[int]], dict[str, Any]]:
    return train(DataPlane.single(), False, 2)


def test_it_is_new_for_each_sample_and_epoch(
    expected: tuple[dict[tuple[int, int], list[int]], dict[str, Any]],
) -> None:
    seen, _ = expected
    assert set(seen) == {(epoch, index) for epoch in range(2) for index in range(N)}
    assert len({tuple(tokens) for tokens in seen.values()}) == 2 * N


@pytest.mark.parametrize("known", [False, True], ids=["online", "metadata"])
@pytest.mark.parametrize(
    ("world", "options"),
    [
        (2, {}),
        (3, {"balance_window": 1}),
        (6, {"micro_batch_size": 1, "host_prefetch": 0}),
        (2, {"num_workers": 2}),
    ],
    ids=["two ranks", "three ranks", "six ranks", "threads"],
)
def test_it_is_the_same_on_any_number_of_ranks(
    expected: tuple[dict[tuple[int, int], list[int]], dict[str, Any]],
    world: int,
    options: dict[str, Any],
    known: bool,
) -> None:
    assert everything(world, known, 2, **options) == expected[0]


@pytest.mark.parametrize("known", [False, True], ids=["online", "metadata"])
def test_it_is_the_same_after_a_resume(
    expected: tuple[dict[tuple[int, int], list[int]], dict[str, Any]], known: bool
) -> None:
    seen, middle = expected
    assert (middle["epoch"], middle["consumed_samples"]) == (0, 24)
    rest = everything(2, known, 2, state=middle)
    assert len(rest) == N + N // 2
    assert rest == {key: seen[key] for key in rest}


def test_processes_draw_the_same() -> None:
    one = train(DataPlane.single(), False, 1, num_workers=2, worker="process")[0]
    two = train(DataPlane.single(), False, 1)[0]
    assert one == two
