"""The harness itself, on real processes: values, exceptions, deaths, hangs, and what a rank inherits."""

from __future__ import annotations

import atexit
import importlib
import json
import os
import re
import signal
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

from evenstep.testing.ranks import Outcome, RankDied, RanksFailed, run_ranks, run_ranks_outcomes

pytestmark = pytest.mark.gloo


@dataclass(frozen=True)
class Parcel:
    """Defined beside the functions: it must travel both ways by reference to this file."""

    number: int
    tensor: torch.Tensor


class Unpicklable(Exception):  # noqa: N818
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


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


def raise_on_rank_1_while_others_sleep(rank: int, seconds: float) -> None:
    if rank == 1:
        raise LookupError("the shard is gone")
    time.sleep(seconds)


def raise_on_rank_1_while_others_wait(rank: int) -> None:
    if rank == 1:
        raise LookupError("the shard is gone")
    dist.barrier()


def raise_unpicklable(rank: int) -> None:
    raise Unpicklable(1, 2)


def exit_hard(rank: int, code: int) -> str:
    if rank == 1:
        os._exit(code)
    return "fine"


def kill_self(rank: int, number: int) -> str:
    if rank == 1:
        os.kill(os.getpid(), number)
    return "fine"


def exit_softly(rank: int) -> None:
    sys.exit(7)


def die_at_exit(rank: int) -> str:
    atexit.register(os._exit, 5)
    return "returned"


def touch_at_exit(rank: int, path: str) -> None:
    atexit.register(Path(path).touch)


def hang_in_a_collective(rank: int) -> None:
    if rank == 0:
        dist.barrier()
    time.sleep(1000)


def hang_with_a_child(rank: int, path: str) -> None:
    child = subprocess.Popen(["sleep", "1000"])
    Path(path).write_text(str(child.pid))
    child.wait()


def warn(rank: int) -> None:
    warnings.warn("ranks warn too", UserWarning, stacklevel=1)


def print_from(rank: int) -> None:
    print(f"rank {rank} prints", flush=True)
    os.write(2, b"and complains\n")


def kill_the_server(rank: int, path: str) -> None:
    Path(path).write_text(str(os.getpid()))
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(1000)


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


def test_an_exception_arrives_with_its_type_and_traceback_while_the_other_rank_hangs() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(raise_on_rank_1_while_others_sleep, 2, 1000.0, timeout=4.0)
    failed = caught.value
    assert type(failed.errors[1]) is LookupError
    assert str(failed.errors[1]) == "the shard is gone"
    assert type(failed.errors[0]) is TimeoutError
    assert failed.exit_codes == [-signal.SIGKILL, 1]
    message = str(failed)
    assert message.startswith("2 of 2 ranks failed\n--- rank 1, exit code 1, after 0.")
    assert 'raise LookupError("the shard is gone")\n' in message
    assert "\nLookupError: the shard is gone\n--- rank 0, exit code -9 (SIGKILL), after " in message
    assert " in raise_on_rank_1_while_others_sleep\n" in message.partition("--- rank 0")[2]
    assert message.endswith(
        "TimeoutError: rank 0 was still running after 4 s and was killed before its function returned"
    )


def test_after_a_failure_the_others_are_not_given_the_whole_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evenstep.testing.ranks._FAILURE_GRACE", 0.5)
    with pytest.raises(RanksFailed, match=r"was still running 0\.5 s after rank 1 failed and was killed"):
        run_ranks(raise_on_rank_1_while_others_sleep, 2, 1000.0, timeout=100.0)


def test_an_expected_exit_shortens_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evenstep.testing.ranks._FAILURE_GRACE", 0.0)
    assert run_ranks(raise_on_rank_1_while_others_sleep, 2, 0.5, expect_exit={1: 1}) == [None, None]


def test_a_failed_rank_frees_its_peers_from_a_collective() -> None:
    outcomes = run_ranks_outcomes(raise_on_rank_1_while_others_wait, 3, timeout=30.0)
    assert type(outcomes[1].error) is LookupError
    assert [type(outcomes[rank].error) for rank in (0, 2)] == [RuntimeError, RuntimeError]
    assert [outcome.exit_code for outcome in outcomes] == [1, 1, 1]


def test_no_function_begins_before_every_rank_is_connected() -> None:
    outcomes = run_ranks_outcomes(leave_first, 8)
    assert [type(outcome.error).__name__ for outcome in outcomes] == ["NoneType"] * 7 + ["LookupError"]


def test_an_exception_that_cannot_travel_arrives_as_text() -> None:
    (outcome,) = run_ranks_outcomes(raise_unpicklable, 1, init=False)
    assert type(outcome.error) is RuntimeError
    assert str(outcome.error).endswith(".Unpicklable: 1 and 2")
    assert "raise Unpicklable(1, 2)" in outcome.traceback


def test_os_exit_is_a_failure_even_with_code_0() -> None:
    for code in (3, 0):
        outcomes = run_ranks_outcomes(exit_hard, 2, code, init=False)
        assert outcomes[0].value == "fine"
        assert outcomes[0].error is None
        assert outcomes[1].exit_code == code
        assert type(outcomes[1].error) is RankDied
        assert str(outcomes[1].error) == f"rank 1 ended with exit code {code} before its function returned"


