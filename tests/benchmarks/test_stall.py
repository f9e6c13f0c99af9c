"""A loop whose data takes less time than its compute hardly waits; generous, since the machine may be busy."""

from __future__ import annotations

import argparse
import json

import pytest

from evenstep.bench import stall


def test_with_host_work_shorter_than_compute_the_loop_hardly_waits() -> None:
    result = stall.measure(compute_seconds=0.03, read_seconds=0.005, micro_batches=16)
    assert result["prefetch"]["stalled"] < 0.1
    assert result["no_prefetch"]["stalled"] > 2 * result["prefetch"]["stalled"]


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    stall.add_arguments(parser)
    few = ["--compute-ms", "1", "--read-ms", "0.1", "--micro-batches", "4", "--seq-len", "64"]
    assert stall.run(parser.parse_args(few)) == 0
    text = capsys.readouterr().out
    assert "4 micro-batches of one row of 64 tokens, 1 ms of compute, 0.1 ms to read a sample" in text
    assert "waiting for data" in text
    assert stall.run(parser.parse_args([*few, "--json"])) == 0
    assert json.loads(capsys.readouterr().out)["micro_batches"] == 4
