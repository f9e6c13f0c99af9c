"""The packer tells the loop about any mapping, and a built-in collate pads as its pack does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import pytest
import torch

from evenstep import BatchInfo, DataPlane, LoaderConfig, StepSampler, build_loader
from evenstep.packing import collate_rows, collate_varlen, pack_text
from evenstep.testing import SimulatedWorld

DATASET = [{"input_ids": torch.arange(1, n + 1)} for n in (3, 5, 2, 4)]


class ReadOnly(Mapping[str, Any]):
    """A mapping of the user's that nobody writes to."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields

    def __getitem__(self, name: str) -> Any:
        return self._fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)


def batches(**options: Any) -> list[Any]:
    explode = options.get("explode")
    config = LoaderConfig(seq_len=8, micro_batch_size=2, repack=explode is None)
    sampler = StepSampler(4, global_batch_size=4, order="sequential")
    with build_loader(DATASET, None, config, sampler=sampler, **options) as loader:
        return list(loader)


@pytest.mark.parametrize("frozen", [MappingProxyType, ReadOnly])
def test_a_mapping_that_cannot_be_written_to_gets_its_info_too(frozen: Callable[[Any], Any]) -> None:
    plain = batches()
    told = batches(collate=lambda rows: frozen(collate_rows(rows)))
    assert [type(batch) for batch in told] == [dict, dict]
    assert [batch["info"] for batch in told] == [batch["info"] for batch in plain]
    assert all(isinstance(batch["info"], BatchInfo) for batch in told)
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(told, plain, strict=True))


@pytest.mark.parametrize("collate", [collate_rows, collate_varlen])
@pytest.mark.parametrize("explode", [None, lambda sample: [sample]])
def test_padding_is_ignored_by_the_loss_that_the_pack_was_told_of(collate: Any, explode: Any) -> None:
    pack = partial(pack_text, ignore_index=-1, pad_token_id=9)
    for batch in batches(pack=pack, collate=partial(collate, pad_to_multiple_of=16), explode=explode):
        real = batch["info"].num_tokens
        assert (batch["input_ids"] == 9).sum() == batch["input_ids"].numel() - real
        assert (batch["labels"] != -1).sum() == real - 2
        assert (batch["labels"] != -100).all()


def test_a_collate_that_was_told_how_to_pad_does_so() -> None:
    collate = partial(collate_varlen, pad_to_multiple_of=16, ignore_index=-7)
    for batch in batches(pack=partial(pack_text, ignore_index=-1), collate=collate):
        assert (batch["labels"] == -7).sum() == 16 - batch["info"].num_tokens


@pytest.mark.parametrize("collate", [collate_rows, collate_varlen])
def test_a_rank_without_samples_has_the_fields_that_were_declared(collate: Callable[..., Any]) -> None:
    dataset = [{"input_ids": torch.arange(1, 9), "doc": torch.full((8,), k)} for k in range(15)]
    pack = partial(pack_text, pad_values={"doc": -1})
    config = LoaderConfig(seq_len=8, accumulation_steps="auto")

    def run(plane: DataPlane) -> list[tuple[int, list[int], torch.dtype]]:
        sampler = StepSampler(len(dataset), global_batch_size=5)
        with build_loader(dataset, plane, config, sampler=sampler, pack=pack, collate=collate) as loader:
            return [(b["info"].num_samples, b["doc"].unique().tolist(), b["doc"].dtype) for b in loader]

    found = [batch for rank in SimulatedWorld(2).run(run) for batch in rank]
    assert sorted(count for count, *_ in found) == [0] * 3 + [1] * 15
    assert {dtype for *_, dtype in found} == {torch.int64}
    assert all(docs == [-1] for count, docs, _ in found if not count)
    assert sorted(docs[0] for count, docs, _ in found if count) == list(range(15))
