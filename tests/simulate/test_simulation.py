"""Sampled steps and their layouts: nothing is lost, and the numbers are what they say."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.cost import FeatureCost, LinearQuadraticCost, StageCost
from evenstep.plan import Algorithm, Objective
from evenstep.sampling.order import ShuffledOrder
from evenstep.simulate import Settings, Simulation, simulate
from evenstep.simulate.settings import fitting, usual_seq_len
from evenstep.simulate.simulation import GREEDY, SAMPLER, SHUFFLED, Outcome
from evenstep.simulate.steps import sampled_steps

Lengths = npt.NDArray[np.int64]
SMALL = Settings(
    seq_len=2048, dp_sizes=(4,), windows=(2,), algorithms=("auto",), accumulation_steps=2, steps=2
)


def timeless(outcomes: tuple[Outcome, ...]) -> list[Outcome]:
    return [replace(outcome, plan_seconds=0.0) for outcome in outcomes]


@given(
    lengths=st.lists(st.integers(0, 50), max_size=20).map(lambda values: np.array(values, dtype=np.int64)),
    seq_len=st.integers(1, 20),
)
def test_documents_are_made_to_fit(lengths: Lengths, seq_len: int) -> None:
    split = fitting(lengths, seq_len, "split")
    assert split.sum() == lengths.sum()
    assert ((split > 0) & (split <= seq_len)).all()
    assert len(split) == sum(-(-length // seq_len) for length in lengths.tolist())
    assert fitting(lengths, seq_len, "truncate").tolist() == [min(x, seq_len) for x in lengths.tolist() if x]
    assert fitting(lengths, seq_len, "drop").tolist() == [x for x in lengths.tolist() if 0 < x <= seq_len]


@pytest.mark.parametrize(("longest", "expected"), [(1, 1024), (1024, 1024), (1025, 2048), (30_000, 32_768)])
def test_usual_row_holds_nearly_all_documents(longest: int, expected: int) -> None:
    assert usual_seq_len(np.full(10, longest)) == expected


def test_one_giant_does_not_make_the_row(lengths: Lengths) -> None:
    assert usual_seq_len(np.concatenate([np.full(999, 500), [10**6]])) == 1024


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("fill", [None, 0.8])
def test_sampled_steps_hold_different_documents_in_whole_rows(rows: int, fill: float | None) -> None:
    lengths = np.random.default_rng(1).permutation(np.arange(100, 1300))
    settings = replace(SMALL, micro_batch_size=rows, fill=fill, steps=4)
    steps = sampled_steps(lengths, settings, 4)
    assert len(steps) == 4
    seen = np.concatenate([step.tokens for step in steps])
    assert len(np.unique(seen)) == len(seen)  # every length is there once, so it names its document
    for step in steps:
        assert list(step.layouts) == [SHUFFLED, SAMPLER]
        for layout in step.layouts.values():
            used = np.bincount(layout, weights=step.tokens, minlength=rows * 8)
            assert len(used) == rows * 8
            assert used.max() <= 2048
        one, other = (np.bincount(r, weights=step.tokens) for r in step.layouts.values())
        assert sorted(one) == sorted(other)
        assert (step.layouts[SAMPLER] != step.layouts[SHUFFLED]).any()
        if fill is not None:
            assert step.tokens.sum() - step.tokens[-1] < fill * rows * 8 * 2048 <= step.tokens.sum()


def test_steps_are_spread_over_the_epoch() -> None:
    settings = replace(SMALL, order="sequential", steps=3)
    steps = sampled_steps(np.arange(1, 1801) + 100, settings, 4)
    firsts = [int(step.tokens.min()) for step in steps]
    assert firsts[0] == 101
    assert 700 < firsts[1] < 1000
    assert firsts[2] > 1500


def test_every_layout_of_a_dp_size_is_there_once(simulation: Simulation) -> None:
    found = [(o.dp_size, o.layout, o.window) for o in simulation.outcomes]
    each = [(SHUFFLED, 0), (SAMPLER, 0), ("lpt", 1), ("auto", 1), ("lpt", 4), ("auto", 4)]
    assert found == [(dp_size, *layout) for dp_size in (2, 4) for layout in each]


def test_what_was_left_out_is_said(simulation: Simulation, lengths: Lengths) -> None:
    assert simulation.documents == 4000
    assert simulation.empty == 8 - 1  # position 0 is empty and then a giant
    assert simulation.oversized == int((lengths > 2048).sum())
    assert simulation.tokens == int(np.minimum(lengths, 2048).sum())
    assert simulation.skipped == (
        "5000 ranks were skipped: a step has 20,000 rows with room for 40,960,000 tokens, "
        f"and 3,993 documents with {simulation.tokens:,} tokens do not fill it",
    )


def test_outcomes_keep_their_laws(simulation: Simulation) -> None:
    for outcome in simulation.outcomes:
        assert 0 < outcome.efficiency <= 1
        assert outcome.slowest <= outcome.speedup <= outcome.fastest
        assert 0 <= outcome.padding < 0.05
        assert outcome.steps == 3
        assert outcome.windows == (0 if not outcome.window else 3 * 4 // outcome.window)
        before = next(o for o in simulation.outcomes if o.dp_size == outcome.dp_size)
        assert outcome.speedup == pytest.approx(outcome.efficiency / before.efficiency)
        assert outcome.padding == before.padding
        if outcome.layout == SHUFFLED:
            assert outcome.slowest == outcome.speedup == outcome.fastest == 1.0
        if outcome.window:
            assert outcome.slowest >= 1.0 - 1e-9  # the gate never makes a step worse
            assert 0 <= outcome.moved_tokens <= 1
            assert outcome.plan_seconds > 0
            assert outcome.bound_share is None or 0 < outcome.bound_share <= 1 + 1e-9


def test_the_picture_is_the_best_layout_of_the_first_step(simulation: Simulation) -> None:
    picture = simulation.picture
    assert (picture.dp_size, picture.sync) == (4, "micro_batch")
    assert picture.before.shape == picture.after.shape == (4, 4)
    assert picture.after.sum() == pytest.approx(picture.before.sum(), rel=1e-12)
    best = max((o for o in simulation.outcomes if o.dp_size == 4), key=lambda o: o.speedup)
    assert (picture.algorithm, picture.window) == (best.layout, best.window)
    gained = Objective().score(picture.before) / Objective().score(picture.after)
    assert best.slowest <= gained <= best.fastest


def test_best_prefers_a_small_window_that_is_nearly_as_good(simulation: Simulation) -> None:
    base = simulation.outcomes[2]
    speeds = {1: 1.2, 2: 1.497, 4: 1.5}
    outcomes = tuple(replace(base, dp_size=4, window=w, speedup=s) for w, s in speeds.items())
    assert replace(simulation, outcomes=outcomes).best(4).window == 2


def test_equal_input_gives_equal_outcomes(lengths: Lengths) -> None:
    first, second = (simulate(lengths, SMALL) for _ in range(2))
    assert timeless(first.outcomes) == timeless(second.outcomes)
    other = simulate(lengths, replace(SMALL, seed=1))
    assert timeless(first.outcomes) != timeless(other.outcomes)


def test_bytes_are_those_of_the_moved_tokens(lengths: Lengths) -> None:
    one, two = (simulate(lengths, replace(SMALL, bytes_per_token=size)).outcomes[-1] for size in (1, 16))
    assert one.moved_tokens > 0
    assert two.moved_bytes == 16 * one.moved_bytes
    assert one.moved_bytes == pytest.approx(one.moved_tokens * (1 - one.padding) * 8 * 2048)


def test_nothing_moves_below_the_gate(lengths: Lengths) -> None:
    kept = simulate(lengths, replace(SMALL, min_gain=1.0)).outcomes
    assert kept[2].speedup == pytest.approx(1.0)
    assert kept[2].moved_tokens == 0
    sampler = simulate(lengths, replace(SMALL, min_gain=1.0, reference="sampler")).outcomes
    assert sampler[2].speedup == pytest.approx(sampler[1].speedup)
    assert sampler[2].moved_tokens == 0


def test_greedy_rows_are_filled_as_documents_come(lengths: Lengths) -> None:
    settings = replace(SMALL, reference="greedy", consecutive=True, oversized="split", steps=3)
    whole = fitting(lengths, 2048, "split", keep_empty=True)
    assert (whole == 0).sum() == (lengths == 0).sum()
    steps = sampled_steps(whole, settings, 4)
    order = ShuffledOrder(len(whole), 0).index_at(0, np.arange(len(whole)))
    read = whole[order][whole[order] > 0]
    assert (
        np.concatenate([step.tokens for step in steps]).tolist()
        == read[: sum(len(s.tokens) for s in steps)].tolist()
    )
    for step in steps:
        [(name, rows)] = step.layouts.items()
        assert name == GREEDY
        assert (np.diff(rows) >= 0).all()
        used = np.bincount(rows, weights=step.tokens)
        firsts = step.tokens[np.flatnonzero(np.diff(rows, prepend=-1))]
        assert len(used) == 8
        assert (used <= 2048).all()
        assert (used[:-1] + firsts[1:] > 2048).all()  # it would not have fitted into the row before


def test_greedy_rows_are_what_is_compared_with(lengths: Lengths) -> None:
    simulation = simulate(lengths, replace(SMALL, reference="greedy"))
    before, after = simulation.outcomes
    assert (before.layout, before.speedup, after.layout) == (GREEDY, 1.0, "auto")
    assert after.speedup > 1.05
    assert simulation.picture.baseline == GREEDY
    assert simulation.unplanned(4) == (before,)


def test_consecutive_steps_are_the_first(lengths: Lengths) -> None:
    near, far = (
        sampled_steps(np.minimum(lengths, 2048), replace(SMALL, consecutive=c), 4) for c in (True, False)
    )
    assert near[0].tokens.tolist() == far[0].tokens.tolist()
    assert near[1].tokens.tolist() != far[1].tokens.tolist()


def test_waiting_once_a_step_loses_less(lengths: Lengths) -> None:
    often, once = (simulate(lengths, replace(SMALL, sync=sync)) for sync in ("micro_batch", "step"))
    assert once.outcomes[0].efficiency > often.outcomes[0].efficiency
    assert once.picture.sync == "step"


def test_computed_padding_evens_out_ranks(lengths: Lengths) -> None:
    bare = simulate(lengths, replace(SMALL, cost=LinearQuadraticCost(1000, 1)))
    padded = simulate(lengths, replace(SMALL, cost=LinearQuadraticCost(1000, 1, padding=1000)))
    linear = simulate(lengths, replace(SMALL, cost=LinearQuadraticCost(1000, 1e-9, padding=1000)))
    assert padded.outcomes[0].efficiency > bare.outcomes[0].efficiency
    assert linear.outcomes[0].efficiency == pytest.approx(1.0, abs=1e-6)
    even = padded.picture.before.sum() / padded.picture.dp_size
    assert even > 2 * 2048 * 1000  # two micro-batches cost at least their padded rows


@pytest.mark.parametrize("seconds", [None, 1e-9])
def test_progress_ends_at_its_total(lengths: Lengths, seconds: float | None) -> None:
    totals: list[int] = []

    @contextmanager
    def progress(description: str, total: int) -> Iterator[Callable[[int], None]]:
        assert description == "planning"
        totals.extend((total, 0))

        def advance(amount: int) -> None:
            totals[1] += amount

        yield advance

    # 300 ranks fit once and not twice, 5000 not at all.
    settings = replace(SMALL, dp_sizes=(4, 300, 5000), algorithms=("lpt",), seconds=seconds)
    simulate(lengths, settings, progress=progress)
    assert totals[0] == totals[1] == 3 * 2


@pytest.mark.parametrize("seconds", [1e-9, 1e9])
def test_time_limits_the_number_of_steps_alike(lengths: Lengths, seconds: float) -> None:
    settings = replace(SMALL, seconds=seconds, algorithms=("lpt", "auto"), dp_sizes=(2, 4))
    limited, free = simulate(lengths, settings), simulate(lengths, replace(settings, seconds=None))
    assert {outcome.steps for outcome in limited.outcomes} == {1 if seconds < 1 else 2}
    if seconds > 1:
        assert timeless(limited.outcomes) == timeless(free.outcomes)


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"seq_len": 0}, ValueError, "seq_len is 0, expected at least 1"),
    ({"steps": 2.5}, TypeError, "steps is 2.5 (float), expected an integer"),
    ({"dp_sizes": ()}, ValueError, "dp_sizes is empty: nothing would be simulated; give at least one"),
    ({"dp_sizes": (4, 0)}, ValueError, "dp_sizes is 0, expected at least 1"),
    ({"sync": "never"}, ValueError, "sync is 'never', expected one of micro_batch, step"),
    ({"oversized": "cut"}, ValueError, "oversized is 'cut', expected one of truncate, split, drop"),
    (
        {"algorithms": ("magic",)},
        ValueError,
        f"algorithm 'magic' is unknown, expected one of {', '.join(get_args(Algorithm))}",
    ),
    (
        {"reference": "greedy", "fill": 0.9},
        ValueError,
        "reference='greedy' fills rows with shuffled documents as they come; fill=0.9 and order='shuffled' would mean "
        "nothing there, leave them away",
    ),
    (
        {"reference": "any"},
        ValueError,
        "reference is 'any', expected one of shuffled, sampler, greedy",
    ),
    ({"seconds": 0.0}, ValueError, "seconds is 0.0, expected a positive number or None"),
    ({"fill": 1.5}, ValueError, "fill is 1.5, expected a share of a step's room in (0, 1]"),
    (
        {"cost": StageCost({"llm": LinearQuadraticCost(), "encoder": FeatureCost("patches")})},
        ValueError,
        "lengths alone say nothing about the stages ('llm', 'encoder'); give a cost of one stage",
    ),
    (
        {"windows": (4, 8)},
        ValueError,
        "no window of (4, 8) fits into a step of 2 micro-batches: a window never crosses an optimizer step",
    ),
]


@pytest.mark.parametrize(
    ("given_fields", "error", "message"), BAD, ids=[message[:30] for _, _, message in BAD]
)
def test_bad_settings_are_named(given_fields: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        replace(SMALL, **given_fields)


def test_too_few_documents() -> None:
    rows = "Rows hold seq_len=2,048 tokens (default of --seq-len: the power of two that holds 99% of the documents)"
    message = (
        "4 ranks were skipped: a step has 8 rows with room for 16,384 tokens, and 3 documents with 30 tokens do not "
        f"fill it. {rows}. Simulate fewer ranks (--dp-sizes), shorter rows (--seq-len) or a longer file"
    )
    for oversized in ("truncate", "split"):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            simulate(np.full(3, 10), replace(SMALL, oversized=oversized))
    message = (
        "4 ranks were skipped: a step has 8 rows with room for 16,384 tokens, and 4 documents with 2,078 tokens do not "
        f"fill it. {rows}, and 1 longer document was cut to it (--oversized truncate), which lost 97,952 tokens. Simulate "
        "fewer ranks (--dp-sizes), shorter rows (--seq-len), pieces of long documents (--oversized split) or a longer file"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        simulate(np.array([10, 10, 10, 100_000]), SMALL)
    message = (
        "4 ranks were skipped: a step has 8 rows with room for 16,384 tokens, and 3 documents with 30 tokens do not "
        f"fill it. {rows}, and 2 longer documents were left out (--oversized drop), which lost 200,000 tokens. Simulate "
        "fewer ranks (--dp-sizes), shorter rows (--seq-len), pieces of long documents (--oversized split) or a longer file"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        simulate(np.array([10, 10, 10, 100_000, 100_000]), replace(SMALL, oversized="drop"))


def test_costs_of_zero() -> None:
    cost = LinearQuadraticCost(0, 0)
    message = f"every document costs 0 under {cost!r}: there is nothing to balance"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        simulate(np.full(500, 500), replace(SMALL, cost=cost))
