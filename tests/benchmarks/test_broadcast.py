"""The benchmark of the broadcast, on sizes small enough for a test; bounds generous for a busy machine."""

from __future__ import annotations

import argparse
import json

import pytest

from evenstep.bench import broadcast

pytestmark = pytest.mark.gloo


def test_small_tensors_travel_together() -> None:
    result = broadcast.measure(kib=(24,), repeats=20)
    found = result["sizes"]["24"]
    assert found["each_to_batch"] > 1.2
    assert min(found["batch_seconds"], found["raw_seconds"], found["to_raw"], found["wire_to_joined"]) > 0


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    broadcast.add_arguments(parser)
    few = ["--ranks", "3", "--kib", "12", "--repeats", "2"]
    assert broadcast.run(parser.parse_args(few)) == 0
    text = capsys.readouterr().out
    assert "3 ranks over gloo, batches of 12 tensors, median of 2" in text
    assert broadcast.run(parser.parse_args([*few, "--json"])) == 0
    assert list(json.loads(capsys.readouterr().out)["sizes"]) == ["12"]
