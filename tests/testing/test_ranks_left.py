"""No process is left behind: not by a kill, an interrupted or killed caller, or a lost server."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from evenstep.testing.ranks import run_ranks, run_ranks_outcomes

pytestmark = pytest.mark.gloo


def hang_with_a_child(rank: int, path: str) -> None:
    child = subprocess.Popen(["sleep", "1000"])
    Path(path).write_text(str(child.pid))
    child.wait()


def kill_the_server(rank: int, path: str) -> None:
    Path(path).write_text(str(os.getpid()))
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(1000)


def rank_and_size(rank: int) -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def test_a_kill_takes_the_processes_that_a_rank_started(tmp_path: Path) -> None:
    run_ranks_outcomes(hang_with_a_child, 1, str(tmp_path / "pid"), timeout=1.0, init=False)
    pid = int((tmp_path / "pid").read_text())
    assert _is_gone(pid)


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


def test_the_loss_of_the_server_is_told_and_the_next_run_starts_another(tmp_path: Path) -> None:
    message = (
        "the process that forks ranks ended with exit code -9: no rank can be started. Its own error is on "
        "stderr; the next call starts a new one"
    )
    with pytest.raises(RuntimeError, match=rf"\A{re.escape(message)}\Z"):
        run_ranks(kill_the_server, 1, str(tmp_path / "pid"), init=False)
    assert _is_gone(int((tmp_path / "pid").read_text()))
    assert run_ranks(rank_and_size, 1) == [(0, 1)]


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
