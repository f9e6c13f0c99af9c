from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from evenstep.cost import LinearQuadraticCost
from evenstep.demo.records import StepRecord
from evenstep.demo.tables import corpus_table, print_busy, print_heading, print_pair, print_resumed
from evenstep.demo.tokens import TokenStore, split_documents


def test_corpus_table() -> None:
    lengths = [0, 5, 1000, 2500, 0, 1]
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    store = TokenStore(np.zeros(offsets[-1], dtype=np.uint16), offsets, 3072, 14024, 3)
    assert corpus_table(split_documents(store, 1000), 1000) == (
        "  documents          6\n"
        "  tokens             3,506 (4.00 bytes each, vocabulary 3,072)\n"
        "  tokens a document  median 1, 90% 1,000, 99% 1,000, longest 2,500\n"
        "  dropped            2 empty documents\n"
        "  split              1 documents longer than a row of 1,000 tokens, into 3 pieces\n"
        "  samples            6\n"
        "  undecodable bytes  3, each read as U+FFFD"
    )


def test_lines_of_a_step(make_record: Callable[..., StepRecord], capsys: pytest.CaptureFixture[str]) -> None:
    print_heading(LinearQuadraticCost(5e-5, 1e-8))
    before = make_record([[1, 3]], step=3, seconds=3.0, loss=8.5, samples=[[{1: 75}, {2: 75}]])
    after = make_record([[2, 2]], step=3, seconds=2.0, loss=8.5, samples=[[{2: 75}, {1: 75}]])
    print_pair(before, after)
    print_resumed(after)
    assert capsys.readouterr().out == (
        "  measured cost: 50.0 us a token + 10.00 ns a pair of tokens in a document (equal at 5,000 tokens)\n"
        "\n"
        "                                    efficiency               moved\n"
        "step  layout     seconds  tokens/s  predicted   measured   tokens  padding      loss\n"
        "   3  reference     3.00        50      0.667      0.667        -    25.0%   8.50000\n"
        "   3  balanced      2.00        75      1.000      1.000   100.0%    25.0%   8.50000\n"
        "   3  2 ranks       2.00        75      1.000      1.000        -    25.0%   8.50000\n"
    )


def test_a_step_that_gains_without_moving_says_how(
    make_record: Callable[..., StepRecord], capsys: pytest.CaptureFixture[str]
) -> None:
    before = make_record([[1, 3], [3, 1]], samples=[[{1: 25}, {2: 75}], [{3: 75}, {4: 25}]])
    after = make_record([[3, 3], [1, 1]], samples=[[{3: 75}, {2: 75}], [{1: 25}, {4: 25}]])
    print_pair(before, before)
    assert "nothing moved" not in capsys.readouterr().out
    print_pair(before, after)
    _, balanced, told = capsys.readouterr().out.splitlines()
    assert balanced.split()[6] == "0.0%"
    assert told == "      (nothing moved between ranks: each put its own samples into other micro-batches)"


def test_a_busy_machine_is_told_beside_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    print_busy(0.9)
    assert capsys.readouterr().out == ""
    print_busy(0.62)
    assert capsys.readouterr().out == (
        "  this machine is busy: each rank had only 62% of a core, so that seconds and tokens/s measure other programs "
        "too; processor time decides\n"
    )
