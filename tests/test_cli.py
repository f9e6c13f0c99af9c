from __future__ import annotations

import argparse
import subprocess
import sys
from types import ModuleType

import pytest

import evenstep
from evenstep import cli


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"evenstep {evenstep.__version__}\n"


@pytest.mark.parametrize("words", [[], ["bench"]])
def test_without_a_command_it_shows_the_help(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    assert capsys.readouterr().out.startswith(" ".join(["usage: evenstep", *words, "[-h]"]))


def test_an_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["dance"]) == 2
    assert "invalid choice: 'dance'" in capsys.readouterr().err


def helps() -> list[list[str]]:
    benches = [["bench", name] for name in [*cli.BENCHES, "all"]]
    return [[], *([name] for name in cli.COMMANDS), *benches]


def test_every_help_answers_without_torch() -> None:
    program = f"""
import sys
from evenstep import cli
for words in {helps()}:
    assert cli.main([*words, "--help"]) == 0
    heavy = sorted({{"torch", "torchdata", "matplotlib", "tokenizers"}} & sys.modules.keys())
    assert not heavy, (words, heavy)
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env=_environment(),
    )
    assert (done.returncode, done.stderr) == (0, "")
    for words in helps():
        assert f"usage: {' '.join(['evenstep', *words])} " in done.stdout
    lines = done.stdout.splitlines()
    for command in cli.COMMANDS:
        assert any(line.split()[:1] == [command] for line in lines)


def test_the_package_runs_as_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "evenstep", "--version"],
        capture_output=True,
        text=True,
        check=False,
        env=_environment(),
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, f"evenstep {evenstep.__version__}\n", "")


def test_each_command_has_its_own_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "--help"]) == 0
    assert "--quick" in capsys.readouterr().out
    assert cli.main(["simulate", "--help"]) == 0
    assert "--dp-sizes" in capsys.readouterr().out
    assert cli.main(["bench", "plan", "--help"]) == 0
    assert "--draws" in capsys.readouterr().out


def _fake(code: int, log: list[argparse.Namespace]) -> ModuleType:
    module = ModuleType("fake")

    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--size", type=int, default=3)

    def run(args: argparse.Namespace) -> int:
        log.append(args)
        return code

    vars(module).update(add_arguments=add_arguments, run=run)
    return module


def test_options_reach_the_command_and_its_code_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[argparse.Namespace] = []
    monkeypatch.setattr(cli, "import_module", lambda _: _fake(7, log))
    assert cli.main(["demo", "--size", "5"]) == 7
    assert [args.size for args in log] == [5]


def test_all_benchmarks_run_and_the_worst_code_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[argparse.Namespace] = []
    codes = iter([0, 1, 0])
    monkeypatch.setattr(cli, "BENCHES", {"plan": "", "resume": "", "nosuch": "", "pack": ""})
    monkeypatch.setattr(cli, "import_module", lambda _: _fake(next(codes), log))
    monkeypatch.setattr(cli, "_sentence", lambda text: text)
    assert cli.main(["bench", "all"]) == 1
    assert [args.size for args in log] == [3, 3, 3]


def test_ctrl_c(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(_: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    module = _fake(0, [])
    vars(module)["run"] = interrupt
    monkeypatch.setattr(cli, "import_module", lambda _: module)
    assert cli.main(["demo"]) == 130
    assert capsys.readouterr().err == "evenstep: interrupted\n"


def _environment() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
