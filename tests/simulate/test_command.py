"""The command: what it prints, what it writes, and how it fails."""

from __future__ import annotations

import argparse
import base64
import json
import re
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from evenstep.progress import terminal_progress
from evenstep.simulate import Simulation, add_arguments, run
from evenstep.simulate.figures import draw_efficiency, draw_lengths, draw_step
from evenstep.simulate.summary import HEADER, as_text, headlines

Lengths = npt.NDArray[np.int64]
PNG = b"\x89PNG\r\n\x1a\n"
QUICK = ["--seq-len", "2048", "--dp-sizes", "4", "--windows", "1", "2", "--algorithms", "lpt", "--steps", "2"]


def command(*arguments: object) -> int:
    parser = argparse.ArgumentParser(prog="evenstep simulate")
    add_arguments(parser)
    return run(parser.parse_args([str(argument) for argument in arguments]))


@pytest.fixture
def file(tmp_path: Path, lengths: Lengths) -> Path:
    path = tmp_path / "docs.npy"
    np.save(path, lengths)
    return path


def test_table_and_settings_are_printed(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(file, *QUICK) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    lines = printed.out.splitlines()
    assert lines[1] == (
        "2 micro-batches of 1 row(s) a rank and step; ranks wait for each other once per micro-batch"
    )
    assert lines[2] == "cost LinearQuadraticCost(a=24576.0, b=1.0, padding=0.0)"
    head = next(number for number, line in enumerate(lines) if line.split()[:1] == ["ranks"])
    assert lines[head].split() == " ".join(HEADER).split()
    assert [line.split()[1] for line in lines[head + 2 : head + 6]] == ["shuffled", "sampler's", "lpt", "lpt"]
    assert re.search(r"4 ranks: \d\.\d\dx faster steps with 'lpt' over windows of \d micro-batch", lines[-1])
    assert re.search(
        r" than the shuffled rows \(\d\.\d\dx than the sampler's rows\): ranks do useful work ", lines[-1]
    )
    assert "sampled over an epoch (shuffled, seed 0): 2 steps at 4 ranks" in lines


def test_greedy_rows_are_explained(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        command(file, *QUICK, "--reference", "greedy", "--consecutive", "--out", file.with_name("r.html"))
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert "sampled from the beginning of an epoch (shuffled, seed 0): 2 steps at 4 ranks" in lines
    assert sum(line.startswith("greedy rows: what speed-ups are relative to. ") for line in lines) == 1
    assert re.search(
        r" over windows of \d micro-batch(es)? than the greedy rows: ranks do useful work ", lines[-1]
    )


def test_json_has_everything(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(file, *QUICK, "--json", "--cost", "100,2", "--padded", "--sync", "step") == 0
    outcome = json.loads(capsys.readouterr().out)
    assert outcome["settings"]["cost"] == "LinearQuadraticCost(a=100.0, b=2.0, padding=100.0)"
    assert outcome["settings"]["sync"] == "step"
    assert [(o["layout"], o["window"]) for o in outcome["outcomes"]] == [
        ("shuffled rows", 0),
        ("sampler's rows", 0),
        ("lpt", 1),
        ("lpt", 2),
    ]
    assert outcome["best"]["4"] in outcome["outcomes"]


def test_a_model_is_a_cost(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = "hidden=64,layers=2,ffn=128,vocab=100,causal=false,attention=eager"
    assert command(file, *QUICK, "--json", "--model", model, "--padded") == 0
    assert json.loads(capsys.readouterr().out)["settings"]["cost"] == (
        "TransformerCost(hidden=64, layers=2, ffn=128, vocab=100, causal=False, attention='eager', padded=True)"
    )


def test_report_is_one_file_that_needs_nothing(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = file.with_name("report.html")
    assert command(file, *QUICK, "--out", out) == 0
    pictures = [file.with_name(f"report-{name}.png") for name in ("efficiency", "step", "lengths")]
    assert capsys.readouterr().err == f"wrote {', '.join(map(str, [out, *pictures]))}\n"
    page = out.read_text(encoding="utf-8")
    embedded = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    assert {base64.b64decode(data) for data in embedded} == {path.read_bytes() for path in pictures}
    assert all(path.read_bytes().startswith(PNG) for path in pictures)
    assert page.count("src=") == len(embedded) == 3
    assert "http" not in page
    assert page.count("<tr") == 1 + 4
    assert page.count('class="best"') == 1


def test_png_alone(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(file, *QUICK, "--out", file.with_name("gain.png")) == 0
    names = sorted(path.name for path in file.parent.iterdir())
    assert names == ["docs.npy", "gain-efficiency.png", "gain-lengths.png", "gain-step.png"]


def test_markup_in_a_file_name_stays_text(tmp_path: Path, lengths: Lengths) -> None:
    path = tmp_path / "<b>.npy"
    np.save(path, lengths)
    assert command(path, *QUICK, "--quiet", "--out", tmp_path / "report.html") == 0
    assert "<h1>evenstep simulate: &lt;b&gt;.npy</h1>" in (tmp_path / "report.html").read_text()


def test_step_is_drawn_to_scale(simulation: Simulation) -> None:
    picture = simulation.picture
    before, after = draw_step(picture).axes
    even = picture.before.sum() / picture.dp_size
    for panel, loads in ((before, picture.before), (after, picture.after)):
        span = loads.max(axis=1).sum() / even
        edges = [patch.get_x() + patch.get_width() for patch in panel.patches]  # type: ignore[attr-defined]
        assert max(edges) == pytest.approx(span)
        assert sum(patch.get_width() for patch in panel.patches) == pytest.approx(span * picture.dp_size)  # type: ignore[attr-defined]
        assert panel.get_title(loc="left").endswith(f"takes {span:.2f}")


def test_a_step_that_waits_once_is_drawn_without_gaps(simulation: Simulation) -> None:
    from dataclasses import replace

    picture = replace(simulation.picture, sync="step")
    before = draw_step(picture).axes[0]
    even = picture.before.sum() / picture.dp_size
    edges = [patch.get_x() + patch.get_width() for patch in before.patches]  # type: ignore[attr-defined]
    assert max(edges) == pytest.approx(picture.before.sum(axis=0).max() / even)


def test_efficiency_has_a_panel_per_dp_size(simulation: Simulation) -> None:
    panels = draw_efficiency(simulation).axes
    assert [panel.get_title(loc="left") for panel in panels] == ["2 ranks", "4 ranks"]
    drawn = {str(line.get_label()): np.asarray(line.get_ydata()).tolist() for line in panels[1].lines}
    for algorithm in ("lpt", "auto"):
        expected = [o.efficiency for o in simulation.outcomes if (o.dp_size, o.layout) == (4, algorithm)]
        assert drawn[algorithm] == expected


def test_lengths_are_shares_that_sum_to_one(lengths: Lengths) -> None:
    panel = draw_lengths(lengths, 2048).axes[0]
    by_label = {str(line.get_label()): np.asarray(line.get_ydata(), dtype=np.float64) for line in panel.lines}
    assert by_label["share of the documents"].sum() == pytest.approx(1)
    assert by_label["share of the tokens"].sum() == pytest.approx(1)


def test_skipped_ranks_are_in_the_text(simulation: Simulation) -> None:
    assert headlines(simulation)[-1] == simulation.skipped[0]
    assert as_text(simulation).endswith(simulation.skipped[0])


def test_what_happens_to_longer_documents_is_said(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(file, np.append(np.full(64, 2000), [5000]))
    for treatment, told in (("truncate", "cut to it"), ("split", "split into pieces"), ("drop", "left out")):
        assert command(file, *QUICK, "--oversized", treatment) == 0
        line = f"1 documents are longer than a row: {told} (--oversized {treatment})"
        assert line in capsys.readouterr().out.splitlines()


def test_where_nothing_is_gained_it_is_said(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(file, np.full(64, 2048))
    assert command(file, *QUICK) == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        "4 ranks: no gain (1.00x) with 'lpt' over windows of 1 micro-batch, compared with the shuffled rows (1.00x than the "
        "sampler's rows): ranks do useful work 100.0% of the time instead of 100.0%."
    )


BAD: list[tuple[list[str], str]] = [
    (["--out", "report.pdf"], "--out report.pdf ends with '.pdf': a report is written as .html or .png"),
    (["--cost", "7"], "--cost 7 is not A,B: two numbers, such as 24576,1"),
    (["--cost", "7,x"], "--cost 7,x is not A,B: two numbers, such as 24576,1"),
    (["--cost", "7,-1"], "b is -1.0: samples would get a cost that cannot be balanced; "
     "give a finite number that is not negative"),
    (["--model", "hidden=8"], "--model needs layers, ffn, vocab as well, such as hidden=4096,layers=32,..."),
    (["--model", "hidden=8,layers=1,ffn=x,vocab=1"], "ffn is 'x' (str), expected an integer"),
    (["--windows", "4", "--accumulation-steps", "2"], "no window of (4,) fits into a step of 2 micro-batches: "
     "a window never crosses an optimizer step"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[" ".join(arguments) for arguments, _ in BAD])
def test_bad_arguments_end_with_one_line(
    file: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert command(file, *QUICK, *arguments) == 2
    assert capsys.readouterr() == ("", f"evenstep simulate: {message}\n")


def test_unknown_dimension_lists_the_known(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(file, *QUICK, "--model", "width=3") == 2
    assert capsys.readouterr().err.startswith(
        "evenstep simulate: --model has no 'width'; it knows hidden, layers,"
    )


def test_missing_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(tmp_path / "no.npy") == 2
    assert capsys.readouterr().err == (
        f"evenstep simulate: No such file: {tmp_path / 'no.npy'}; `evenstep lengths MODULE:NAME -o lengths.npy` writes the "
        "lengths of a dataset\n"
    )


def test_without_matplotlib_only_the_report_is_missing(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert command(file, *QUICK, "--out", "report.html") == 2
    assert capsys.readouterr().err == (
        "evenstep simulate: --out draws with matplotlib, which is not installed; pip install 'evenstep[cli]', "
        "or leave --out away for the table alone\n"
    )
    assert command(file, *QUICK) == 0


def test_without_tqdm_there_is_no_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with terminal_progress("reading", 3) as advance:
        advance(3)
    assert capsys.readouterr() == ("", "")


def test_a_terminal_sees_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with terminal_progress("reading", 3) as advance:
        advance(3)
    assert "reading" in capsys.readouterr().err


def test_what_is_assumed_is_told_and_a_single_step_is_a_warning(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assumed = "  assumed: a dense transformer of width 4096; give yours with --model or --cost"
    warning = (
        "warning: a single step was sampled at 4 ranks, and another may gain more or less; more documents, --steps or "
        "--seconds sample more"
    )
    for arguments, expected in (
        ([*QUICK], [assumed]),
        ([*QUICK[:-1], "1"], [assumed, warning]),
        ([*QUICK, "--cost", "10,1"], []),
    ):
        assert command(file, *arguments) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line for line in lines if line in (assumed, warning)] == expected


def test_every_option_with_a_default_tells_it() -> None:
    parser = argparse.ArgumentParser(prog="evenstep simulate")
    add_arguments(parser)
    silent = [
        action.option_strings
        for action in parser._actions
        if action.option_strings
        and action.default not in (None, False, argparse.SUPPRESS)
        and "(default: " not in (action.help or "")
    ]
    assert not silent
