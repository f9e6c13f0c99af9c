"""A process that forks ranks, so that a rank starts in milliseconds and ends as a real program does.

`multiprocessing`'s fork server ends its children with ``os._exit``, which hides what happens when an
interpreter shuts down: hooks, threads left in a collective, aborts in C++ destructors. Here a forked
rank returns to the top of its program and the interpreter finishes normally, so its exit code is the
one that a training job would see.
"""

from __future__ import annotations

import gc
import importlib
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

__all__ = ["ForkedProcess", "RankServer", "serve"]

_PRELOAD = ("numpy", "torch.distributed", "torchdata.nodes", "evenstep.build", "pytest", "hypothesis")
_MESSAGE = struct.Struct("!cqq")
_READY, _FORK, _SIGNAL, _STARTED, _EXITED = b"R", b"F", b"K", b"S", b"X"
_CLOSE_SECONDS = 5.0


@dataclass(slots=True)
class ForkedProcess:
    """One process forked by the server; ``exit_code`` is negative for a signal, None while it runs."""

    pid: int
    exit_code: int | None = None


@dataclass(slots=True)
class RankServer:
    """The caller's side: fork, kill and hear about exits. Not thread-safe; one run at a time."""

    process: subprocess.Popen[bytes]
    control: socket.socket
    owner: int = field(default_factory=os.getpid)
    children: dict[int, ForkedProcess] = field(default_factory=dict)

    @classmethod
    def start(cls) -> RankServer:
        """Start the server and wait until it has imported what ranks need (seconds, once)."""
        ours, theirs = socket.socketpair()
        preload = ",".join(name for name in _PRELOAD if name in sys.modules or name.startswith("torch"))
        # One thread in the server: a fork copies only the thread that calls it, locks and all.
        environment = dict(os.environ, OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")
        # The caller's filters reach each rank by value; at start they would only break the imports.
        environment.pop("PYTHONWARNINGS", None)
        environment["PYTHONPATH"] = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
        program = f"from evenstep.testing.rank_server import serve; serve({theirs.fileno()}, {preload!r})"
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", program],
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C reaches the caller, which then kills the ranks
            )
        server = cls(process, ours)
        server._expect(_READY)
        return server

    @property
    def usable(self) -> bool:
        """Whether this process started it and it still runs."""
        return self.owner == os.getpid() and self.process.poll() is None

    def fork(self, connection: int, stdout: int, stderr: int) -> ForkedProcess:
        """Fork one process that runs a job read from file descriptor ``connection``."""
        socket.send_fds(self.control, [_MESSAGE.pack(_FORK, 0, 0)], [connection, stdout, stderr])
        child = ForkedProcess(self._expect(_STARTED))
        self.children[child.pid] = child
        return child

    def send_signal(self, child: ForkedProcess, number: signal.Signals) -> None:
        """Signal ``child``, SIGKILL with all that it started; nothing happens if it has ended."""
        self.control.sendall(_MESSAGE.pack(_SIGNAL, child.pid, number))

    def read_event(self) -> None:
        """Wait for one exit and record it. `control` is readable when there is one."""
        kind, pid, value = self._receive()
        assert kind == _EXITED, kind
        self.children.pop(pid).exit_code = value

    def close(self) -> None:
        """End the server and every process it forked."""
        self.control.close()
        if self.owner != os.getpid():
            return
        try:
            self.process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.returncode != 0:  # it could not clean up
            _send(set(self.children), signal.SIGKILL)

    def _expect(self, wanted: bytes) -> int:
        while True:
            kind, pid, value = self._receive()
            if kind == wanted:
                return pid
            self.children.pop(pid).exit_code = value

    def _receive(self) -> tuple[bytes, int, int]:
        data = b""
        while len(data) < _MESSAGE.size:
            part = self.control.recv(_MESSAGE.size - len(data))
            if not part:
                raise RuntimeError(
                    f"the process that forks ranks ended with exit code {self.process.wait()}: no rank can be "
                    "started. Its own error is on stderr; the next call starts a new one"
                )
            data += part
        kind, pid, value = _MESSAGE.unpack(data)
        return kind, pid, value


def serve(control_fd: int, preload: str) -> None:
    """The server's side: fork on request, reap, report; kill everything when the caller is gone.

    In a forked rank this function runs the job and ends by ``SystemExit``, so that the interpreter shuts
    down as usual.
    """
    for name in filter(None, preload.split(",")):
        importlib.import_module(name)
    from evenstep.testing.rank_process import run_job

    gc.freeze()  # else each rank spends 0.4 s at exit in collecting the modules of torch
    job = _serve_until_forked(socket.socket(fileno=control_fd))
    if job is not None:
        sys.exit(run_job(*job))


def _serve_until_forked(control: socket.socket) -> list[int] | None:
    """Returns the descriptors of its job in each forked process, and None at the end of the server."""
    waker, wake = os.pipe()
    for end in (waker, wake):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, _ignore)
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    selector.register(waker, selectors.EVENT_READ)
    children: set[int] = set()
    try:
        control.sendall(_MESSAGE.pack(_READY, 0, 0))
        while True:
            ready = {key.fileobj for key, _ in selector.select()}
            if waker in ready:
                os.read(waker, 4096)
                for pid, code in _reap(children):
                    control.sendall(_MESSAGE.pack(_EXITED, pid, code))
            if control not in ready:
                continue
            data, fds, _, _ = socket.recv_fds(control, _MESSAGE.size, 3)
            if not data:
                break
            kind, pid, number = _MESSAGE.unpack(data)
            if kind == _SIGNAL:
                _send(children & {pid}, number)
                continue
            pid = os.fork()
            if pid == 0:
                os.setpgid(0, 0)
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                selector.close()
                control.close()
                os.close(waker)
                os.close(wake)
                return fds
            with suppress(OSError):  # both sides do it, since either may be the first to need it
                os.setpgid(pid, pid)
            for fd in fds:
                os.close(fd)
            children.add(pid)
            control.sendall(_MESSAGE.pack(_STARTED, pid, 0))
    except (BrokenPipeError, ConnectionResetError):
        pass
    _send(children, signal.SIGKILL)
    for pid in children:
        os.waitpid(pid, 0)
    return None


def _reap(children: set[int]) -> Sequence[tuple[int, int]]:
    ended = []
    for child in tuple(children):
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            children.discard(pid)
            ended.append((pid, os.waitstatus_to_exitcode(status)))
    return ended


def _send(children: set[int], number: int) -> None:
    for pid in children:
        with suppress(ProcessLookupError, PermissionError):
            if number == signal.SIGKILL:
                os.killpg(pid, number)
            else:
                os.kill(pid, number)


def _ignore(number: int, frame: FrameType | None) -> None:
    """A handler must be set for the wake-up descriptor to be written to."""
