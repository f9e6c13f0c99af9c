"""The demo's two launches on a tiny corpus, on ranks that start faster than the real ones."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import numpy as np
import pytest

from evenstep import cli
from evenstep.demo.checks import SpeedUp, check_losses
from evenstep.demo.command import _verdict
from evenstep.demo.compare import Comparison, compare
from evenstep.demo.records import StepRecord
from evenstep.demo.resume import audit, resume
from evenstep.demo.settings import Settings
from evenstep.demo.tables import predicted_again
from evenstep.testing import run_ranks

pytestmark = pytest.mark.gloo


def compare_on(rank: int, settings: Settings) -> Comparison | None:
    return compare(settings)


def resume_on(rank: int, settings: Settings, comparison: Comparison) -> list[StepRecord]:
    return resume(settings, comparison.cost)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    settings = Settings(
        ranks=2, out=tmp_path, seq_len=256, micro_batches=4, compared_steps=3, resumed_steps=2
    )
    settings.tokens.mkdir()
    generator = np.random.default_rng(0)
    lengths = np.minimum(generator.lognormal(4, 1.2, 300).astype(np.int64), 600)
    lengths[::40] = 0  # empty documents are in the order, too
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    np.save(settings.tokens / "offsets.npy", offsets)
    np.save(settings.tokens / "tokens.npy", generator.integers(0, 40, offsets[-1]).astype(np.uint16))
    meta = {"vocabulary": 40, "bytes": 100, "undecodable": 0}
    (settings.tokens / "meta.json").write_text(json.dumps(meta))
    return settings


def test_both_layouts_and_the_resumed_run_train_the_same_steps(
    settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    comparison, *others = run_ranks(compare_on, 2, settings)
    assert others == [None]
    assert comparison is not None
    assert [record.step for record in comparison.reference] == [0, 1, 2, 3, 4]
    assert [record.step for record in comparison.balanced] == [0, 1, 2]
    assert comparison.given_up == 2
    assert all(record.compute.shape == (4, 2) for record in comparison.balanced)
    resumed, *empty = run_ranks(resume_on, 4, settings, comparison)
    assert empty == [[], [], []]
    assert [record.step for record in resumed] == [3, 4]
    assert all(record.compute.shape == (2, 4) for record in resumed)
    assert check_losses("", comparison.reference[:3], comparison.balanced, "").passed
    assert check_losses("", comparison.reference[3:], resumed, "").passed
    assert audit(settings, [*comparison.balanced, *resumed]).exact
    for before, after in zip(comparison.reference, comparison.balanced, strict=False):
        assert after.makespan <= before.makespan
        assert after.tokens.sum() == before.tokens.sum()
        assert after.padding.sum() == before.padding.sum()
    checks = {check.name: check.passed for check in _verdict(settings, comparison, resumed)}
    assert list(checks) == ["promise", "speed_up", "same_loss", "same_loss_resumed", "ledger"]
    assert checks["same_loss"] is checks["same_loss_resumed"] is checks["ledger"] is True
    assert (settings.out / "ledger.jsonl").exists()
    assert capsys.readouterr().out.count("\n") == 6
    simulated_alike(settings, comparison, capsys)


def simulated_alike(settings: Settings, comparison: Comparison, capsys: pytest.CaptureFixture[str]) -> None:
    """The command that the demo prints predicts what the demo predicts."""
    np.save(settings.lengths, settings.dataset().store.lengths)
    told = predicted_again(settings, comparison.cost, comparison.reference, comparison.balanced)
    promised = SpeedUp.of(comparison.reference, comparison.balanced).predicted
    assert told.startswith(f"The {promised:.2f}x that is predicted is relative to greedy rows: ")
    program, *words = shlex.split(told.splitlines()[-1])
    assert program == "evenstep"
    assert cli.main([*words, "--quiet", "--json"]) == 0
    baseline, balanced = json.loads(capsys.readouterr().out)["outcomes"]
    assert (baseline["layout"], balanced["layout"], balanced["steps"]) == ("greedy rows", "auto", 3)
    assert balanced["speedup"] == pytest.approx(promised, rel=1e-4)
