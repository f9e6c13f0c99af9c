"""The contest of layouts: each trains what it says, on the same documents, and the losses agree."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evenstep.bench import train
from evenstep.bench.train_layouts import (
    by_length,
    deal,
    micro_batches,
    packed_batch,
    packed_rows,
    padded_batch,
)
from evenstep.bench.train_ranks import EVENSTEP, GROUPED, LAYOUTS, PACKED, PADDED, Contest, Trained, train_all
from evenstep.demo.model import Gpt, GptConfig
from evenstep.demo.settings import Settings
from evenstep.samples import BatchInfo
from evenstep.testing import run_ranks

LENGTHS = st.lists(st.integers(1, 64), min_size=1, max_size=40).map(np.array)


@given(st.lists(st.integers()), st.integers(1, 5))
def test_micro_batches_keep_the_order_and_all_but_the_last_are_full(units: list[int], size: int) -> None:
    found = micro_batches(units, size)
    assert list(chain.from_iterable(found)) == units
    assert all(len(one) == size for one in found[:-1])
    assert all(0 < len(one) <= size for one in found)


@given(LENGTHS, st.integers(0, 9))
def test_packed_rows_are_best_fit_decreasing(lengths: np.ndarray, seed: int) -> None:
    rows = packed_rows(lengths, range(len(lengths)), 64, np.random.default_rng(seed))
    assert sorted(document for row in rows for document in row) == list(range(len(lengths)))
    filled = [int(lengths[row].sum()) for row in rows]
    assert max(filled) <= 64
    assert sum(2 * tokens <= 64 for tokens in filled) <= 1  # two rows that are half empty would have been one
    for row in rows:
        assert lengths[row].tolist() == sorted(lengths[row], reverse=True)


def test_best_fit_is_not_first_fit() -> None:
    lengths = np.array([40, 50, 14])
    rows = packed_rows(lengths, range(3), 64, np.random.default_rng(0))
    assert sorted(rows) == [[0], [1, 2]]


@given(LENGTHS, st.integers(1, 4))
def test_dealing_loses_nothing(lengths: np.ndarray, ranks: int) -> None:
    documents = by_length(lengths, range(len(lengths)))
    assert lengths[documents].tolist() == sorted(lengths, reverse=True)
    dealt = [deal(documents, rank, ranks) for rank in range(ranks)]
    assert Counter(chain.from_iterable(dealt)) == Counter(documents)
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1


def info(tokens: int) -> BatchInfo:
    return BatchInfo(0, 0, 1, True, 3, tokens, 0, None, tokens)


def test_padding_and_packing_give_the_same_loss() -> None:
    torch.manual_seed(0)
    model = Gpt(GptConfig(vocabulary=30, width=16, layers=1, heads=2))
    samples = [{"input_ids": torch.randint(0, 30, (n,)), "sample": n} for n in (7, 1, 12)]
    losses = []
    for batch in (padded_batch(samples, info(20)), packed_batch([samples[:2], samples[2:]], info(20), 20)):
        loss = model.loss(
            batch["input_ids"][0], batch["labels"][0], batch["position_ids"][0], batch["cu_seqlens"]
        )
        losses.append(loss.item())
        assert batch["sample"] == [7, 1, 12]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_rank_without_documents_has_an_empty_batch() -> None:
    for batch in (padded_batch([], info(0)), packed_batch([], info(0), 20)):
        assert batch["input_ids"].numel() == 0
        assert batch["cu_seqlens"].tolist() == [0]


@pytest.fixture
def contest(tmp_path: Path) -> Contest:
    settings = Settings(ranks=2, out=tmp_path, seq_len=128)
    settings.tokens.mkdir()
    generator = np.random.default_rng(0)
    lengths = np.minimum(generator.lognormal(3.5, 1.0, 120).astype(np.int64), 200)
    lengths[::11] = 0
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    np.save(settings.tokens / "offsets.npy", offsets)
    np.save(settings.tokens / "tokens.npy", generator.integers(0, 40, offsets[-1]).astype(np.uint16))
    meta = {"vocabulary": 40, "bytes": 100, "undecodable": 0}
    (settings.tokens / "meta.json").write_text(json.dumps(meta))
    return Contest(settings=settings, micro_batch_size=2, documents=12, steps=2, rounds=2)


def train_on(_rank: int, contest: Contest) -> list[dict[str, list[Trained]]]:
    return train_all(contest)


def samples_of(records: list[Trained]) -> Counter[int]:
    return Counter(
        sample
        for trained in records
        for micro_batch in trained.record.samples
        for samples in micro_batch
        for sample in samples
    )


@pytest.mark.gloo
def test_every_layout_trains_the_same_documents(contest: Contest) -> None:
    rounds, nothing = run_ranks(train_on, 2, contest)
    assert nothing == []
    schedule = contest.schedule(contest.settings.dataset())
    assert [len(steps) for steps in schedule] == [1, 2, 2]
    assert len(rounds) == len(schedule)
    for steps, one in zip(schedule, rounds, strict=True):
        for name in LAYOUTS:
            whole = Counter(document for step in steps for document in step)
            assert samples_of(one[name]) == whole, name
            if name != GROUPED:
                for step, record in zip(steps, one[name], strict=True):
                    assert samples_of([record]) == Counter(step), name
            for trained in one[name]:
                assert (trained.record.tokens <= 256).all()
                assert trained.processor > 0
        assert all(trained.record.padding.sum() == 0 for trained in one[PACKED])
        for name in (PADDED, GROUPED):
            assert all((t.record.tokens + t.record.padding <= 256).all() for t in one[name])
    result = train.summary(contest, rounds)
    assert result["loss_difference"] < 1e-4
    assert len({found["tokens"] for found in result["layouts"].values()}) == 1
    assert result["layouts"][EVENSTEP]["of_evenstep"] == 1
    assert result["layouts"][PADDED]["padding"] > result["layouts"][GROUPED]["padding"] > 0
    text = train.as_text(result)
    assert "2 ranks over gloo, micro-batches of 2 rows of 128 tokens, 12 documents a step" in text
    assert max(map(len, text.splitlines())) <= 130
    for name in LAYOUTS:
        assert f"\n{name} " in text


def test_a_corpus_that_is_too_small(contest: Contest) -> None:
    pieces = contest.settings.dataset()
    most = replace(contest, steps=50)
    steps = len(contest.sampler(pieces))
    with pytest.raises(
        ValueError,
        match=rf"^the corpus has {steps} optimizer steps of 12 documents, but 101 are trained; name more text with "
        r"--corpus, or ask for fewer --rounds or --documents$",
    ):
        most.schedule(pieces)


@pytest.mark.gloo
def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tokenizers")
    for number in range(24):
        text = "To be, or not to be, that is the question:\n" * (1 + 7 * number % 5)
        (tmp_path / f"{number}.txt").write_text(text)
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    small = [
        "--seq-len",
        "64",
        "--documents",
        "6",
        "--steps",
        "1",
        "--rounds",
        "1",
        "--micro-batch-size",
        "1",
    ]
    arguments = parser.parse_args(["--corpus", str(tmp_path), *small, "--json"])
    assert train.run(arguments) == 0
    result = json.loads(capsys.readouterr().out)
    assert list(result["layouts"]) == list(LAYOUTS)
    assert len({found["tokens"] for found in result["layouts"].values()}) == 1
    assert train.run(argparse.Namespace(**{**vars(arguments), "documents": 99})) == 2
    assert capsys.readouterr().err.startswith(
        "evenstep bench train: the corpus has 0 optimizer steps of 99 documents"
    )


def test_without_tokenizers_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train, "find_spec", lambda _: None)
    assert train.run(argparse.Namespace()) == 2
    assert capsys.readouterr().err == "evenstep bench train needs tokenizers: pip install 'evenstep[cli]'\n"


def test_nothing_to_train(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tokenizers")
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    assert train.run(parser.parse_args(["--rounds", "0"])) == 2
    assert capsys.readouterr().err == (
        "evenstep bench train: --rounds is 0: there would be nothing to train; give at least 1\n"
    )
