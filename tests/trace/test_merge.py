"""Files of several ranks become one, on one clock; what is no such file is refused by name."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.trace import merge
from evenstep.trace.picture import _lanes, draw, first_window, own_time, seen


def span(rank: int, begin: float, end: float, name: str = "pack") -> dict[str, Any]:
    return {"name": name, "ph": "X", "ts": begin, "dur": end - begin, "pid": rank, "tid": 7, "args": {}}


def write(path: Path, *events: dict[str, Any]) -> Path:
    path.write_text(json.dumps({"traceEvents": list(events)}))
    return path


def test_the_first_span_of_all_is_at_zero(tmp_path: Path) -> None:
    meta = {"name": "process_name", "ph": "M", "pid": 1, "tid": 0, "args": {"name": "rank 1"}}
    late = write(tmp_path / "rank-1.json", meta, span(1, 1007.5, 1009.5))
    early = write(tmp_path / "rank-0.json", span(0, 1002.0, 1003.0))
    (tmp_path / "timeline.json").write_text("not of a rank, so not looked at")
    expected = [span(0, 0.0, 1.0), meta, span(1, 5.5, 7.5)]
    assert merge([tmp_path]) == {"traceEvents": expected, "displayTimeUnit": "ms"}
    assert merge([early, str(late)]) == merge([tmp_path])


def test_two_files_of_one_rank(tmp_path: Path) -> None:
    one, two = (write(tmp_path / f"{name}.json", span(3, 0, 1)) for name in ("a", "b"))
    message = f"{one} and {two} are both of rank 3: spans of two runs would lie over each other. Merge the files of one run."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        merge([one, two])


def test_nothing_to_merge(tmp_path: Path) -> None:
    message = f"no spans in {tmp_path}: expected files of evenstep.Timeline, or a folder with its rank-*.json"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        merge([tmp_path])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[", "JSONDecodeError: Expecting value: line 1 column 2 (char 1)"),
        ("{}", "KeyError: 'traceEvents'"),
        ('{"traceEvents": [{"ph": "X"}]}', "KeyError: 'ts'"),
        ('{"traceEvents": [{"ph": "M", "pid": 0}]}', "KeyError: 'tid'"),
        ('{"traceEvents": [{"ph": "s"}]}', "KeyError: 's'"),
        ('{"traceEvents": [3]}', "TypeError: 'int' object is not subscriptable"),
    ],
)
def test_no_timeline(tmp_path: Path, text: str, reason: str) -> None:
    file = tmp_path / "other.json"
    file.write_text(text)
    message = f"{file} is no file of evenstep.Timeline ({reason}); traces of torch.profiler are opened as they are, in Perfetto"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        merge([file])


@st.composite
def nested(draw: st.DrawFn, low: int = 0, high: int = 60, depth: int = 3) -> list[tuple[str, float, float]]:
    """Spans, each inside or outside of each other one."""
    cuts = sorted(draw(st.lists(st.integers(low, high), max_size=6, unique=True)))
    spans: list[tuple[str, float, float]] = []
    for begin, end in zip(cuts[::2], cuts[1::2], strict=False):
        spans.append((f"{depth}.{begin}", begin, end))
        if depth:
            spans += draw(nested(begin, end, depth - 1))
    return spans


@given(nested())
def test_every_moment_belongs_to_the_innermost_span(spans: list[tuple[str, float, float]]) -> None:
    pieces = own_time(spans)
    assert all(begin < end for _, begin, end in pieces)
    assert all(a[2] <= b[1] for a, b in pairwise(pieces))
    for moment in range(60):
        now = moment + 0.5
        around = [span for span in spans if span[1] < now < span[2]]
        inner = max(around, key=lambda span: spans.index(span))[0] if around else None
        assert [name for name, begin, end in pieces if begin < now < end] == ([inner] if inner else [])


def test_the_picture_begins_with_the_first_whole_window() -> None:
    def span(name: str, begin: float, end: float, rank: int = 0) -> dict[str, Any]:
        return {"name": name, "ph": "X", "ts": begin, "dur": end - begin, "pid": rank, "tid": 1, "args": {}}

    spans = [
        span("wait", 0, 20),
        span("train", 20, 50),
        span("sampler", 32, 33, 1),
        span("sampler", 30, 31, 2),
    ]
    trace = {"traceEvents": spans}
    assert first_window(trace) == 30
    lanes, names = _lanes(trace, 30)
    assert lanes == {
        (0, True, 1): [("train", 0, 20)],
        (1, True, 1): [("sampler", 2, 3)],
        (2, True, 1): [("sampler", 0, 1)],
    }
    assert list(names) == list(lanes)
    without = {"traceEvents": spans[:2]}
    assert first_window(without) == 0
    assert _lanes(without, 0)[0] == {(0, True, 1): [("wait", 0, 20), ("train", 20, 50)]}


def test_stages_that_cannot_be_seen_are_none() -> None:
    long, short = ("train", 0.0, 2000.0), ("pin", 3.0, 3.9)
    assert seen([[long], [short]]) == {"train"}
    assert seen([[long], [("pin", 3.0, 4.0)]]) == {"train", "pin"}
    often = [("copy", 10.0 * k, 10.0 * k + 0.5) for k in range(200)]
    assert seen([[long], often[:39]]) == {"train"}
    assert seen([[long], often[:40]]) == {"train", "copy"}
    assert seen([[long], often[:20], often[20:40]]) == {"train"}  # it is a lane that must show it
    assert seen([]) == seen([[]]) == set()


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 10)), min_size=1))
def test_what_takes_longest_is_seen(spans: list[tuple[str, float]]) -> None:
    # A lane of three stages that is never idle: one of them has a third of it.
    pieces, now = [], 0.0
    for name, length in spans:
        pieces.append((name, now, now + length))
        now += length
    total = {name: sum(end - begin for other, begin, end in pieces if other == name) for name, _, _ in pieces}
    assert max(total, key=lambda name: total[name]) in seen([pieces])


def test_the_legend_names_what_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = pytest.importorskip("matplotlib.figure")
    legends: list[list[str]] = []

    def savefig(self: Any, _path: Path) -> None:
        legends.append([text.get_text() for text in self.axes[0].get_legend().get_texts()])

    monkeypatch.setattr(figure.Figure, "savefig", savefig)
    spans = [span(0, 0, 9000, "train"), span(1, 0, 4000, "pack"), span(1, 4000, 4001, "pin")]
    draw(tmp_path / "picture.png", {"traceEvents": spans})
    assert legends == [["pack", "train"]]
