"""Images keep the order of their tokens, in rows and in batches."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.packing import collate_rows, collate_varlen, pack_vision, padding_row, vision_metadata

# Continuous integration is the derandomised profile.
thoroughly = settings(max_examples=500 if settings.default and settings.default.derandomize else 100)

IMAGE = 99


def sample(
    grids: list[tuple[int, int, int]], text: int = 2, start: float = 0, mrope: bool = False
) -> dict[str, Any]:
    made: dict[str, Any] = {}
    ids: list[int] = list(range(text))
    count = 0
    for t, h, w in grids:
        ids += [IMAGE] * (t * h * w // 4)
        count += t * h * w
    made["input_ids"] = torch.tensor(ids)
    if grids:
        made["pixel_values"] = torch.arange(count * 6, dtype=torch.float32).view(count, 6) + start
        made["image_grid_thw"] = torch.tensor(grids)
        if mrope:
            made["position_ids"] = torch.ones(3, len(ids), dtype=torch.int64) * 5
    return made


GRIDS = st.lists(st.sampled_from([(1, 2, 2), (1, 4, 2), (2, 2, 4)]), max_size=2)


@thoroughly
@given(
    st.lists(st.lists(GRIDS, max_size=3), min_size=1, max_size=3),
    st.sampled_from([collate_rows, collate_varlen]),
)
def test_patches_follow_the_rows(rows_of_grids: list[list[list[tuple[int, int, int]]]], collate: Any) -> None:
    start = iter(range(1000, 100000, 1000))
    samples = [[sample(grids, start=next(start)) for grids in row] for row in rows_of_grids]
    rows = [pack_vision(row, 64, image_token_ids=[IMAGE]) for row in samples]
    batch = collate(rows)
    images = [s for row in samples for s in row if "pixel_values" in s]
    if not images:
        assert "pixel_values" not in batch
        return
    assert torch.equal(batch["pixel_values"], torch.cat([s["pixel_values"] for s in images]))
    assert torch.equal(batch["image_grid_thw"], torch.cat([s["image_grid_thw"] for s in images]))
    assert int((batch["input_ids"] == IMAGE).sum()) * 4 == len(batch["pixel_values"])


def test_texts_count_up_beside_spatial_positions() -> None:
    row = pack_vision([sample([]), sample([(1, 2, 2)], mrope=True)], 6)
    assert row["position_ids"].tolist() == [[0, 1, 5, 5, 5, 0]] * 3
    assert pack_vision([sample([])], 3)["position_ids"].tolist() == [0, 1, 0]


def test_as_many_patches_as_tokens_are_no_tokens() -> None:
    # 8 patches in a row of 8 tokens: the sizes agree by chance.
    row = pack_vision([sample([(1, 2, 4)], text=6)], 8)
    batch = collate_rows([padding_row(seq_len=8), row])
    assert batch["pixel_values"].shape == (8, 6)
    assert batch["image_grid_thw"].tolist() == [[1, 2, 4]]


def test_patches_are_copied() -> None:
    image = sample([(1, 2, 2)], start=1)
    row = pack_vision([image], 8)
    image["pixel_values"].zero_()
    assert float(row["pixel_values"][0, 0]) == 1


def test_metadata_counts_attention_per_frame() -> None:
    facts = vision_metadata(sample([(2, 2, 4), (1, 4, 4)], text=3))
    assert facts.tokens == 3 + 8
    assert facts.loss_tokens == 10
    assert facts.features == {"images": 3.0, "patches": 32.0, "patches_squared": 2 * 64.0 + 256.0}
    assert vision_metadata(sample([])).features == {"images": 0.0, "patches": 0.0, "patches_squared": 0.0}


BAD: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        {"input_ids": [1], "pixel_values": torch.ones(4, 6)},
        {},
        "sample 0 of a row has 'pixel_values' but no 'image_grid_thw'; its images could not be told apart; give "
        "both, or none for a sample without images",
    ),
    (
        {**sample([(1, 2, 2)]), "pixel_values": np.ones((5, 6))},
        {},
        "'pixel_values' of sample 0 of a row has 5 patches, but 'image_grid_thw' describes 4; images would get "
        "each other's patches; correct the grid",
    ),
    (
        {**sample([(1, 2, 2)]), "input_ids": [1, IMAGE, IMAGE]},
        {"image_token_ids": [IMAGE]},
        "sample 0 of a row has 2 image tokens for 4 patches, 2x2 to a token; images would land on the wrong "
        "tokens; check the processor and merge_size",
    ),
    (
        sample([(1, 2, 2)], text=8),
        {"oversized": "truncate"},
        "sample 0 of a row of 8 tokens has 9 tokens and images; cutting it would leave patches without tokens; "
        'choose oversized="single", or shorten it in the dataset',
    ),
]


@pytest.mark.parametrize(("bad", "options", "message"), BAD)
def test_samples_that_disagree_with_themselves(
    bad: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        pack_vision([bad], 8, **options)