def test_a_killed_rank_is_reported_with_its_signal() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(kill_self, 2, signal.SIGKILL, init=False)
    assert caught.value.exit_codes == [0, -9]
    assert list(caught.value.errors) == [1]
    assert re.fullmatch(
        r"1 of 2 ranks failed\n--- rank 1, exit code -9 \(SIGKILL\), after \d\.\d s\n"
        r"RankDied: rank 1 ended with exit code -9 \(SIGKILL\) before its function returned",
        str(caught.value),
    )


def test_a_crash_comes_with_the_python_stack() -> None:
    outcome = run_ranks_outcomes(kill_self, 2, signal.SIGSEGV, init=False)[1]
    assert outcome.exit_code == -signal.SIGSEGV
    assert outcome.traceback.startswith("Fatal Python error: Segmentation fault")
    assert " in kill_self\n" in outcome.traceback


def test_expected_exits_are_no_failure_and_others_are() -> None:
    assert run_ranks(kill_self, 2, signal.SIGKILL, init=False, expect_exit={1: -9}) == ["fine", None]
    with pytest.raises(RanksFailed) as caught:
        run_ranks(kill_self, 2, signal.SIGKILL, init=False, expect_exit={0: 3, 1: -9})
    assert list(caught.value.errors) == [0]
    assert str(caught.value.errors[0]) == (
        "rank 0 was expected to end with exit code 3, but ended with exit code 0"
    )


def test_sys_exit_keeps_its_code() -> None:
    (outcome,) = run_ranks_outcomes(exit_softly, 1, init=False)
    assert type(outcome.error) is SystemExit
    assert outcome.exit_code == 7


def test_the_interpreter_of_a_rank_shuts_down_as_usual(tmp_path: Path) -> None:
    run_ranks(touch_at_exit, 1, str(tmp_path / "left"), init=False)
    assert (tmp_path / "left").exists()


def test_a_death_at_exit_is_a_failure_that_keeps_the_value() -> None:
    (outcome,) = run_ranks_outcomes(die_at_exit, 1, init=False)
    assert outcome.value == "returned"
    assert str(outcome.error) == "rank 0 ended with exit code 5 after its function returned"


def test_a_hang_is_killed_at_the_deadline_and_tells_where_it_was() -> None:
    outcomes = run_ranks_outcomes(hang_in_a_collective, 2, timeout=2.0)
    assert [outcome.exit_code for outcome in outcomes] == [-signal.SIGKILL] * 2
    assert "in barrier\n" in outcomes[0].traceback
    assert all(" in hang_in_a_collective\n" in outcome.traceback for outcome in outcomes)
    assert all(outcome.seconds >= 2.0 for outcome in outcomes)
    assert str(outcomes[1].error) == (
        "rank 1 was still running after 2 s and was killed before its function returned"
    )


def test_a_kill_takes_the_processes_that_a_rank_started(tmp_path: Path) -> None:
    run_ranks_outcomes(hang_with_a_child, 1, str(tmp_path / "pid"), timeout=1.0, init=False)
    pid = int((tmp_path / "pid").read_text())
    assert _is_gone(pid)


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


def test_an_interrupted_caller_leaves_no_rank_behind(tmp_path: Path) -> None:
    def interrupt() -> None:
        while not (tmp_path / "pid").exists():
            time.sleep(0.01)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run_ranks(hang_with_a_child, 1, str(tmp_path / "pid"), init=False)
    thread.join()
    while not (text := (tmp_path / "pid").read_text()):
        time.sleep(0.01)
    assert _is_gone(int(text))
    assert run_ranks(rank_and_size, 1) == [(0, 1)]


def test_a_killed_caller_leaves_no_rank_behind(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "from evenstep.testing.ranks import run_ranks\n"
        "def hang(rank, path):\n"
        "    Path(path).write_text(str(os.getpid()))\n"
        "    time.sleep(1000)\n"
        "if __name__ == '__main__':\n"
        "    run_ranks(hang, 1, sys.argv[1], init=False)\n"
    )
    pid_file = tmp_path / "pid"
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    caller = subprocess.Popen([sys.executable, str(script), str(pid_file)], env=environment)
    while not pid_file.exists() or not pid_file.read_text():
        assert caller.poll() is None
        time.sleep(0.02)
    caller.kill()
    caller.wait()
    assert _is_gone(int(pid_file.read_text()))


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


def test_the_loss_of_the_server_is_told_and_the_next_run_starts_another(tmp_path: Path) -> None:
    message = (
        "the process that forks ranks ended with exit code -9: no rank can be started. Its own error is on "
        "stderr; the next call starts a new one"
    )
    with pytest.raises(RuntimeError, match=rf"\A{re.escape(message)}\Z"):
        run_ranks(kill_the_server, 1, str(tmp_path / "pid"), init=False)
    assert _is_gone(int((tmp_path / "pid").read_text()))
    assert run_ranks(rank_and_size, 1) == [(0, 1)]


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


def _is_gone(pid: int) -> bool:
    """Whether the process ends within seconds; what is killed is gone only when it is reaped."""
    for _ in range(500):
        try:
            os.kill(pid, 0)
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (ProcessLookupError, FileNotFoundError):
            return True
        if state == "Z" and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1] == "1":
            return True  # an orphan that the machine's init has yet to reap
        time.sleep(0.02)
    return False
