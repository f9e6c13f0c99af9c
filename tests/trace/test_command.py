"""``evenstep trace`` records a small job or merges files, and refuses before the work."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from evenstep import cli


@pytest.mark.gloo
def test_the_small_job_on_two_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, picture = tmp_path / "new" / "timeline.json", tmp_path / "timeline.png"
    assert cli.main(["trace", "--steps", "2", "--out", str(out), "--picture", str(picture)]) == 0
    events = [event for event in json.loads(out.read_text())["traceEvents"] if event["ph"] == "X"]
    assert capsys.readouterr().out == (
        f"wrote {out} and {picture}: {len(events)} spans of 2 ranks; open it in https://ui.perfetto.dev or "
        "chrome://tracing\n"
    )
    assert min(event["ts"] for event in events) == 0
    for rank in range(2):
        names = {event["name"] for event in events if event["pid"] == rank}
        assert {"train", "gradients", "wait", "copy", "broadcast", "read", "gather"} <= names
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_files_are_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 1):
        span = {"name": "pack", "ph": "X", "ts": 10 + rank, "dur": 1, "pid": rank, "tid": 7, "args": {}}
        (tmp_path / f"rank-{rank}.json").write_text(json.dumps({"traceEvents": [span]}))
    out = tmp_path / "all.json"
    assert cli.main(["trace", str(tmp_path), "--out", str(out)]) == 0
    assert [event["ts"] for event in json.loads(out.read_text())["traceEvents"]] == [0, 1]
    assert capsys.readouterr().out.startswith(f"wrote {out}: 2 spans of 2 ranks; ")
    assert cli.main(["trace", str(tmp_path / "rank-1.json"), "--out", str(out)]) == 0
    assert capsys.readouterr().out.startswith(f"wrote {out}: 1 spans of 1 rank; ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks", "0"], "--ranks 0: at least 1 is needed"),
        (["--steps", "-1"], "--steps -1: at least 1 is needed"),
        (["--picture", "t.gif"], "--picture t.gif ends with '.gif', expected .png, .svg or .pdf"),
        (
            ["nosuch.json"],
            "there is no file or folder nosuch.json in HERE: name files that evenstep.Timeline wrote, or the folder with "
            "its rank-*.json",
        ),
        (
            ["/no/such"],
            "there is no file or folder /no/such: name files that evenstep.Timeline wrote, or the folder with its "
            "rank-*.json",
        ),
    ],
)
def test_refusals(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["trace", *words]) == 2
    assert capsys.readouterr().err == f"evenstep trace: {message.replace('HERE', str(Path.cwd()))}\n"
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["trace", "--picture", "t.png"]) == 2
    assert capsys.readouterr().err == (
        "evenstep trace: --picture draws with matplotlib, which is not installed; pip install 'evenstep[cli]', or leave "
        "--picture away for the file alone\n"
    )
