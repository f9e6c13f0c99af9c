"""Who listens to balance hears of each window once, on delivery, at its planner; nobody else pays."""

from __future__ import annotations

import logging
import re
from typing import Any

import numpy as np
import pytest

from evenstep import DataPlane, Loader, LoaderConfig, StepSampler, build_loader
from evenstep.nodes import HostPrefetch, Planner
from evenstep.nodes.balance import Balance
from evenstep.nodes.stage import upstream
from evenstep.testing import SimulatedWorld


def listen(plane: DataPlane, corpus: Any, graph: str, **options: Any) -> tuple[list[tuple[int, Any]], Any]:
    """What each rank is told, with how many batches it had then."""
    heard: list[tuple[int, Any]] = []
    batches = 0
    sampler = StepSampler(len(corpus), global_batch_size=8, seed=1)
    metadata = corpus.lengths if graph == "metadata" else None
    dataset: Any = corpus
    if graph == "external":
        rank = plane.topology.dp_rank
        dataset = [[[corpus[8 * s + 2 * m + rank]] for m in range(4)] for s in range(12)]
    loader = build_loader(
        dataset,
        plane,
        LoaderConfig(seq_len=1024, **options),
        sampler=None if graph == "external" else sampler,
        metadata=metadata,
        on_balance=lambda balance: heard.append((batches + 1, balance)),
    )
    with loader:
        for _ in loader:
            batches += 1
        last = loader.last_balance
    return heard, last


