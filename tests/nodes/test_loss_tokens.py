"""The loss tokens that a batch tells are those of its labels, whatever packs it, or nobody knows them."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from evenstep import LoaderConfig, SampleMetadata, StepSampler, build_loader
from evenstep.errors import RemoteRankError
from evenstep.packing import count_loss_tokens, loss_counter, pack_text, pack_vision

Pack = Callable[[Any, int], Any]


class Samples:
    """Prompts masked with -1, and documents inside each sample."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Any]:
        length = 8 + index
        labels = torch.where(torch.arange(length) < index, -1, torch.arange(length) + 1)
        return {"input_ids": torch.arange(length) + 1, "labels": labels, "inner": [3, length - 3]}


def told_and_true(
    pack: Pack, ignored: int, seq_len: int = 20, **options: Any
) -> list[tuple[int | None, int]]:
    """Per batch: the loss tokens told, and those of the labels."""
    metadata_fn = options.pop("metadata_fn", None)
    config = LoaderConfig(seq_len=seq_len, micro_batch_size=2, **options)
    sampler = StepSampler(8, global_batch_size=4, order="sequential")
    with build_loader(Samples(), None, config, sampler=sampler, pack=pack, metadata_fn=metadata_fn) as loader:
        found = []
        for batch in loader:
            if config.micro_batch_size == 2 and batch["info"].num_micro_batches == 1:
                assert batch["info"].step_loss_tokens == batch["info"].num_loss_tokens
            found.append((batch["info"].num_loss_tokens, int((batch["labels"] != ignored).sum())))
        return found


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("documents", [None, "inner"])
@pytest.mark.parametrize("seq_len", [10, 20])
@pytest.mark.parametrize("pack", [pack_text, pack_vision])
def test_the_loss_tokens_told_are_those_of_the_labels(
    pack: Callable[..., Any], seq_len: int, documents: str | None, shifted: bool
) -> None:
    packs = functools.partial(pack, ignore_index=-1, documents=documents, shifted=shifted)
    found = told_and_true(packs, -1, seq_len, oversized="truncate")
    assert found
    assert all(told == true for told, true in found), found


def test_a_pack_of_the_users_own_leaves_them_unknown_unless_metadata_tells() -> None:
    def pack(samples: Any, seq_len: int) -> Any:
        row = pack_text(samples, seq_len, ignore_index=-1)
        row["labels"][:5] = -1
        return row

    def half(sample: Any) -> SampleMetadata:
        return SampleMetadata(len(sample["input_ids"]), loss_tokens=4)

    assert {told for told, _ in told_and_true(pack, -1)} == {None}
    assert {told for told, _ in told_and_true(pack, -1, metadata_fn=half)} == {8}


def test_the_counter_of_a_pack() -> None:
    counted = {"input_ids": [1, 2, 3, 4, 5], "labels": [-1, -1, 3, 4, 5], "inner": [2, 3]}
    plain = loss_counter(pack_text)
    assert plain is not None
    assert plain(counted, None) == count_loss_tokens(counted) == 4
    odd = loss_counter(functools.partial(pack_text, ignore_index=-1, documents="inner"), "truncate")
    assert odd is not None
    assert (odd(counted, None), odd(counted, 4)) == (2, 1)
    assert loss_counter(lambda samples, seq_len: pack_text(samples, seq_len)) is None
    # Planned as cut, but packed whole.
    assert loss_counter(functools.partial(pack_text, oversized="single"), "truncate") is None
    assert loss_counter(functools.partial(pack_text, oversized="single"), "error") is not None


@pytest.mark.parametrize("wrong", [False, True])
def test_known_loss_tokens_that_are_not_those_of_the_samples_are_said_once(
    wrong: bool, caplog: pytest.LogCaptureFixture
) -> None:
    right = [count_loss_tokens(Samples()[k], 10, -1) or 0 for k in range(8)]
    known = [n + (wrong and k > 4) for k, n in enumerate(right)]
    config = LoaderConfig(seq_len=10, oversized="truncate")
    loader = build_loader(
        Samples(),
        None,
        config,
        sampler=StepSampler(8, global_batch_size=4, order="sequential"),
        pack=functools.partial(pack_text, ignore_index=-1),
        metadata=[SampleMetadata(min(8 + k, 10), loss_tokens=n) for k, n in enumerate(known)],
    )
    assert len(list(loader)) == 8
    said = [record.getMessage() for record in caplog.records if "with a loss" in record.getMessage()]
    assert (
        said
        == [
            "sample 5 has 5 tokens with a loss, its metadata says 6: what is divided by step_loss_tokens is scaled wrongly. "
            "Compute loss_tokens with evenstep.packing.count_loss_tokens, or leave them out."
        ][: int(wrong)]
    )


@pytest.mark.parametrize("skipped", [None, 5])
@pytest.mark.parametrize("documents", [None, "inner"])
def test_lengths_alone_leave_the_loss_tokens_of_a_batch_to_be_counted(
    documents: str | None, skipped: int | None
) -> None:
    class Some(Samples):
        def __getitem__(self, index: int) -> dict[str, Any]:
            if index == skipped:
                raise OSError("no such block")
            return super().__getitem__(index)

    pack = functools.partial(pack_text, ignore_index=-1, documents=documents)
    config = LoaderConfig(seq_len=10, oversized="truncate", on_sample_error="skip")
    sampler = StepSampler(8, global_batch_size=4, order="sequential")
    lengths = [8 + index for index in range(8)]
    batches = list(build_loader(Some(), None, config, sampler=sampler, pack=pack, metadata=lengths))
    assert len(batches) == 8
    for batch in batches:
        assert batch["info"].num_loss_tokens == int((batch["labels"] != -1).sum())
        assert batch["info"].step_loss_tokens is None


