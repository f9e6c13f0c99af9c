"""Every recipe trains on two ranks, and its resume gives the parameters of an uninterrupted run, bit for bit."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch

from evenstep.testing import run_ranks

pytestmark = pytest.mark.gloo

RECIPES = sorted((Path(__file__).resolve().parents[2] / "docs" / "recipes").glob("*.py"))
Parameters = list[torch.Tensor]
Train = Callable[[Path, int], Parameters]


def train_of(recipe: str) -> Train:
    spec = importlib.util.spec_from_file_location(Path(recipe).stem, recipe)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return cast(Train, module.train)


def halfway_and_done(rank: int, recipe: str, folder: str) -> tuple[Parameters, Parameters]:
    """The parameters after steps 4 and 8, the latter across a checkpoint."""
    train = train_of(recipe)
    first = [parameter.clone() for parameter in train(Path(folder), 4)]
    return first, train(Path(folder), 8)


def straight(rank: int, recipe: str, folder: str) -> Parameters:
    return train_of(recipe)(Path(folder), 8)


def halfway(rank: int, recipe: str, folder: str) -> Parameters:
    return train_of(recipe)(Path(folder), 4)


def test_there_is_a_recipe_for_every_kind_of_loop() -> None:
    assert [recipe.stem for recipe in RECIPES] == [
        "accelerate_style",
        "fsdp",
        "lightning_style",
        "megatron_style",
        "plain_ddp",
        "torchtitan_style",
    ]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_trains_and_resumes(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "resumed").mkdir()
    (tmp_path / "straight").mkdir()
    resumed = run_ranks(halfway_and_done, 2, str(recipe), str(tmp_path / "resumed"))
    expected = run_ranks(straight, 2, str(recipe), str(tmp_path / "straight"))
    for rank, (middle, done) in enumerate(resumed):
        assert any(not torch.equal(a, b) for a, b in zip(middle, done, strict=True)), "nothing was trained"
        for mine, other in zip(done, expected[rank], strict=True):
            assert torch.equal(mine, other)
            assert bool(mine.isfinite().all())
        for mine, other in zip(done, resumed[0][1], strict=True):
            assert torch.equal(mine, other), "the ranks have different models"


def test_a_checkpoint_of_two_ranks_goes_on_with_one(tmp_path: Path) -> None:
    recipe = next(recipe for recipe in RECIPES if recipe.stem == "plain_ddp")
    (tmp_path / "straight").mkdir()
    expected = run_ranks(straight, 1, str(recipe), str(tmp_path / "straight"))[0]
    run_ranks(halfway, 2, str(recipe), str(tmp_path))
    one = run_ranks(straight, 1, str(recipe), str(tmp_path))[0]
    for mine, other in zip(one, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
