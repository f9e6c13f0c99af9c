"""Mixtures: every prefix in proportion, every dataset gone through evenly, every position on its own."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.cursor import Cursor
from evenstep.sampling import MixtureOrder, MixtureSampler, Remainder, TokenBudgetSampler
from evenstep.sampling.blend import Blend, _rounded_share

GOLDEN = [101, 116, 71, 6, 100, 102, 94, 114, 63, 58, 107, 3]

weights_of = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=12)


@given(count=st.integers(0, 2**63), share=st.integers(0, 2**63))
def test_the_128_bit_product_is_exact(count: int, share: int) -> None:
    product = _rounded_share(np.array([count], dtype=np.uint64), np.uint64(share))
    assert int(product[0]) == (count * share + 2**63) >> 64


@given(weights=weights_of, length=st.integers(1, 600))
def test_every_prefix_is_in_proportion(weights: list[float], length: int) -> None:
    exact = [Fraction(w) for w in weights]
    streams, counts = Blend(exact)(np.arange(length, dtype=np.int64))
    taken = streams[:, None] == np.arange(len(weights))
    after = np.cumsum(taken, axis=0)
    assert counts.tolist() == [int(after[p, d]) - 1 for p, d in enumerate(streams)], "counts have no gap"
    wanted = np.arange(1, length + 1)[:, None] * np.array([float(w / sum(exact)) for w in exact])
    assert np.abs(after - wanted).max() < 2


@given(weights=weights_of, far=st.integers(0, 2**61))
def test_proportions_hold_far_out(weights: list[float], far: int) -> None:
    exact = [Fraction(w) for w in weights]
    streams, counts = Blend(exact)(np.arange(far, far + 50, dtype=np.int64))
    for stream, count, position in zip(streams, counts, range(far, far + 50), strict=True):
        assert abs(int(count) - position * exact[stream] / sum(exact)) < 2 + far * 2**-50


@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    batch=st.integers(1, 9),
    epochs=st.integers(1, 3),
    order=st.sampled_from(["shuffled", "sequential"]),
    data=st.data(),
)
def test_each_dataset_is_gone_through_pass_by_pass(
    sizes: list[int], batch: int, epochs: int, order: str, data: st.DataObject
) -> None:
    weights = data.draw(st.lists(st.floats(0.05, 1), min_size=len(sizes), max_size=len(sizes)))
    num_samples = data.draw(st.integers(1, 80))
    sampler = MixtureSampler(
        sizes, weights, global_batch_size=batch, num_samples=num_samples, order=order, remainder="pad"
    )
    cursor, seen = sampler.start(), list[int]()
    for epoch in range(epochs):
        while (step := sampler.step_at(cursor)) is not None:
            assert len(step.indices) == batch
            seen += step.indices[step.indices >= 0].tolist()
            cursor = step.next_cursor
        assert cursor.consumed_samples == num_samples
        cursor = cursor.at_epoch(epoch + 1)
    assert len(seen) == epochs * num_samples
    datasets, inside = sampler.split(np.array(seen))
    for d, size in enumerate(sizes):
        taken = inside[datasets == d]
        assert set(taken.tolist()) <= set(range(size))
        times = Counter(taken.tolist())
        passes, begun = divmod(len(taken), size)
        assert (
            sorted(times.get(i, 0) for i in range(size)) == [passes] * (size - begun) + [passes + 1] * begun
        )


@given(begin=st.integers(0, 10**12), batch=st.integers(1, 50), weights=weights_of)
def test_a_step_is_a_function_of_its_position(begin: int, batch: int, weights: list[float]) -> None:
    sizes = [10**12 // (i + 1) for i in range(len(weights))]
    whole = MixtureSampler(sizes, weights, global_batch_size=2 * batch, num_samples=2 * 10**12)
    half = MixtureSampler(sizes, weights, global_batch_size=batch, num_samples=2 * 10**12)
    a = whole.step_at(Cursor(consumed_samples=begin))
    b = half.step_at(Cursor(consumed_samples=begin))
    c = half.step_at(Cursor(consumed_samples=begin + batch))
    assert a is not None
    assert b is not None
    assert c is not None
    assert sorted(a.indices) == sorted([*b.indices, *c.indices])


def test_passes_of_a_dataset_differ() -> None:
    sampler = MixtureSampler([50, 70], [1, 1], global_batch_size=100, num_samples=1000)
    cursor, first = sampler.start(), list[tuple[int, ...]]()
    order = MixtureOrder([50, 70], [1, 1], num_samples=1000)
    indices = order.index_at(0, np.arange(1000, dtype=np.int64))
    datasets, inside = order.split(indices)
    passes = inside[datasets == 0].reshape(-1, 50)
    assert len({tuple(row) for row in passes.tolist()}) == len(passes) == 10
    for _ in range(3):
        step = sampler.step_at(cursor)
        assert step is not None
        first.append(tuple(step.indices.tolist()))
        cursor = step.next_cursor
    assert sorted(first[0]) == sorted(indices[:100].tolist())


def test_rows_do_not_keep_step_with_the_blend() -> None:
    """Two equal datasets alternate; without a shuffle, rank 0 of 2 would read one of them alone."""
    sampler = MixtureSampler([10**6, 10**6], [1, 1], global_batch_size=512)
    step = sampler.step_at(sampler.start())
    assert step is not None
    on_even_rows, _ = sampler.split(step.indices[::2])
    assert 90 < np.count_nonzero(on_even_rows) < 166
    assert np.count_nonzero(sampler.split(step.indices)[0]) == 256


def test_split_takes_the_concatenation_apart() -> None:
    sampler = MixtureSampler([3, 2, 4], [1, 1, 1], global_batch_size=1)
    datasets, inside = sampler.split(np.array([0, 2, 3, 4, 5, 8, -1]))
    assert datasets.tolist() == [0, 0, 1, 1, 2, 2, -1]
    assert inside.tolist() == [0, 2, 0, 1, 0, 3, -1]


def test_a_weight_of_zero_leaves_a_dataset_out() -> None:
    sampler = MixtureSampler([5, 5, 5], [1, 0, 1], global_batch_size=15, remainder="pad")
    step = sampler.step_at(sampler.start())
    assert step is not None
    assert Counter(sampler.split(step.indices)[0].tolist()) in ({0: 8, 2: 7}, {0: 7, 2: 8})


def test_weights_count_by_their_ratio() -> None:
    a = MixtureSampler([5, 9], [1, 3], global_batch_size=2)
    b = MixtureSampler([5, 9], [0.25, 0.75], global_batch_size=2)
    assert a.start() == b.start()
    others = [
        MixtureSampler([5, 9], [1, 2], global_batch_size=2),
        MixtureSampler([9, 5], [1, 3], global_batch_size=2),
        MixtureSampler([5, 9], [1, 3], global_batch_size=2, num_samples=13),
        MixtureSampler([5, 9], [1, 3], global_batch_size=2, order="sequential"),
    ]
    assert len({sampler.start().stream for sampler in [a, *others]}) == 5
    assert (a.start().order, a.start().dataset_size) == ("mixture", 14)


@pytest.mark.parametrize("remainder", ["drop", "wrap", "pad"])
def test_length(remainder: Remainder) -> None:
    sampler = MixtureSampler([5, 6], [1, 1], global_batch_size=4, remainder=remainder)
    cursor, steps = sampler.start(), 0
    while (step := sampler.step_at(cursor)) is not None:
        cursor, steps = step.next_cursor, steps + 1
    assert steps == len(sampler) == (2 if remainder == "drop" else 3)


def test_a_mixture_packs_by_tokens_too() -> None:
    lengths = np.arange(1, 61)
    order = MixtureOrder([20, 40], [1, 2], num_samples=60, seed=4)
    sampler = TokenBudgetSampler(lengths, rows_per_step=3, seq_len=64, order=order, remainder="pad")
    cursor, seen = sampler.start(), list[int]()
    while (step := sampler.step_at(cursor)) is not None:
        seen += step.indices[step.indices >= 0].tolist()
        cursor = step.next_cursor
    assert sorted(seen) == list(range(60))


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        (
            {"sizes": [4]},
            ValueError,
            "1 sizes and 2 weights: a mixture needs one of each per dataset",
        ),
        (
            {"sizes": [], "weights": []},
            ValueError,
            "0 sizes and 0 weights: a mixture needs one of each per dataset",
        ),
        ({"sizes": [4, 0]}, ValueError, "sizes[1] is 0: expected 1 or more samples"),
        ({"weights": [1, -0.5]}, ValueError, "weights[1] is -0.5: a weight is a finite number >= 0"),
        ({"weights": [float("nan"), 1]}, ValueError, "weights[0] is nan: a weight is a finite number >= 0"),
        ({"weights": [1, "1"]}, ValueError, "weights[1] is '1': a weight is a finite number >= 0"),
        ({"weights": [0, 0]}, ValueError, "all 2 weights are 0: the mixture would be empty"),
        ({"num_samples": 0}, ValueError, "num_samples is 0: expected 1 or more samples"),
        ({"order": "random"}, ValueError, "order is 'random': expected one of 'shuffled', 'sequential'"),
    ],
)
def test_bad_arguments(kwargs: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        MixtureSampler(**{"sizes": [4, 5], "weights": [1, 2], "global_batch_size": 2, **kwargs})  # type: ignore[arg-type]
    assert str(caught.value) == message


def test_positions_have_an_end() -> None:
    sampler = MixtureSampler([4], [1], global_batch_size=1, num_samples=2**60)
    with pytest.raises(
        ValueError, match=r"^epoch 4 of 1152921504606846976 samples lies beyond position 2\*\*62$"
    ):
        sampler.step_at(Cursor(epoch=4))


def test_a_mixture_never_changes() -> None:
    """Golden values: whoever changes them breaks every saved position."""
    sampler = MixtureSampler([100, 10, 7], [0.5, 0.3, 0.2], global_batch_size=12, seed=3, num_samples=10**6)
    step = sampler.step_at(Cursor(epoch=1, consumed_samples=10**5))
    assert step is not None
    assert step.indices.tolist() == GOLDEN
