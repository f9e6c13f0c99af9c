"""A loop whose data takes less time than its compute hardly waits, whoever starts the collectives.

Generous, since the machine may be busy.
"""

from __future__ import annotations

import argparse
import json

import pytest

from evenstep.bench import stall

pytestmark = pytest.mark.gloo


def test_with_host_work_shorter_than_compute_the_loop_hardly_waits() -> None:
    result = stall.measure(compute_seconds=0.03, read_seconds=0.005, micro_batches=16)
    for way in ("prefetch", "caller"):
        assert result[way]["median_seconds"] < 0.1 * result["compute_seconds"]
        assert result["no_prefetch"]["stalled"] > result[way]["stalled"]
    assert result["prefetch"]["hook_seconds"] == 0 < result["caller"]["hook_seconds"]
    assert result["caller"]["worker_cpu_seconds"] > 0
    assert 0 < result["pass_through_seconds"] < 1e-4


def test_one_rank_has_no_collectives_to_wait_for() -> None:
    result = stall.measure(ranks=1, compute_seconds=0.005, read_seconds=0.001, micro_batches=8, seq_len=64)
    assert result["prefetch"]["stalled"] < result["no_prefetch"]["stalled"]


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    stall.add_arguments(parser)
    few = ["--compute-ms", "1", "--read-ms", "0.1", "--micro-batches", "4", "--seq-len", "64"]
    assert stall.run(parser.parse_args(few)) == 0
    text = capsys.readouterr().out
    assert (
        "2 ranks over gloo, 4 micro-batches of one row of 64 tokens, 1 ms of compute, 0.1 ms to read" in text
    )
    assert [line.split("  ")[1] for line in text.splitlines()[4:8]] == [
        "producer thread",
        "caller, with hooks",
        "caller, without hooks",
        "no prefetch",
    ]
    assert stall.run(parser.parse_args([*few, "--json"])) == 0
    assert json.loads(capsys.readouterr().out)["micro_batches"] == 4
