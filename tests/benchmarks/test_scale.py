"""The study of scale counts what plans and columns really hold, and its rule follows from its figures."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evenstep.bench import scale
from evenstep.bench.scale_network import Network
from evenstep.bench.scale_windows import SEQ_LEN, Step


@pytest.fixture(scope="module")
def step() -> Step:
    return Step.draw(16, 4, seed=0)


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return scale.measure(dp_sizes=(4, 16), groups=(4, 8), micro_batches=2)


def test_rows_of_a_step_are_greedy_and_hold_their_capacity(step: Step) -> None:
    filled = np.bincount(step.rows, step.tokens, minlength=64)
    assert len(filled) == 64
    assert filled.max() <= SEQ_LEN
    first = step.tokens[np.searchsorted(step.rows, np.arange(1, 64))]
    assert (filled[:-1] + first > SEQ_LEN).all()  # the next document did not fit any more


def test_windows_of_groups_are_parts_of_the_step(step: Step) -> None:
    groups = list(step.windows(4, 16))
    assert np.array_equal(np.concatenate([group.tokens for group in groups]), step.tokens)
    (whole,) = step.windows(16, 16)
    loads = np.concatenate([group.reference_loads for group in groups], axis=1)
    assert np.array_equal(loads, whole.reference_loads)
    smaller = next(Step.draw(8, 4, seed=0).windows(8, 8))
    assert np.array_equal(smaller.tokens, np.concatenate([group.tokens for group in groups[:2]]))


def test_traffic_is_that_of_the_plan(step: Step) -> None:
    window = next(step.windows(8, 16))
    traffic = window.plan("auto").traffic
    moved = traffic.moved_share * window.tokens.sum() * 8
    assert moved < traffic.sent.sum() < 1.1 * moved + 1e5  # bytes of the tokens, and a head for each segment
    assert traffic.busiest.sum() <= traffic.sent.sum()
    assert traffic.busiest.max() <= traffic.buffers <= 2 * traffic.busiest.max()
    assert 0 < traffic.peers <= 7


def test_columns_are_those_that_ranks_gather(step: Step) -> None:
    window = next(step.windows(4, 16))
    columns = window.columns()
    assert [len(part) for part in columns] == np.bincount(window.holders, minlength=4).tolist()
    assert sum(part.packed_bytes for part in columns) == 52 * len(window.tokens)
    assert window.merge_seconds(columns) > 0


def test_messages_and_bytes_of_the_model() -> None:
    messages, nbytes = Network(alpha=1.0, beta=0.0), Network(alpha=0.0, beta=1.0)
    assert messages.all_gather(8, 5) == messages.all_to_all(8, 5) == 7
    assert messages.broadcast(8, 5) == 3
    assert nbytes.all_gather(8, 5) == 35
    assert nbytes.broadcast(8, 5) == 15
    assert nbytes.all_to_all(8, 5) == 5


def test_groups_are_beside_the_whole(result: dict[str, Any]) -> None:
    small, large = result["jobs"]
    assert [(way["group"], way["algorithm"]) for way in small["ways"]] == [(4, "auto"), (4, "lpt")]
    assert [way["group"] for way in large["ways"]] == [16, 16, 8, 4]
    for job in result["jobs"]:
        for way in job["ways"]:
            assert 1 <= way["imbalance"] <= job["unbalanced"]
            assert way["data_seconds"] >= way["plan_seconds"]
            assert way["memory_bytes"] > way["gathered_bytes"] >= way["group"] * way["column_bytes"]
            assert way["step_seconds"] >= way["step_seconds_apart"] >= 10 * way["imbalance"]
        assert job["ways"][job["best"]]["step_seconds"] == min(way["step_seconds"] for way in job["ways"])


def test_a_slow_network_makes_groups_begin_earlier(result: dict[str, Any]) -> None:
    assert result["groups_begin_apart"] is None
    slow = scale.measure(dp_sizes=(4, 16), groups=(4, 8), micro_batches=2, alpha=1.0)
    assert slow["groups_begin_apart"] == 16


def test_what_takes_too_long_is_extrapolated_and_never_chosen() -> None:
    few = scale.measure(dp_sizes=(4, 16), groups=(4,), micro_batches=2, limit=1e-9)
    first, second = few["planning"]
    assert first["extrapolated"] == []
    assert second["extrapolated"] == ["lpt", "refine", "auto"]
    assert second["imbalance"]["auto"] is None
    growth = (second["samples"] / first["samples"]) ** 1.2
    assert second["seconds"]["auto"] == pytest.approx(first["seconds"]["auto"] * growth)
    assert [way["group"] for way in few["jobs"][1]["ways"]] == [16, 4]
    assert "~" in scale.as_text(few)


def arguments(*options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    scale.add_arguments(parser)
    return parser.parse_args(["--dp-sizes", "4", "8", "--groups", "4", "--micro-batches", "1", *options])


def test_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert scale.run(arguments()) == 0
    text = capsys.readouterr().out
    assert "a step of 1 micro-batches a rank, rows of 32,768 tokens" in text
    assert re.search(
        r"^Groups begin (at 8 ranks|never, up to here), where the least step", text, re.MULTILINE
    )
    assert max(map(len, text.splitlines())) <= 130
    pytest.importorskip("matplotlib")
    picture = tmp_path / "scale.png"
    assert scale.run(arguments("--json", "--plot", str(picture))) == 0
    assert [job["dp_size"] for job in json.loads(capsys.readouterr().out)["jobs"]] == [4, 8]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_picture_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scale, "find_spec", lambda _: None)
    assert scale.run(arguments("--plot", "scale.png")) == 2
    assert capsys.readouterr().err == (
        "evenstep bench scale: --plot draws with matplotlib: pip install 'evenstep[cli]'\n"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--groups", "3"], "4 ranks are no whole number of groups of 3: leave one of them out"),
        (["--groups", "1"], "--groups has 1: a group needs at least 2 ranks"),
        (["--dp-sizes", "1"], "--dp-sizes has 1: there is nothing to balance; give at least 2 ranks"),
    ],
)
def test_what_cannot_be_studied(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert scale.run(arguments(*options)) == 2
    assert capsys.readouterr().err == f"evenstep bench scale: {message}\n"
