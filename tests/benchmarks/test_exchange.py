"""The exchange benchmark measures what it says, and what it counts holds wherever it runs."""

from __future__ import annotations

import argparse
import json

import pytest

from evenstep.bench import exchange

pytestmark = pytest.mark.gloo

FEW = ["--ranks", "2", "--mib", "4", "--sample-kib", "128", "16", "--metadata", "2000", "--repeats", "3"]


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    exchange.add_arguments(parser)
    assert exchange.run(parser.parse_args([*FEW, "--json"])) == 0
    (result,) = json.loads(capsys.readouterr().out)
    assert [e["moved_bytes"] for e in result["exchanges"]] == [4 << 20, 4 << 20]
    for e in result["exchanges"]:
        # The figures themselves need a quiet machine; these bounds hold on any.
        assert e["of_raw_and_memcpy"] > 0.1
        assert e["times_faster_than_pickle"] > 1.5
        assert e["memory_per_byte"] <= 2.2
    counts = result["collectives"]
    assert counts["micro_batches"] == 4 * counts["windows"]
    assert counts["control_per_window"] <= 3
    assert counts["exchanges_per_micro_batch"] <= 1
    assert 0 < counts["exchanged_bytes"] < counts["read_bytes"]
    text = exchange.as_text(result)
    assert "2 ranks, 4 MiB sent by each" in text
    assert "3.00 control collectives" in text
