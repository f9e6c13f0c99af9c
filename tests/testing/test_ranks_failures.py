"""How ranks fail, on real processes: exceptions, exits, signals and hangs, each told with where it was."""

from __future__ import annotations

import atexit
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from evenstep.testing.ranks import RankDied, RanksFailed, run_ranks, run_ranks_outcomes

pytestmark = pytest.mark.gloo


class Unpicklable(Exception):  # noqa: N818
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


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


def raise_with_a_function(rank: int) -> None:
    raise LookupError(lambda: None)


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


def test_an_exception_that_cannot_travel_arrives_as_text() -> None:
    (outcome,) = run_ranks_outcomes(raise_unpicklable, 1, init=False)
    assert type(outcome.error) is RuntimeError
    assert str(outcome.error).endswith(".Unpicklable: 1 and 2")
    assert "raise Unpicklable(1, 2)" in outcome.traceback


def test_an_exception_that_cannot_leave_its_process_arrives_as_text() -> None:
    (outcome,) = run_ranks_outcomes(raise_with_a_function, 1, init=False)
    assert type(outcome.error) is RuntimeError
    assert str(outcome.error).startswith("LookupError: <function raise_with_a_function.<locals>.<lambda> at ")
    assert "raise LookupError(lambda: None)" in outcome.traceback


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
