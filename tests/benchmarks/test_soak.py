"""A soak of seconds passes; wrong data, a leak and a thread too many do not."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evenstep.bench import soak
from evenstep.bench.soak import Look, judge
from evenstep.bench.soak_samples import SEQ_LEN, SoakSamples, digest_of, mix

QUIET = [Look(float(t), 300 << 20, 12, 3) for t in range(40)]


def run(*options: str) -> int:
    parser = argparse.ArgumentParser()
    soak.add_arguments(parser)
    return soak.run(parser.parse_args(["--ranks", "2", "--minutes", "0.03", "--pause-ms", "0", *options]))


@pytest.mark.gloo
def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    run("--json")
    result = json.loads(capsys.readouterr().out)
    for rank in result["ranks"]:
        assert rank["steps"] > 0
        assert rank["samples"] > 0
        assert rank["wrong_samples"] == rank["wrong_steps"] == 0
        assert rank["looks"][0]["memory"] > 0
        assert rank["verdict"]["threads_constant"], rank["verdict"]
    assert len({rank["steps"] for rank in result["ranks"]}) == 1


@pytest.mark.parametrize(
    ("broken", "failed"),
    [
        ({}, []),
        ({"wrong_samples": 1}, ["every sample and every step is right"]),
        ({"wrong_steps": 1}, ["every sample and every step is right"]),
        ({"samples": 0}, ["every sample and every step is right"]),
        (
            {"looks": [replace(one, memory=one.memory + (t << 20)) for t, one in enumerate(QUIET)]},
            ["memory is flat"],
        ),
        ({"looks": [*QUIET[:-1], replace(QUIET[-1], threads=13)]}, ["threads are constant"]),
    ],
)
def test_one_bad_rank_fails_the_run(
    broken: dict[str, Any],
    failed: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fine: dict[str, Any] = {
        "steps": 9,
        "samples": 99,
        "wrong_samples": 0,
        "wrong_steps": 0,
        "epochs": 1,
        "looks": QUIET,
    }
    ranks = [
        {**rank, "looks": [vars_of(one) for one in rank["looks"]]} for rank in (fine, {**fine, **broken})
    ]
    monkeypatch.setattr(soak, "run_ranks", lambda *_, **__: ranks)
    assert run() == (1 if failed else 0)
    text = capsys.readouterr().out
    assert [line.split("FAILED")[1].strip() for line in text.splitlines() if "FAILED" in line] == failed


def vars_of(one: Look) -> dict[str, float]:
    return {name: getattr(one, name) for name in Look.__slots__}


def test_what_happens_while_everything_is_met_for_the_first_time_is_no_leak() -> None:
    looks = [replace(one, memory=min(t, 9) << 24, threads=min(t, 9)) for t, one in enumerate(QUIET)]
    verdict = judge(looks)
    assert verdict["memory_flat"]
    assert verdict["threads_constant"]
    assert judge(QUIET[:1])["memory_flat"]


def test_samples_follow_from_their_index_and_every_byte_counts() -> None:
    dataset, again = SoakSamples(60, 3), SoakSamples(60, 3)
    digests = {digest_of(dataset[i]) for i in range(60)}
    assert digests == {digest_of(again[i]) for i in range(60)}
    assert len(digests) == 60
    assert digests.isdisjoint(digest_of(SoakSamples(60, 4)[i]) for i in range(60))
    assert max(len(dataset[i]["input_ids"]) for i in range(60)) <= SEQ_LEN
    for field, place in (("input_ids", -1), ("image", (2, 0, 63))):
        sample = dataset[30]
        sample[field][place] ^= 1
        assert digest_of(sample) not in digests
    assert digest_of({**dataset[30], "name": ""}) not in digests
    assert isinstance(dataset[30]["input_ids"], torch.Tensor)


@given(st.lists(st.integers(0, 1 << 40), max_size=8), st.lists(st.integers(0, 1 << 40), max_size=8))
def test_the_mix_of_a_set_is_its_own(one: list[int], other: list[int]) -> None:
    assert (mix(one) == mix(other)) == (sorted(one) == sorted(other))
    parts = sum(mix(np.array([index])) for index in one)
    assert soak._wrapped(parts) == mix(one)
