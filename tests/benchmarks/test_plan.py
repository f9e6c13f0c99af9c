"""The figures of planning that must not get worse; times are generous, because a test machine is busy."""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np
import pytest

from evenstep.bench import plan
from evenstep.bench.lengths import LONG_CONTEXT, draw_from
from evenstep.bench.plan_cases import CASES
from evenstep.bench.plan_peers import PEERS, heap_lpt, karmarkar_karp


def test_named_case() -> None:
    result = plan.compare(CASES["named"], range(10), {})
    assert result["fallbacks"] == 0
    assert result["over_bound_max"] <= 1.01
    assert result["planners"]["auto"]["imbalance"] <= 1.04


@pytest.mark.parametrize(
    "name", ["dp8", "wlb-1", "lognormal", "gamma", "one-giant", "image-text", "256-to-8", "1024-to-32"]
)
def test_no_peer_is_better(name: str) -> None:
    result = plan.compare(CASES[name], range(3), PEERS)
    assert result["better_peers"] == []
    assert result["fallbacks"] == 0


def test_nearly_full_rows_are_packed() -> None:
    for name in ("lognormal-98", "lognormal-98-dp8"):
        assert plan.compare(CASES[name], range(20), {})["fallbacks"] == 0


@pytest.mark.parametrize("name", ["named", "dp8"])
def test_refine_moves_at_most_a_fifth(name: str) -> None:
    refine = plan.movement(CASES[name], range(3))["refine"]
    assert refine["moved_max"] <= 0.2
    assert refine["over_bound_max"] <= 1.015


def test_karmarkar_karp_conserves_and_balances() -> None:
    costs = np.random.default_rng(0).integers(1, 1000, 300)
    row = karmarkar_karp(costs, costs, 7, 0)
    load = np.bincount(row, costs, minlength=7)
    assert load.sum() == costs.sum()
    assert load.max() - load.min() <= np.ptp(np.bincount(heap_lpt(costs, costs, 7, 0), costs))
    # The example of the method's Wikipedia article: 8 7 6 5 4 in two subsets differ by 2.
    example = np.array([8, 7, 6, 5, 4])
    assert abs(np.diff(np.bincount(karmarkar_karp(example, example, 2, 0), example))) == 2


def test_quantiles_reproduce_the_tail() -> None:
    lengths = draw_from(LONG_CONTEXT, np.random.default_rng(0), 100_000, 32_768)
    assert 0.008 < (lengths == 32_768).mean() < 0.010
    assert 3500 < lengths.mean() < 3700


def test_a_failing_peer_is_reported() -> None:
    def broken(*_: object) -> Any:
        raise RuntimeError("no plan today")

    result = plan.compare(CASES["lognormal-98-dp8"], range(1), {"broken": broken})
    assert result["failed_peers"] == {"broken": "RuntimeError: no plan today"}


def test_speed_and_interference_are_measured() -> None:
    fast = plan.speed(0, repeats=3)
    assert fast["lpt_ratio"] < 6
    assert fast["auto_ratio"] < 15
    assert plan.interference(0, runs=1, seconds=0.2)["runs"] == 1


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    plan.add_arguments(parser)
    few = ["--draws", "1", "--cases", "dp8"]
    assert plan.run(parser.parse_args([*few, "--parts", "quality", "movement"])) == 0
    text = capsys.readouterr().out
    assert "dp8: " in text
    assert "cost 24576 L + L^2" in text
    assert plan.run(parser.parse_args([*few, "--json", "--parts", "quality"])) == 0
    assert json.loads(capsys.readouterr().out)["quality"][0]["fallbacks"] == 0
