"""Run a function on several real processes that talk over gloo: the harness of every multi-process test."""

from __future__ import annotations

import atexit
import os
import pickle
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from signal import Signals
from typing import Any, TypeVar

from evenstep.testing.outcomes import Outcome, RankDied, RanksFailed, describe, exit_name
from evenstep.testing.rank_process import CONNECTED, STACKS_SIGNAL, Job, Report, pickle_call
from evenstep.testing.rank_server import ForkedProcess, RankServer

__all__ = ["Outcome", "RankDied", "RanksFailed", "run_ranks", "run_ranks_outcomes"]

T = TypeVar("T")

_TIMEOUT = 60.0
_FAILURE_GRACE = 10.0
_STACKS_SECONDS = 1.0
_lock = threading.Lock()
_server: RankServer | None = None


def run_ranks(
    fn: Callable[..., T],
    world_size: int,
    *args: object,
    timeout: float = _TIMEOUT,
    init: bool = True,
    expect_exit: Mapping[int, int] | None = None,
) -> list[T]:
    """Call ``fn(rank, *args)`` on ``world_size`` new processes and return what each returned, by rank.

    The first call of a process starts a fork server that has torch loaded (seconds); from then on ranks
    start in milliseconds. Each rank has the caller's environment, ``sys.path``, working directory,
    standard output and warning filters, one thread for torch, and (``init``) an initialised gloo group that
    is destroyed when ``fn`` returns.

    Args:
        fn: A function at the top level of a module; it is imported from its file in each rank.
        world_size: Number of ranks.
        *args: Passed on; pickled, so for callers that trust themselves only.
        timeout: Seconds from start after which all ranks are killed. After a first failure the others
            get at most 10 seconds to end.
        init: Initialise the default process group with gloo, over a file in a temporary directory.
        expect_exit: Exit code by rank, for ranks that are meant to die: any other end of theirs is a failure,
            and their value is None.

    Raises:
        RanksFailed: A rank raised, died or hung; the message holds the traceback of each.
        TypeError: ``fn`` cannot be found from another process, or ``args`` cannot be pickled.
        ValueError: ``world_size`` or ``timeout`` is not positive, or ``expect_exit`` names no rank.
    """
    expected = dict(expect_exit or {})
    for rank in expected:
        if not 0 <= rank < world_size:
            raise ValueError(f"expect_exit names rank {rank}, but the ranks are 0 to {world_size - 1}")
    outcomes = _run(fn, world_size, args, timeout=timeout, init=init, expected=expected)
    errors: dict[int, BaseException] = {}
    for rank, outcome in enumerate(outcomes):
        if rank not in expected:
            if outcome.error is not None:
                errors[rank] = outcome.error
        elif outcome.exit_code != expected[rank] or isinstance(outcome.error, TimeoutError):
            errors[rank] = outcome.error or RankDied(
                f"rank {rank} was expected to end with {exit_name(expected[rank])}, "
                f"but ended with {exit_name(outcome.exit_code)}"
            )
    if errors:
        raise RanksFailed(describe(outcomes, errors), outcomes, errors)
    return [outcome.value for outcome in outcomes]  # type: ignore[misc]  # None only where an exit was expected


def run_ranks_outcomes(
    fn: Callable[..., T],
    world_size: int,
    *args: object,
    timeout: float = _TIMEOUT,
    init: bool = True,
) -> list[Outcome[T]]:
    """`run_ranks` for tests of failures: every rank runs to its end or the deadline, and nothing is raised."""
    return _run(fn, world_size, args, timeout=timeout, init=init, expected=None)


@dataclass(slots=True)
class _Rank:
    process: ForkedProcess
    connection: Connection
    stacks: Path
    listening: bool = True
    connected: bool = False
    report: Report | None = None
    killed: str = ""
    seconds: float = 0.0

    @property
    def running(self) -> bool:
        return self.process.exit_code is None

    @property
    def failed(self) -> bool:
        told = self.report is not None and bool(self.report.error_text)
        return told or self.process.exit_code not in (None, 0)

    def read(self) -> None:
        try:
            message = self.connection.recv_bytes()
        except (EOFError, ConnectionError):
            self.listening = False
            return
        if message == CONNECTED:
            self.connected = True
        else:
            self.listening, self.report = False, pickle.loads(message)

    def go(self) -> None:
        with suppress(ConnectionError):
            self.connection.send_bytes(CONNECTED)


