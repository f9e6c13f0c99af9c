"""Pictures that ship with matplotlib and scikit-learn, as a vision-language batch through each way in."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from evenstep import DataPlane, LinearQuadraticCost, LoaderConfig, StageCost, StepSampler, build_loader
from evenstep.cost import FeatureCost
from evenstep.packing import collate_rows, pack_vision, vision_metadata
from evenstep.testing import SimulatedWorld, assert_same

PATCH = 4
Picture = np.ndarray[Any, Any]
"""RGB in [0, 1], float [height, width, 3]."""


def drawings() -> list[Picture]:
    """The icons and samples of matplotlib."""
    matplotlib: Any = pytest.importorskip("matplotlib")
    pytest.importorskip("PIL")
    image: Any = import_module("matplotlib.image")
    paths = sorted((Path(matplotlib.get_data_path()) / "images").glob("*.png"))
    return [image.imread(path)[..., :3] for path in paths]


def photographs() -> list[Picture]:
    """Crops of a temple and a flower, which scikit-learn brings along."""
    datasets: Any = pytest.importorskip("sklearn.datasets")
    pytest.importorskip("PIL")
    whole = [image[::4, ::4] / 255 for image in datasets.load_sample_images().images]
    assert [image.shape for image in whole] == [(107, 160, 3)] * 2
    return [image[10 * k :, : 160 - 20 * k] for k in range(6) for image in whole]


class Captioned:
    """A picture and a caption of as many tokens as it has merged patches, and some more."""

    def __init__(self, pictures: list[Picture]) -> None:
        self.samples = [self._sample(k, picture) for k, picture in enumerate(pictures)]

    def _sample(self, number: int, picture: Picture) -> dict[str, Any]:
        side = 2 * PATCH  # two patches a side are merged into one token
        rows, columns = picture.shape[0] // side * 2, picture.shape[1] // side * 2
        pixels = torch.from_numpy(
            np.ascontiguousarray(picture[: rows * PATCH, : columns * PATCH], dtype=np.float32)
        )
        patches = pixels.unfold(0, PATCH, PATCH).unfold(1, PATCH, PATCH).reshape(rows * columns, -1)
        return {
            "input_ids": torch.cat(
                [torch.full((rows * columns // 4,), 9), torch.arange(20, 30 + 7 * number % 40)]
            ),
            "pixel_values": patches.clone(),
            "image_grid_thw": torch.tensor([[1, rows, columns]]),
        }

    def __len__(self) -> int:
        return len(self.samples) // 4 * 4

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.samples[index]


def train(plane: DataPlane, dataset: Captioned, graph: str) -> list[Any]:
    config = LoaderConfig(seq_len=2048, micro_batch_size=1, budgets={"patches": 4096.0}, num_workers=1)
    sampler = StepSampler(len(dataset), global_batch_size=4, order="sequential")
    facts = [vision_metadata(dataset[k]) for k in range(len(dataset))]
    source: Any = dataset
    if graph == "external":
        rank = plane.topology.dp_rank
        source = [[[dataset[4 * s + 2 * m + rank]] for m in range(2)] for s in range(len(dataset) // 4)]
    loader = build_loader(
        source,
        plane,
        config,
        sampler=None if graph == "external" else sampler,
        metadata=facts if graph == "metadata" else None,
        metadata_fn=vision_metadata,
        pack=pack_vision,
        collate=collate_rows,
        cost=StageCost({"llm": LinearQuadraticCost(), "encoder": FeatureCost("patches")}),
    )
    with loader:
        return list(loader)


@pytest.mark.parametrize("pictures", [drawings, photographs])
def test_pictures_arrive_whole_through_every_way_in(pictures: Callable[[], list[Picture]]) -> None:
    dataset, world = Captioned(pictures()), SimulatedWorld(2)
    assert len(dataset) >= 12
    expected = sorted(float(dataset[k]["pixel_values"].double().sum()) for k in range(len(dataset)))
    results = {graph: world.run(train, dataset, graph) for graph in ("online", "metadata", "external")}
    for graph, ranks in results.items():
        grids = [batch["image_grid_thw"] for batches in ranks for batch in batches]
        sums = []
        for batches in ranks:
            for batch in batches:
                sizes = batch["image_grid_thw"].prod(dim=1).tolist()
                parts = torch.split(batch["pixel_values"], sizes)
                sums += [float(part.double().sum()) for part in parts]
        assert sorted(sums) == pytest.approx(expected), graph
        assert sum(len(grid) for grid in grids) == len(dataset)
    assert_same(results["external"], results["online"])
