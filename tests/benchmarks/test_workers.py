"""The benchmark of workers: they share the work of one reader, in every graph and of either kind."""

from __future__ import annotations

import argparse
import json
import re

import pytest

from evenstep.bench import workers

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


def test_four_workers_take_a_fourth_of_the_time() -> None:
    # On a quiet machine each has more than 0.9 of it; a busy core may cost a good part.
    result = workers.measure(workers=4, steps=5, repeats=2)
    assert result["single_seconds_per_sample"] >= 0.008
    for graph in ("unknown", "known"):
        for kind in ("thread", "process"):
            found = result[graph][kind]
            assert 0.6 < found["best_of_workers"] < 1.5, (graph, kind)
            assert 0 < found["of_workers"] < 2
            assert 0 < found["first_batch_seconds"] < 60


def test_too_few_steps_are_refused() -> None:
    message = "steps=3, expected at least 4: 2 warm up, and the last is not counted"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        workers.measure(steps=3)


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    workers.add_arguments(parser)
    few = ["--workers", "2", "--read-ms", "0.2", "--steps", "4", "--repeats", "1"]
    assert workers.run(parser.parse_args(few)) == 0
    text = capsys.readouterr().out
    assert "0.2 ms to read a sample, steps of 64 samples; without workers " in text
    assert len(re.findall(r"\d\.\d\dx +\d+% +\d+% +\d+\.\d\d s", text)) == 4
    assert workers.run(parser.parse_args([*few, "--json"])) == 0
    assert set(json.loads(capsys.readouterr().out)["known"]) == {"thread", "process"}
