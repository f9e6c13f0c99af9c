"""Which fields of a batch are divided: those that are named, what goes along with them, and nothing else."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from evenstep import Shard
from evenstep.packing import Sharding, collate_rows, collate_varlen, pack_text


def sharding(
    shards: dict[str, Shard | None], part: int = 0, parts: int = 2, *, targets: bool = False
) -> Sharding:
    return Sharding.of(shards, lambda _: (part, parts), targets=targets)


def batch_of(*ids: int, width: int = 8) -> dict[str, Any]:
    return dict(collate_rows([pack_text([{"input_ids": list(ids)}], width)]))


def test_where_nothing_is_named_a_batch_stays_what_it_is() -> None:
    batch = batch_of(1, 2, 3)
    whole = sharding({"input_ids": None}).pad(batch)
    assert whole is batch
    assert all(sharding({}).slice(batch)[name] is value for name, value in batch.items())


def test_fields_named_with_none_stay_whole() -> None:
    batch = collate_rows([pack_text([{"input_ids": [1, 2, 3, 4]}], 8)])
    shards: dict[str, Shard | None] = {"input_ids": Shard("cp"), "labels": None}
    whole = sharding(shards, targets=True).pad(batch)
    first, second = (sharding(shards, part, targets=True).slice(whole) for part in range(2))
    assert first["input_ids"].tolist() == [[1, 2, 3, 4]]
    assert second["input_ids"].tolist() == [[0, 0, 0, 0]]
    assert second["position_ids"].tolist() == [[0, 0, 0, 0]]
    assert torch.equal(first["labels"], batch["labels"])
    assert "shift_labels" not in first


def test_fields_of_other_shapes_and_places_are_divided_too() -> None:
    grid = torch.arange(12).view(4, 3)
    batch: dict[str, Any] = {"vision": {"grid": grid}, "positions": torch.arange(24).view(3, 2, 4)}
    shards: dict[str, Shard | None] = {
        "vision.grid": Shard("tp", dim=0),
        "positions": Shard("cp", mode="zigzag", pad=-5.0),
    }
    whole = sharding(shards).pad(batch)
    first, second = (sharding(shards, part).slice(whole) for part in range(2))
    assert torch.equal(torch.cat([first["vision"]["grid"], second["vision"]["grid"]]), grid)
    assert torch.equal(first["positions"], batch["positions"][..., [0, 3]])
    whole = sharding(shards, parts=3).pad(batch)
    assert whole["positions"][0, 0].tolist() == [0, 1, 2, 3, -5, -5]


def test_a_field_of_another_length_is_not_divided_by_document() -> None:
    batch = {**collate_varlen([pack_text([{"input_ids": [1, 2, 3]}], 8)]), "patches": torch.ones(5)}
    shard = Shard("cp", unit="document")
    message = (
        "field 'patches' has 5 values along the dimension that is divided by document, others have 3: its values would "
        "stand in the wrong documents. Shard it with unit='row', or not at all."
    )
    with pytest.raises(ValueError, match="^" + re.escape(message) + "$"):
        sharding({"input_ids": shard, "patches": shard}).pad(batch)


def test_a_follower_of_another_length_stays_whole() -> None:
    batch = {**batch_of(1, 2, 3, 4), "loss_weights": torch.ones(1, 3)}
    first = sharding({"input_ids": Shard("cp")}).slice(batch)
    assert first["input_ids"].tolist() == [[1, 2, 3, 4]]
    assert first["position_ids"].tolist() == [[0, 1, 2, 3]]
    assert first["loss_weights"] is batch["loss_weights"]


def test_targets_go_where_the_labels_go() -> None:
    batch = batch_of(1, 2, 3, 4)
    shards: dict[str, Shard | None] = {"labels": Shard("cp")}
    whole = sharding(shards, targets=True).pad(batch)
    assert whole["shift_labels"].tolist() == [[2, 3, 4, -100, -100, -100, -100, -100]]
    first, second = (sharding(shards, part, targets=True).slice(whole) for part in range(2))
    assert first["shift_labels"].tolist() == [[2, 3, 4, -100]]
    assert second["shift_labels"].tolist() == [[-100] * 4]
    assert first["input_ids"] is batch["input_ids"]


def test_targets_that_a_batch_has_are_kept() -> None:
    given = torch.arange(8)[None]
    whole = sharding({"input_ids": Shard("cp")}, targets=True).pad({**batch_of(1), "shift_labels": given})
    assert whole["shift_labels"].tolist() == given.tolist()


def test_a_batch_that_changed_after_it_was_padded_is_refused() -> None:
    shard = Shard("cp", unit="document")
    divided = sharding({"input_ids": shard, "labels": shard})
    whole = divided.pad(collate_varlen([pack_text([{"input_ids": [1, 2, 3]}], 8)]))
    message = (
        "field 'labels' has 2 values along the dimension that is divided by document, others have 4: its values would "
        "stand in the wrong documents. Shard it with unit='row', or not at all."
    )
    with pytest.raises(ValueError, match="^" + re.escape(message) + "$"):
        divided.slice({**whole, "labels": whole["labels"][:, :2]})


def test_documents_without_their_places_are_refused() -> None:
    message = (
        "unit='document' needs 'cu_seqlens_padded' in the batch to know where the documents stand; put ShardPad behind the "
        "Packer, or use unit='row'"
    )
    with pytest.raises(ValueError, match="^" + re.escape(message) + "$"):
        sharding({"input_ids": Shard("cp", unit="document")}).slice(batch_of(1, 2))
