"""The bounds that a resume must hold, measured; generous where a busy machine could disturb them."""

from __future__ import annotations

import argparse
import json

import pytest

from evenstep.bench import resume


@pytest.fixture(scope="module")
def result() -> dict[str, float]:
    return resume.measure(fast_forward=200_000, repeats=3)


def test_restore_at_1e11_of_1e12(result: dict[str, float]) -> None:
    assert result["position"] == 10**11
    assert result["samples"] == 10**12
    assert result["restore_seconds"] < 0.005
    assert result["restore_peak_bytes"] < 1_000_000
    assert result["state_bytes"] < 512


def test_fast_forward_takes_longer_already_over_a_fraction(result: dict[str, float]) -> None:
    assert result["fast_forward_ratio"] > 5
    assert result["fast_forward_scaled_seconds"] > 600


def test_permutation_throughput(result: dict[str, float]) -> None:
    assert result["permutation_per_second"] > 10e6


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    resume.add_arguments(parser)
    few = ["--samples", "100000", "--position", "5000", "--fast-forward", "100", "--repeats", "1"]
    assert resume.run(parser.parse_args(few)) == 0
    text = capsys.readouterr().out
    assert "restore at sample 5,000 of 100,000" in text
    assert "usable cores, python 3" in text
    assert resume.run(parser.parse_args([*few, "--json"])) == 0
    assert json.loads(capsys.readouterr().out)["fast_forward_items"] == 100


def test_a_position_past_the_end() -> None:
    with pytest.raises(
        ValueError, match=r"^no step is left at position 99500 of 100000 samples: restore earlier$"
    ):
        resume.measure(samples=100_000, position=99_500, repeats=1)