class Rows:
    """Packed rows of three documents with 24 tokens, and short ones."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> list[dict[str, Any]]:
        lengths = (8, 9, 7) if index % 2 else (4, 5)
        return [{"input_ids": torch.arange(n) + 1, "inner": [2, n - 2]} for n in lengths]


def explode(row: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return row


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("documents", [None, "inner"])
@pytest.mark.parametrize(("oversized", "longest"), [("truncate", 20), ("single", 24)])
def test_packed_rows_longer_than_a_row_follow_the_policy(
    oversized: Any, longest: int, documents: str | None, known: bool
) -> None:
    config = LoaderConfig(seq_len=20, repack=False, oversized=oversized)
    sampler = StepSampler(4, global_batch_size=2, order="sequential")
    loader = build_loader(
        Rows(),
        None,
        config,
        sampler=sampler,
        explode=explode,
        pack=functools.partial(pack_text, documents=documents),
        metadata=np.array([9, 24, 9, 24]) if known else None,
    )
    found = []
    for batch in loader:
        info, ends = batch["info"], batch["cu_seqlens"][0].tolist()
        true = int((batch["labels"] != -100).sum())
        assert info.num_loss_tokens == (None if known else true)
        found.append((info.num_tokens, batch["input_ids"].shape[1], ends))
    cuts = [0, 8, 17, longest] if documents is None else sorted({0, 2, 8, 10, 17, 19, longest})
    assert (longest, longest, cuts) in found
    assert (9, 20, [0, 4, 9] if documents is None else [0, 2, 4, 6, 9]) in found


def test_a_document_with_images_is_not_cut() -> None:
    class Seen(Rows):
        def __getitem__(self, index: int) -> list[dict[str, Any]]:
            grid = {"pixel_values": torch.zeros(4, 2), "image_grid_thw": torch.tensor([[1, 2, 2]])}
            return [{"input_ids": torch.arange(16)}, {"input_ids": torch.arange(8), **grid}]

    config = LoaderConfig(seq_len=20, repack=False, oversized="truncate", host_prefetch=0)
    sampler = StepSampler(4, global_batch_size=2)
    loader = build_loader(Seen(), None, config, sampler=sampler, explode=explode, pack=pack_vision)
    message = (
        "a document of 8 tokens and images would be cut to 4 tokens; that would leave patches without tokens; choose "
        'oversized="single", or shorten it in the dataset'
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        next(loader)


@pytest.mark.parametrize(
    ("metadata", "told"),
    [
        (
            SampleMetadata(6, loss_tokens=-5),
            "ValueError: metadata_fn returned loss_tokens=-5 for a sample of 6 tokens, expected 0 to 6: the loss would be "
            "divided by a wrong number",
        ),
        (
            SampleMetadata(6, loss_tokens=7),
            "ValueError: metadata_fn returned loss_tokens=7 for a sample of 6 tokens, expected 0 to 6: the loss would be "
            "divided by a wrong number",
        ),
        (
            SampleMetadata(6, loss_tokens=2.5),  # type: ignore[arg-type]
            "TypeError: metadata_fn returned loss_tokens=2.5 (float), expected an int, or None if unknown",
        ),
        (
            SampleMetadata(6, documents=[-3, 9]),
            "ValueError: metadata_fn returned documents=[-3, 9], expected lengths that are not negative",
        ),
        (
            SampleMetadata(6, documents=[2.5, 3.5]),  # type: ignore[list-item]
            "TypeError: metadata_fn returned documents=[2.5, 3.5], expected the lengths of the documents as ints",
        ),
        (
            SampleMetadata(6, documents=[2, 3]),
            "ValueError: metadata_fn returned documents of 5 tokens in a sample of 6 tokens",
        ),
        (
            SampleMetadata(6, features=None),  # type: ignore[arg-type]
            "TypeError: metadata_fn returned features=None (NoneType), expected a mapping of names to numbers, such as "
            "{'patches': 256}",
        ),
        (
            SampleMetadata(6, features={"a": "x"}),  # type: ignore[dict-item]
            "TypeError: metadata_fn returned the feature 'a' as 'x' (str), expected a number",
        ),
    ],
)
def test_odd_values_of_metadata_fn_name_their_sample(metadata: SampleMetadata, told: str) -> None:
    config = LoaderConfig(seq_len=20, host_prefetch=0)
    sampler = StepSampler(8, global_batch_size=8, order="sequential")

    def metadata_fn(sample: Any) -> Any:
        return metadata if len(sample["input_ids"]) == 13 else len(sample["input_ids"])

    loader = build_loader(Samples(), None, config, sampler=sampler, metadata_fn=metadata_fn)
    with pytest.raises(RemoteRankError) as caught:
        next(loader)
    assert str(caught.value) == (
        f"rank 0 failed at sample 5: {told} (every rank stops here; the traceback is on rank 0)"
    )