@pytest.mark.parametrize("graph", ["online", "metadata", "external"])
@pytest.mark.parametrize("window", [None, 2])
def test_each_window_is_told_once_when_its_first_batch_is_delivered(
    corpus: Any, graph: str, window: int | None
) -> None:
    results = SimulatedWorld(2).run(lambda plane: listen(plane, corpus, graph, balance_window=window))
    heard, last = results[0]
    size = window or 4
    assert [when for when, _ in heard] == list(range(1, 48, size))
    places = [(b.step, b.micro_batch) for _, b in heard]
    assert places == [(k // 4, k % 4) for k in range(0, 48, size)]
    assert last is heard[-1][1]
    assert results[1][0] == []
    for _, balance in heard:
        assert balance.num_micro_batches == size
        rows = balance.rows(planned=True)
        assert rows.samples.sum() == 2 * size
        assert rows.tokens.sum() == balance.num_tokens
        assert (rows.padding == 1024 - rows.tokens).all()
        assert balance.plan.loads.sum() == pytest.approx(rows.cost.sum())
        assert balance.rows(planned=False).tokens.sum() == balance.num_tokens
        assert balance.efficiency >= balance.reference_efficiency - 1e-12
        costs = balance.plan.loads.sum(axis=(0, 2))
        assert balance.spread == pytest.approx((costs.max() - costs.min()) / costs.mean())
        assert balance.sent.sum() == balance.received.sum()
        assert (balance.moved_bytes > 0) == (balance.sent.sum() > 0)
        if graph == "metadata":
            assert balance.sent.sum() == 0


def test_the_same_is_said_of_every_graph(corpus: Any) -> None:
    def told(plane: DataPlane, graph: str) -> list[Any]:
        return [balance.to_dict() for _, balance in listen(plane, corpus, graph)[0]]

    world = SimulatedWorld(2)
    online, known = (world.run(told, graph)[0] for graph in ("online", "metadata"))
    for one, other in zip(online, known, strict=True):
        assert {**one, "moved_bytes": 0} == other


def test_nothing_is_computed_when_nobody_listens(corpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Balance, *args: Any, **options: Any) -> Any:
        raise AssertionError("nobody asked")

    for name in ("rows", "to_dict", "_travelled"):
        monkeypatch.setattr(Balance, name, refuse)
    monkeypatch.setattr(Balance, "reference_loads", property(refuse))
    sampler = StepSampler(len(corpus), global_batch_size=8, seed=1)
    with build_loader(corpus, None, LoaderConfig(seq_len=512), sampler=sampler) as loader:
        assert sum(1 for _ in loader) == 96


def test_log_balance_writes_a_record_for_each_window(corpus: Any, caplog: pytest.LogCaptureFixture) -> None:
    sampler = StepSampler(len(corpus), global_batch_size=8, seed=1)
    config = LoaderConfig(seq_len=512, log_balance=True)
    with (
        caplog.at_level(logging.INFO, "evenstep"),
        build_loader(corpus, None, config, sampler=sampler) as loader,
    ):
        for _ in range(9):
            next(loader)
    records = [record for record in caplog.records if hasattr(record, "balance")]
    assert [record.balance["step"] for record in records] == [0, 1]
    assert re.match(
        r"^balance: step=0 micro_batch=0 efficiency=1 imbalance=1 reference_efficiency=1 spread=0 reference_spread=0 "
        r"gain=\S+ moved_samples=0 moved_tokens=0 moved_bytes=0 num_tokens=\d+ num_padding=\d+ dropped=0 skipped=0 "
        r"truncated=0 algorithm=\w+$",
        records[0].getMessage(),
    )


def test_what_was_left_out_or_cut_is_counted(corpus: Any) -> None:
    class Mixed:
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Any:
            if index == 3:
                raise OSError("no such block")
            return {"input_ids": np.arange(0 if index in (1, 2) else 20 * index)}

    def rank(plane: DataPlane, known: bool) -> list[Any]:
        heard: list[Balance] = []
        config = LoaderConfig(seq_len=64, on_sample_error="skip", oversized="truncate")
        sampler = StepSampler(8, global_batch_size=8, order="sequential")
        metadata = [0, 0, 0, 60, 80, 100, 120, 140] if known else None
        loader = build_loader(
            Mixed(), plane, config, sampler=sampler, metadata=metadata, on_balance=heard.append
        )
        with loader:
            for _ in loader:
                pass
        return [(b.counts.dropped, b.counts.skipped, b.counts.truncated) for b in heard]

    assert SimulatedWorld(2).run(rank, False) == [[(3, 1, 4)], []]
    # Nothing was read when the window was planned, so nobody could know that one cannot be.
    assert SimulatedWorld(2).run(rank, True) == [[(3, 0, 4)], []]


def test_balancing_of_local_streams_says_who_sent_what() -> None:
    class Stream:
        def __init__(self, rank: int) -> None:
            self.rank = rank

        def __iter__(self) -> Any:
            long = {"input_ids": np.full(60 if self.rank == 0 else 4, self.rank)}
            return iter([[[long], [long]]])

    def rank(plane: DataPlane) -> list[Any]:
        heard: list[Balance] = []
        config = LoaderConfig(seq_len=64)
        with build_loader(Stream(plane.topology.dp_rank), plane, config, on_balance=heard.append) as loader:
            tokens = [int(batch["info"].num_tokens) for batch in loader]
        return [tokens, [(b.sent.tolist(), b.received.tolist(), b.moved_samples) for b in heard]]

    # Rank 0 has two long documents and rank 1 two short ones: side by side they wait for nobody.
    (mine, heard), (others, nothing) = SimulatedWorld(2).run(rank)
    assert sorted(zip(mine, others, strict=True)) == [(4, 4), (60, 60)]
    assert heard == [([1, 1], [1, 1], 2)]
    assert nothing == []


def test_it_prints_as_scalars(corpus: Any) -> None:
    _, last = SimulatedWorld(1).run(lambda plane: listen(plane, corpus, "online"))[0]
    text = repr(last)
    told = ", ".join(
        f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value!r}"
        for name, value in last.to_dict().items()
    )
    assert text == f"Balance({told})"
    assert len(text) < 500


def test_scalars_are_the_numbers_under_names_of_their_own(corpus: Any) -> None:
    (heard, _), _ = SimulatedWorld(2).run(lambda plane: listen(plane, corpus, "online"))
    balance = heard[0][1]
    told = balance.to_dict()
    assert balance.scalars() == {
        f"balance/{name}": value
        for name, value in told.items()
        if name not in ("step", "micro_batch", "algorithm")
    }
    assert all(type(value) is float for value in balance.scalars().values())
    assert balance.scalars("data/")["data/num_tokens"] == balance.num_tokens > 0


@pytest.mark.parametrize("composed", [False, True])
def test_every_window_is_told_however_far_ahead_it_was_planned(corpus: Any, composed: bool) -> None:
    heard: list[tuple[int, int]] = []

    def hear(balance: Balance) -> None:
        heard.append((balance.step, balance.micro_batch))

    sampler = StepSampler(len(corpus), global_batch_size=8, seed=1)
    config = LoaderConfig(seq_len=1024, balance_window=1, host_prefetch=0 if composed else 90)
    with build_loader(corpus, None, config, sampler=sampler, on_balance=hear) as built:
        ahead: Any = HostPrefetch(built.root, depth=90) if composed else built.root
        with Loader(ahead, on_balance=hear) as loader:
            for _ in loader:
                loader.wait_for_prefetch()
    assert heard == [(k // 8, k % 8) for k in range(len(corpus))]


def test_delivered_balances_are_forgotten(corpus: Any) -> None:
    sampler = StepSampler(len(corpus), global_batch_size=8, seed=1)
    config = LoaderConfig(seq_len=1024, balance_window=1)
    heard: list[Balance] = []
    kept = []
    for listener in (None, heard.append):
        with build_loader(corpus, None, config, sampler=sampler, on_balance=listener) as loader:
            for _ in loader:
                pass
            planner = next(node for node in upstream(loader.root) if isinstance(node, Planner))
            kept.append(len(planner.balances))
    assert max(kept) < 70 < len(heard)
