"""The harness itself, on real processes: what travels, what a rank inherits, and what is refused."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from evenstep.testing.ranks import Outcome, run_ranks, run_ranks_outcomes

pytestmark = pytest.mark.gloo


@dataclass(frozen=True)
class Parcel:
    """Defined beside the functions: it must travel both ways by reference to this file."""

    number: int
    tensor: torch.Tensor


def sum_ranks(rank: int, parcel: Parcel) -> Parcel:
    total = torch.tensor([float(rank)]) + parcel.tensor
    dist.all_reduce(total)
    return Parcel(parcel.number + rank, total)


def describe_self(rank: int) -> dict[str, object]:
    return {
        "names": {key: os.environ[key] for key in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")},
        "marker": os.environ.get("EVENSTEP_MARKER"),
        "directory": str(Path.cwd()),
        "path": sys.path,
        "threads": torch.get_num_threads(),
        "python_threads": threading.active_count(),
        "initialised": dist.is_initialized(),
        "pid": os.getpid(),
    }


def exit_softly(rank: int) -> None:
    sys.exit(7)


def warn(rank: int) -> None:
    warnings.warn("ranks warn too", UserWarning, stacklevel=1)


def print_from(rank: int) -> None:
    print(f"rank {rank} prints", flush=True)
    os.write(2, b"and complains\n")


def leave_first(rank: int) -> None:
    if rank == 7:
        raise LookupError("gone before the others began")
    time.sleep(0.2)


def return_a_lambda(rank: int) -> Callable[[], None]:
    return lambda: None


def rank_and_size(rank: int) -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def nested(rank: int) -> list[tuple[int, int]]:
    return run_ranks(rank_and_size, 4)


def test_returns_values_by_rank_and_carries_classes_of_the_test_file() -> None:
    got = run_ranks(sum_ranks, 3, Parcel(10, torch.ones(1)))
    assert [parcel.number for parcel in got] == [10, 11, 12]
    assert all(torch.equal(parcel.tensor, torch.tensor([6.0])) for parcel in got)
    assert type(got[0]) is Parcel


def test_arguments_are_copies() -> None:
    tensor = torch.zeros(1)
    run_ranks(sum_ranks, 1, Parcel(0, tensor))
    assert tensor.tolist() == [0.0]


def test_a_rank_is_set_up_like_its_caller(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run_ranks(
        describe_self, 1, init=False
    )  # the environment must be that of the call, not of the server's start
    monkeypatch.setenv("EVENSTEP_MARKER", "here")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    first, second = run_ranks(describe_self, 2)
    assert second["names"] == {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    assert first["marker"] == "here"
    assert first["directory"] == str(tmp_path)
    assert first["path"] == sys.path
    assert first["threads"] == first["python_threads"] == 1
    assert first["initialised"] is True
    assert len({first["pid"], second["pid"], os.getpid()}) == 3


def test_init_false_leaves_torch_distributed_alone() -> None:
    assert run_ranks(describe_self, 1, init=False)[0]["initialised"] is False


def test_eight_ranks() -> None:
    assert run_ranks(rank_and_size, 8) == [(rank, 8) for rank in range(8)]


def test_ranks_can_start_ranks() -> None:
    expected = [(rank, 4) for rank in range(4)]
    assert run_ranks(nested, 1) == [expected]


def test_no_function_begins_before_every_rank_is_connected() -> None:
    outcomes = run_ranks_outcomes(leave_first, 8)
    assert [type(outcome.error).__name__ for outcome in outcomes] == ["NoneType"] * 7 + ["LookupError"]


def test_warnings_are_what_they_are_to_the_caller() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outcome = run_ranks_outcomes(warn, 1, init=False)[0]
        assert isinstance(outcome.error, UserWarning)
        warnings.filterwarnings("ignore", message="RANKS warn", module=r".*test_ranks\Z")
        assert run_ranks(warn, 1, init=False) == [None]


def test_output_goes_to_the_callers_streams(capfd: pytest.CaptureFixture[str]) -> None:
    run_ranks(print_from, 1, init=False)
    captured = capfd.readouterr()
    assert captured.out == "rank 0 prints\n"
    assert captured.err == "and complains\n"


def test_a_script_and_its_classes_work_as_main(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from dataclasses import dataclass\n"
        "from evenstep.testing.ranks import run_ranks\n"
        "@dataclass\n"
        "class Box:\n"
        "    value: int\n"
        "def double(rank, box):\n"
        "    return Box(2 * box.value + rank)\n"
        "if __name__ == '__main__':\n"
        "    print(run_ranks(double, 2, Box(5)) == [Box(10), Box(11)])\n"
    )
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


def test_functions_of_importable_modules_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "evenstep_helper.py").write_text("def triple(rank):\n    return 3 * rank\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    helper = importlib.import_module("evenstep_helper")
    assert run_ranks(helper.triple, 2, init=False) == [0, 3]
    assert run_ranks(json.dumps, 2, init=False) == ["0", "1"]


def test_a_function_that_no_other_process_can_find_is_refused() -> None:
    def closure(rank: int) -> None: ...

    for fn in (closure, lambda _: None, Parcel(0, torch.ones(1)).__repr__):
        with pytest.raises(TypeError) as caught:
            run_ranks(fn, 1)
        assert str(caught.value) == (
            f"{fn!r} cannot be found again in another process: ranks import the function from its file by name. "
            "Pass a function defined at the top level of a module (no lambda, closure, method of an object or "
            "notebook cell) and hand over what it needs as arguments"
        )


def test_arguments_and_values_that_cannot_travel_are_named() -> None:
    with pytest.raises(TypeError, match=r"\Athe arguments of sum_ranks cannot be sent to other processes \("):
        run_ranks(sum_ranks, 1, lambda: None)
    (outcome,) = run_ranks_outcomes(return_a_lambda, 1, init=False)
    assert type(outcome.error) is TypeError
    assert str(outcome.error).startswith("rank 0 returned a function that cannot be sent to the caller (")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: run_ranks(exit_softly, 0), "world_size is 0, but at least 1 rank must run the function"),
        (
            lambda: run_ranks(exit_softly, 1, timeout=0.0),
            "timeout is 0.0 seconds, so every rank would be killed at once; pass more than 0",
        ),
        (
            lambda: run_ranks(exit_softly, 2, expect_exit={2: 0}),
            "expect_exit names rank 2, but the ranks are 0 to 1",
        ),
    ],
)
def test_arguments_of_the_harness_are_checked(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=rf"\A{re.escape(message)}\Z"):
        call()


def test_outcomes_of_a_run_without_failures() -> None:
    for rank, outcome in enumerate(run_ranks_outcomes(rank_and_size, 2)):
        expected = Outcome(value=(rank, 2), error=None, traceback="", exit_code=0, seconds=outcome.seconds)
        assert outcome == expected