def _run(
    fn: Callable[..., T],
    world_size: int,
    args: tuple[object, ...],
    *,
    timeout: float,
    init: bool,
    expected: Mapping[int, int] | None,
) -> list[Outcome[T]]:
    if world_size < 1:
        raise ValueError(f"world_size is {world_size}, but at least 1 rank must run the function")
    if not timeout > 0:
        raise ValueError(
            f"timeout is {timeout} seconds, so every rank would be killed at once; pass more than 0"
        )
    call = pickle_call(fn, args)
    with _lock, tempfile.TemporaryDirectory(prefix="evenstep-ranks-") as name, ExitStack() as connections:
        server, folder, ranks = _current_server(), Path(name), list[_Rank]()
        started = time.monotonic()
        try:
            for rank in range(world_size):
                job = Job(
                    rank=rank,
                    world_size=world_size,
                    call=call,
                    initialise=init,
                    rendezvous=str(folder / "rendezvous"),
                    stacks=str(folder / f"stacks-{rank}"),
                    environment=dict(os.environ),
                    path=list(sys.path),
                    directory=str(Path.cwd()),
                )
                ranks.append(_start(server, job))
                connections.enter_context(ranks[-1].connection)
            _watch(server, ranks, started, timeout, expected)
            _kill(server, ranks)
        except BaseException:
            _stop_server()  # the pytest timeout and Ctrl-C end here: no rank survives its caller
            raise
        return [_outcome(rank, one) for rank, one in enumerate(ranks)]


def _start(server: RankServer, job: Job) -> _Rank:
    ours, theirs = Pipe()
    with theirs, Path(os.devnull).open("w") as nothing:
        stdout, stderr = (fd if _is_open(fd) else nothing.fileno() for fd in (1, 2))
        rank = _Rank(server.fork(theirs.fileno(), stdout, stderr), ours, Path(job.stacks))
    with suppress(ConnectionError):  # a rank that is dead already is reported as such
        ours.send_bytes(pickle.dumps(job))
    return rank


def _watch(
    server: RankServer,
    ranks: list[_Rank],
    started: float,
    timeout: float,
    expected: Mapping[int, int] | None,
) -> None:
    """Collect reports and exits until all ranks have ended; say of the others why they are killed."""
    deadline, reason = started + timeout, f"was still running after {timeout:g} s"
    waiting = True
    while any(rank.running for rank in ranks):
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            for rank in ranks:
                if rank.running:
                    rank.killed, rank.seconds = reason, time.monotonic() - started
            return
        listening = {rank.connection: rank for rank in ranks if rank.listening}
        ready = wait([server.control, *listening], remaining)
        for connection, rank in listening.items():
            if connection in ready:
                rank.read()
        if waiting and all(rank.connected or not rank.listening for rank in ranks):
            waiting = False
            for rank in ranks:
                rank.go()
        if server.control in ready:
            server.read_event()
            for rank in ranks:
                if not rank.running and not rank.seconds:
                    rank.seconds = time.monotonic() - started
        grace = time.monotonic() + _FAILURE_GRACE
        if expected is not None and grace < deadline:
            first = next((i for i, rank in enumerate(ranks) if rank.failed and i not in expected), None)
            if first is not None:
                deadline, reason = grace, f"was still running {_FAILURE_GRACE:g} s after rank {first} failed"


def _kill(server: RankServer, ranks: list[_Rank]) -> None:
    """End what still runs, after it has written where it is, and wait for its exit."""
    overdue = [rank for rank in ranks if rank.running]
    for rank in overdue:
        server.send_signal(rank.process, STACKS_SIGNAL)
    patience = time.monotonic() + _STACKS_SECONDS
    while time.monotonic() < patience and not all(_written(rank.stacks) for rank in overdue):
        time.sleep(0.01)
    for rank in overdue:
        server.send_signal(rank.process, Signals.SIGKILL)
    while any(rank.running for rank in overdue):
        server.read_event()
    for rank in ranks:
        while rank.listening and rank.connection.poll():
            rank.read()


def _outcome(index: int, rank: _Rank) -> Outcome[Any]:
    report, code = rank.report, rank.process.exit_code
    assert code is not None
    value, error, text = None, None, report.traceback if report else ""
    if report is not None and report.value is not None:
        value, error = _unpickle(report.value, f"what rank {index} returned")
    elif report is not None:
        error = RuntimeError(report.error_text)
        if report.error is not None:
            loaded, failure = _unpickle(report.error, "its exception")
            error = error if failure else loaded
    if error is None:
        text = rank.stacks.read_text(errors="replace") if rank.stacks.exists() else ""
        when = "after its function returned" if report else "before its function returned"
        if rank.killed:
            error = TimeoutError(f"rank {index} {rank.killed} and was killed {when}")
        elif code != 0 or report is None:
            error = RankDied(f"rank {index} ended with {exit_name(code)} {when}")
        else:
            text = ""
    seconds = report.seconds if report else rank.seconds
    return Outcome(value=value, error=error, traceback=text, exit_code=code, seconds=seconds)


def _unpickle(data: bytes, what: str) -> tuple[Any, BaseException | None]:
    try:
        return pickle.loads(data), None
    except Exception as error:
        return None, RuntimeError(
            f"{what} cannot be unpickled by the caller: {type(error).__name__}: {error}"
        )


def _is_open(fd: int) -> bool:
    with suppress(OSError):
        os.fstat(fd)
        return True
    return False


def _written(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def _current_server() -> RankServer:
    global _server
    if _server is None or not _server.usable:
        _stop_server()
        _server = RankServer.start()
    return _server


@atexit.register
def _stop_server() -> None:
    global _server
    if _server is not None:
        _server.close()
        _server = None
