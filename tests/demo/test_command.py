from __future__ import annotations

import argparse
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from evenstep.cost import LinearQuadraticCost
from evenstep.demo import add_arguments, command, run
from evenstep.demo.compare import Comparison
from evenstep.demo.settings import Settings


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(words)


def test_defaults() -> None:
    args = parse()
    assert (args.ranks, args.corpus, args.quick, args.out) == (2, None, False, Path("evenstep-demo"))


@pytest.mark.parametrize("ranks", ["0", "-1", "two", "65"])
def test_ranks_that_are_none(ranks: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        parse(f"--ranks={ranks}")
    assert done.value.code == 2
    assert f"{ranks!r} is no number of ranks from 1 to 64" in capsys.readouterr().err


def test_a_missing_extra_is_named_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def find_spec(name: str) -> ModuleSpec | None:
        return None if name == "tokenizers" else ModuleSpec(name, None)

    monkeypatch.setattr(command, "find_spec", find_spec)
    assert run(parse(f"--out={tmp_path / 'out'}")) == 2
    captured = capsys.readouterr()
    assert captured.err == "evenstep demo needs tokenizers: pip install 'evenstep[cli]'\n"
    assert captured.out == ""
    assert not (tmp_path / "out").exists()


def test_a_corpus_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tokenizers")
    pytest.importorskip("matplotlib")
    assert run(parse(f"--corpus={tmp_path / 'no'}", f"--out={tmp_path / 'out'}")) == 2
    assert capsys.readouterr().err == (
        f"evenstep demo: the corpus {str(tmp_path / 'no')!r} is not a folder: nothing could be read; "
        "name one that exists\n"
    )


def test_a_corpus_that_is_too_small(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tokenizers")
    pytest.importorskip("matplotlib")
    (tmp_path / "text").mkdir()
    for number in range(40):
        (tmp_path / "text" / f"{number}.txt").write_text("some words\n" * 10)
    args = parse(f"--corpus={tmp_path / 'text'}", f"--out={tmp_path / 'out'}", "--quick", "--ranks=3")
    assert run(args) == 2
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1] == (
        "evenstep demo: the corpus fills 0 optimizer steps of 12 rows of 4,096 tokens, but 3 are trained; "
        "name more text with --corpus, or start fewer ranks"
    )
    assert "  documents          10\n" in captured.out


@pytest.mark.parametrize(
    ("ranks", "quick", "reason"),
    [
        (1, False, "one rank waits for nobody"),
        (2, True, "a quick run has too few steps"),
        (2, False, ""),
    ],
)
def test_when_the_clock_says_nothing(ranks: int, quick: bool, reason: str, tmp_path: Path) -> None:
    make = Settings.quick if quick else Settings
    assert command._why_not_timed(make(ranks=ranks, out=tmp_path)) == reason


def test_everything_that_is_left_on_disk_is_named() -> None:
    assert command._results(Settings(ranks=2, out=Path("there")), 61.7) == (
        "there/: balance.png, summary.json, ledger.jsonl, checkpoint.pt, lengths.npy, tokens/ (62 s)"
    )


def test_the_steps_after_the_stop_are_explained(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    comparison = Comparison(cost=LinearQuadraticCost(1.0, 1.0), reference=[], balanced=[], given_up=2)
    answers: dict[int, object] = {2: comparison, 4: []}
    monkeypatch.setattr(command, "launch", lambda ranks, *_: answers[ranks])
    command._train(Settings.quick(ranks=2, out=tmp_path))
    assert capsys.readouterr().out.endswith(
        "\nStopped after 2 of 4 micro-batches of step 2; going on with 4 ranks\n"
        "  (the same samples and losses as if it had never stopped, see below; more ranks share this machine, so that their "
        "seconds do not compare)\n"
    )
