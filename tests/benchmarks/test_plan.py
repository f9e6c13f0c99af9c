"""The figures of planning that must not get worse; times are generous, because a test machine is busy."""

from __future__ import annotations

import argparse
import json
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evenstep.bench import plan
from evenstep.bench.lengths import LONG_CONTEXT, draw_from
from evenstep.bench.plan_cases import CASES
from evenstep.bench.plan_figure import save_growth
from evenstep.bench.plan_peers import PEERS, heap_lpt, karmarkar_karp, optional_peers


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
    for name in ("lognormal-98", "lognormal-98-dp8", "planted-2", "planted-3", "planted-4"):
        result = plan.compare(CASES[name], range(20), {})
        assert result["fallbacks"] == 0
        assert result["unpackable"] <= 1


@pytest.mark.parametrize("documents", [2, 3, 4])
def test_planted_rows_are_a_packing(documents: int) -> None:
    case = CASES[f"planted-{documents}-dp32"]
    window = case.draw(0)
    assert window.reference is not None
    rows = np.bincount(window.reference, window.tokens, minlength=case.rows)
    assert (rows == int(0.98 * case.seq_len)).all()
    assert (np.bincount(window.reference) == documents).all()


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


def test_an_installed_library_that_cannot_be_used_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "binpacking.py").write_text("raise RuntimeError('built for another machine')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "binpacking", raising=False)
    found, failed = optional_peers()
    assert "binpacking" not in found
    assert failed["binpacking"] == "RuntimeError: built for another machine"


def test_installed_libraries_plan_in_their_own_terms(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    verl = tmp_path / "verl" / "utils"
    verl.mkdir(parents=True)
    (verl.parent / "__init__.py").write_text("raise RuntimeError('this starts a whole trainer')")
    (verl / "seqlen_balancing.py").write_text(
        "def karmarkar_karp(costs, parts, equal_size):\n"
        "    assert equal_size is False\n"
        "    return [list(range(part, len(costs), parts)) for part in range(parts)]\n"
    )
    (tmp_path / "binpacking.py").write_text(
        "def to_constant_bin_number(costs, bins):\n"
        "    items = list(costs.items())\n"
        "    return [dict(items[k::bins]) for k in range(bins)]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] in ("verl", "binpacking")]:
        monkeypatch.delitem(sys.modules, name)
    found, failed = optional_peers()
    for name in ("verl", "verl.utils", "verl.utils.seqlen_balancing", "binpacking"):
        del sys.modules[name]  # monkeypatch would put it back
    assert not {"verl Karmarkar-Karp", "binpacking"} & failed.keys()
    costs = np.arange(7)
    for name in ("verl Karmarkar-Karp", "binpacking"):
        assert found[name](costs, costs, 3, 0).tolist() == [0, 1, 2, 0, 1, 2, 0]


def test_a_better_peer_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def cheat(tokens: Any, costs: Any, rows: int, seq_len: int) -> Any:
        monkeypatch.setattr("evenstep.bench.plan_measures._peer_score", lambda *_: 1.0)
        return heap_lpt(tokens, costs, rows, seq_len)

    monkeypatch.setattr(plan, "optional_peers", lambda: ({"cheat": cheat}, {}))
    parser = argparse.ArgumentParser()
    plan.add_arguments(parser)
    few = ["--draws", "1", "--cases", "dp8", "--parts", "quality"]
    assert plan.run(parser.parse_args(few)) == 1
    assert "1 windows of 1 cases, 5 peers: a peer beats auto in dp8; 0 fallbacks" in capsys.readouterr().out


def test_growth_is_drawn(tmp_path: Path) -> None:
    points = [
        {
            "samples": n,
            "rows": n // 61,
            "heap_lpt_seconds": n / 9e6,
            "lpt_seconds": n / 5e6,
            "auto_seconds": n / 2e6,
        }
        for n in (3904, 62464, 999424)
    ]
    for name in ("growth.svg", "again.svg", "growth.png"):
        save_growth(points, "a processor, 2 usable cores, python 3", tmp_path / name)
    drawn = (tmp_path / "growth.svg").read_text()
    assert "999,424 samples into 16,384 rows: 0.5 s" in drawn
    assert "a processor, 2 usable cores" in drawn
    assert drawn == (tmp_path / "again.svg").read_text()
    assert (tmp_path / "growth.png").read_bytes().startswith(b"\x89PNG")


def test_speed_and_interference_are_measured() -> None:
    fast = plan.speed(0, repeats=3)
    assert fast["lpt_ratio"] < 6
    assert fast["auto_ratio"] < 15
    assert plan.interference(0, runs=1, seconds=0.2)["runs"] == 1


def test_speed_growth_and_interference_are_told_and_drawn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(plan, "speed", partial(plan.speed, repeats=1))
    monkeypatch.setattr(plan, "growth", partial(plan.growth, sizes=(16, 64)))
    monkeypatch.setattr(plan, "interference", partial(plan.interference, runs=1, seconds=0.2))
    parser = argparse.ArgumentParser()
    plan.add_arguments(parser)
    picture = tmp_path / "growth.svg"
    arguments = ["--parts", "speed", "growth", "interference", "--plot", str(picture)]
    assert plan.run(parser.parse_args(arguments)) == 0
    number = r" *\d+\.\d+"
    lines = capsys.readouterr().out.splitlines()[3:]
    patterns = [
        rf"8,572 samples into 1,024 rows: bare heap LPT {number} ms, lpt {number}x, auto {number}x",
        *(
            rf" +{samples} samples into +{rows} rows: bare heap LPT {number} s, lpt {number} s, auto {number} s"
            for samples, rows in (("976", 16), ("3,904", 64))
        ),
        rf"one plan per 0\.2 s slows small kernels by -?{number}% \(median of 1 paired runs\)",
    ]
    assert [bool(re.fullmatch(pattern, line)) for pattern, line in zip(patterns, lines, strict=True)] == [
        True
    ] * 4, lines
    assert "3,904 samples into 64 rows" in picture.read_text()


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    plan.add_arguments(parser)
    few = ["--draws", "1", "--cases", "dp8"]
    assert plan.run(parser.parse_args([*few, "--parts", "quality", "movement"])) == 0
    text = capsys.readouterr().out
    assert "dp8: " in text
    assert "cost 24576 L + L^2" in text
    assert "1 windows of 1 cases, 4 peers: no peer beats auto within the limit; 0 fallbacks" in text
    assert plan.run(parser.parse_args([*few, "--json", "--parts", "quality"])) == 0
    assert json.loads(capsys.readouterr().out)["quality"][0]["fallbacks"] == 0
