"""The exchange benchmark measures what it says, and what it counts holds wherever it runs."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np
import pytest
import torch

from evenstep.bench import exchange
from evenstep.bench.turns import Turns
from evenstep.comm.communicator import SoloCommunicator

pytestmark = pytest.mark.gloo

FEW = ["--ranks", "2", "--mib", "4", "--sample-kib", "128", "16", "--metadata", "2000", "--repeats", "3"]


def _run(capsys: pytest.CaptureFixture[str], *options: str) -> Any:
    parser = argparse.ArgumentParser()
    exchange.add_arguments(parser)
    assert exchange.run(parser.parse_args([*FEW, "--json", *options])) == 0
    (result,) = json.loads(capsys.readouterr().out)
    return result


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    result = _run(capsys)
    assert [e["moved_bytes"] for e in result["exchanges"]] == [4 << 20, 4 << 20]
    for e in result["exchanges"]:
        # The figures themselves need a quiet machine; these bounds hold on any.
        assert 0.1 < e["wire_of_both"] < 3
        assert 0.1 < e["wire_of_torch"] < 3
        assert 0.1 < e["of_sum"] < 20
        assert e["times_faster_than_pickle"] > 1.5
        assert e["memory_per_byte"] <= 2.2
    counts = result["collectives"]
    assert counts["micro_batches"] == 4 * counts["windows"]
    assert counts["control_per_window"] <= 3
    assert counts["exchanges_per_micro_batch"] <= 1
    assert 0 < counts["exchanged_bytes"] < counts["read_bytes"]
    text = exchange.as_text(result)
    assert [line.split()[:4] for line in text.splitlines()[4:6]] == [
        ["128", "KiB", "4.0", "MiB"],
        ["16", "KiB", "4.0", "MiB"],
    ]
    assert "3.00 control collectives" in text


def test_one_exchange_whose_samples_are_all_checked(capsys: pytest.CaptureFixture[str]) -> None:
    """With ``--huge-gib 2.2`` it takes several collectives and 10 GiB, so that is run by hand."""
    huge = _run(capsys, "--huge-gib", "0.02")["huge"]
    assert huge["samples"] == 20
    assert huge["moved_bytes"] == 20 << 20
    text = exchange.as_text(
        {
            "machine": {"processor": "p", "cores": 2},
            "huge": {**huge, "moved_bytes": 11 << 28, "seconds": 2.0, "memory_per_byte": 2.0},
        }
    )
    assert text.endswith(
        "2 ranks, 2.75 GiB sent by each in 2.00 s (1.38 GiB/s) over the wire: all 20 samples that rank 0 received are right; 2.00 bytes of memory a byte"
    )


def test_a_turn_takes_the_mean_of_runs_in_a_row() -> None:
    ran: list[str] = []

    def contender(name: str, seconds: float) -> None:
        time.sleep(seconds)
        ran.append(name)

    turns = Turns.take(
        SoloCommunicator(), 3, 2, a=lambda: contender("a", 0.01), b=lambda: contender("b", 0.03)
    )
    assert ran == ["a", "a", "b", "b"] * 4
    assert turns.names == ("a", "b")
    assert turns.times.shape == (3, 2)
    seconds = turns.seconds()
    assert 0.008 < seconds["a"] < seconds["b"]
    assert seconds["b"] > 0.028
    # Of the same turn, then the median over the turns.
    known = Turns(("a", "b", "c"), np.array([[1.0, 2.0, 4.0], [2.0, 1.0, 1.0], [1.0, 1.0, 4.0]]))
    assert known.ratio("a", "b", to="c") == 0.75


def test_meeting_is_no_part_of_the_time() -> None:
    class Slow(SoloCommunicator):
        def all_gather(self, row: torch.Tensor) -> torch.Tensor:
            time.sleep(0.02)
            return super().all_gather(row)

    turns = Turns.take(Slow(), 3, 1, a=lambda: time.sleep(0.01))
    assert 0.008 < turns.seconds()["a"] < 0.03
