"""Every recipe trains on two ranks, and its resume gives the parameters of an uninterrupted run, bit for bit."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch

from evenstep.testing import run_ranks

pytestmark = pytest.mark.gloo

RECIPES = sorted((Path(__file__).resolve().parents[2] / "docs" / "recipes").glob("*.py"))
NAMES = [recipe.stem for recipe in RECIPES]
Parameters = list[torch.Tensor]
Train = Callable[[Path, int], Parameters]
# The parameters after step 4, after step 8 across a checkpoint, after step 8 in one go; or the traceback.
Outcome = tuple[Parameters, Parameters, Parameters] | str


def train_of(name: str) -> Train:
    [path] = [recipe for recipe in RECIPES if recipe.stem == name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return cast(Train, module.train)


def train_all(rank: int, folder: str) -> dict[str, Outcome]:
    """All recipes in one set of processes: what the first optimizer step imports takes seconds."""
    outcomes: dict[str, Outcome] = {}
    for name in NAMES:
        resumed, straight = Path(folder, name, "resumed"), Path(folder, name, "straight")
        try:
            train = train_of(name)
            halfway = [parameter.clone() for parameter in train(resumed, 4)]
            outcomes[name] = (halfway, train(resumed, 8), train(straight, 8))
        except Exception:
            outcomes[name] = traceback.format_exc()
    return outcomes


def go_on_alone(rank: int, folder: str) -> tuple[Parameters, Parameters]:
    """From the checkpoint that two ranks have left after step 8 to step 12, and the same from the beginning."""
    train = train_of("plain_ddp")
    return train(Path(folder, "plain_ddp", "resumed"), 12), train(Path(folder, "alone"), 12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("recipes")
    (root / "alone").mkdir()
    for name in NAMES:
        (root / name / "resumed").mkdir(parents=True)
        (root / name / "straight").mkdir()
    return root


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Outcome]]:
    return run_ranks(train_all, 2, str(folder), timeout=150)


def test_there_is_a_recipe_for_every_kind_of_loop() -> None:
    styles = [
        "accelerate_style",
        "fsdp",
        "lightning_style",
        "megatron_style",
        "plain_ddp",
        "torchtitan_style",
    ]
    assert styles == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_trains_and_resumes(name: str, ranks: list[dict[str, Outcome]]) -> None:
    if name == "fsdp" and torch.__version__.startswith("2.6."):
        pytest.skip("fully_shard of torch 2.6 needs an accelerator")
    first = ranks[0][name]
    for outcome in (outcomes[name] for outcomes in ranks):
        assert not isinstance(outcome, str), outcome
        assert not isinstance(first, str)
        halfway, resumed, straight = outcome
        assert any(not torch.equal(a, b) for a, b in zip(halfway, resumed, strict=True)), (
            "nothing was trained"
        )
        for mine, uninterrupted, others in zip(resumed, straight, first[1], strict=True):
            assert bool(mine.isfinite().all())
            assert torch.equal(mine, uninterrupted)
            assert torch.equal(mine, others), "the ranks have different models"


def test_a_checkpoint_of_two_ranks_goes_on_with_one(folder: Path, ranks: list[dict[str, Outcome]]) -> None:
    assert len(ranks) == 2
    [(resumed, alone)] = run_ranks(go_on_alone, 1, str(folder))
    for mine, other in zip(resumed, alone, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
