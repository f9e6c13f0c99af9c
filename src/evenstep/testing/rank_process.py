"""What one rank does from fork to exit: become a rank, call the function, report, leave cleanly."""

from __future__ import annotations

import faulthandler
import importlib.util
import os
import pickle
import re
import signal
import sys
import time
import traceback
import types
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TextIO

__all__ = ["CONNECTED", "STACKS_SIGNAL", "FunctionReference", "Job", "Report", "pickle_call", "run_job"]

WarningFilter = tuple[Any, ...]
# A script is imported under the name that `multiprocessing` aliases to it, so that its classes travel back.
_MAIN = "__mp_main__"
# Works in a thread that is blocked in C++, where a Python handler would wait for its return.
STACKS_SIGNAL = signal.SIGUSR2
CONNECTED = b"connected"
_FAR = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class FunctionReference:
    """A function found by file and name: test modules are not importable by name everywhere."""

    module: str
    file: str
    qualname: str

    @classmethod
    def to(cls, fn: Callable[..., object]) -> FunctionReference:
        """Refer to ``fn``.

        Raises:
            TypeError: ``fn`` is no function at the top level of a module that has a file.
        """
        module, qualname = getattr(fn, "__module__", ""), getattr(fn, "__qualname__", "")
        found: object = sys.modules.get(module)
        file = getattr(found, "__file__", "")
        for name in qualname.split("."):
            found = getattr(found, name, None)
        if not file or found is not fn:
            raise TypeError(
                f"{fn!r} cannot be found again in another process: ranks import the function from its file by "
                "name. Pass a function defined at the top level of a module (no lambda, closure, method of "
                "an object or notebook cell) and hand over what it needs as arguments"
            )
        return cls(_MAIN if module == "__main__" else module, str(Path(file).resolve()), qualname)

    def resolve(self) -> Callable[..., Any]:
        """Import the module from its file, if it is not there yet, and return the function."""
        found: Any = self._module()
        for name in self.qualname.split("."):
            found = getattr(found, name)
        return found  # type: ignore[no-any-return]  # the function that was named

    def _module(self) -> types.ModuleType:
        loaded = sys.modules.get(self.module)
        if loaded is not None and getattr(loaded, "__file__", None) == self.file:
            return loaded
        try:
            spec = importlib.util.find_spec(self.module)
        except (ImportError, ValueError):
            spec = None
        if spec is not None and spec.origin == self.file:
            return importlib.import_module(self.module)
        spec = importlib.util.spec_from_file_location(self.module, self.file)
        if spec is None or spec.loader is None:
            raise ImportError(f"{self.file} cannot be imported as a Python module")
        module = importlib.util.module_from_spec(spec)
        parents = self.module.split(".")[:-1]
        for depth in range(1, len(parents) + 1):  # arguments are unpickled by "tests.x.test_y"
            sys.modules.setdefault(name := ".".join(parents[:depth]), types.ModuleType(name))
        sys.modules[self.module] = module
        if self.module == _MAIN:
            sys.modules["__main__"] = module
        spec.loader.exec_module(module)
        return module


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """All that a forked process needs to become one rank of a run.

    Attributes:
        rank: Position of this rank.
        world_size: Number of ranks.
        call: What `pickle_call` made.
        initialise: Whether to initialise the default process group.
        rendezvous: File through which the ranks find each other.
        stacks: File that receives the stacks of a rank that crashes or gets `STACKS_SIGNAL`.
        environment: The caller's environment.
        path: The caller's ``sys.path``.
        directory: The caller's working directory.
    """

    rank: int
    world_size: int
    call: bytes
    initialise: bool
    rendezvous: str
    stacks: str
    environment: dict[str, str]
    path: Sequence[str]
    directory: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a rank tells before it leaves; pickled parts are loaded one by one, since each may fail.

    Attributes:
        value: Pickled return value, or None if the function raised.
        error: Pickled exception, or None if there was none or it cannot be pickled.
        error_text: ``"Type: message"`` of the exception, empty if there was none.
        traceback: Its formatted traceback.
        seconds: Duration of the call, with initialisation.
    """

    value: bytes | None = None
    error: bytes | None = None
    error_text: str = ""
    traceback: str = ""
    seconds: float


def pickle_call(fn: Callable[..., object], args: tuple[object, ...]) -> bytes:
    """Pack a call for other processes, with the warning filters in force.

    The module of ``fn`` is imported from its file before the arguments are unpickled, so that they may
    be instances of classes defined beside ``fn``.

    Raises:
        TypeError: ``fn`` cannot be found from another process, or the arguments cannot be pickled.
    """
    reference = FunctionReference.to(fn)
    try:
        rest = pickle.dumps((list(warnings.filters), args))
    except Exception as error:
        raise TypeError(
            f"the arguments of {reference.qualname} cannot be sent to other processes ({error}); pass plain "
            "values, arrays, tensors or objects of classes at the top level of a module"
        ) from error
    return pickle.dumps((reference, rest))


def run_job(connection_fd: int, stdout: int, stderr: int) -> int:
    """Run the job that arrives on ``connection_fd``; returns the exit code. Called in a forked process."""
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.close(stdout)
    os.close(stderr)
    with Connection(connection_fd) as connection:
        job: Job = pickle.loads(connection.recv_bytes())
        _become_rank(job)
        # Left open: the interpreter may still crash after the last statement of this function.
        stacks = Path(job.stacks).open("w")  # noqa: SIM115 - faulthandler writes to it until the end
        faulthandler.enable(stacks)
        signal.signal(STACKS_SIGNAL, signal.SIG_IGN)  # what faulthandler restores as the interpreter ends
        faulthandler.register(STACKS_SIGNAL, file=stacks)
        _keep.append(stacks)
        started = time.monotonic()
        try:
            value = _call(job, connection)
        except BaseException as error:
            connection.send_bytes(pickle.dumps(_failure(error, time.monotonic() - started)))
            if not isinstance(error, Exception):
                raise  # SystemExit and KeyboardInterrupt mean what they mean in any program
            _leave_quietly()
            return 1
        connection.send_bytes(pickle.dumps(Report(value=value, seconds=time.monotonic() - started)))
    return 0


_keep: list[TextIO] = []


def _become_rank(job: Job) -> None:
    import torch

    os.environ.clear()
    os.environ.update(job.environment)
    os.environ.update(
        RANK=str(job.rank),
        LOCAL_RANK=str(job.rank),
        WORLD_SIZE=str(job.world_size),
        LOCAL_WORLD_SIZE=str(job.world_size),
        OMP_NUM_THREADS="1",
    )
    # The ranks share one machine; its host name need not resolve.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    sys.path[:] = job.path
    os.chdir(job.directory)
    torch.set_num_threads(1)


def _call(job: Job, connection: Connection) -> bytes:
    import torch.distributed as dist

    fn, filters, args = _load_call(job.call)
    _apply(filters)
    if job.initialise:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{job.rendezvous}",
            rank=job.rank,
            world_size=job.world_size,
            timeout=_FAR,  # the deadline of the run ends a hang, and tells where it was
        )
        # A function that ends at once must not cut the connections of a rank that is still making its own.
        connection.send_bytes(CONNECTED)
        connection.recv_bytes()
    value = fn(job.rank, *args)
    try:
        data = pickle.dumps(value)
    except Exception as error:
        raise TypeError(
            f"rank {job.rank} returned a {type(value).__name__} that cannot be sent to the caller ({error}); "
            "return plain values, arrays or tensors"
        ) from error
    _destroy_process_group()
    return data


def _load_call(call: bytes) -> tuple[Callable[..., Any], Sequence[WarningFilter], tuple[Any, ...]]:
    reference, rest = pickle.loads(call)
    fn = reference.resolve()
    filters, args = pickle.loads(rest)
    return fn, filters, args


def _apply(filters: Sequence[WarningFilter]) -> None:
    warnings.resetwarnings()
    for action, message, category, module, line in reversed(filters):
        text, where = (getattr(pattern, "pattern", pattern) or "" for pattern in (message, module))
        if where and not isinstance(module, re.Pattern):
            where = rf"{re.escape(where)}\Z"
        warnings.filterwarnings(action, text, category, where, line)


def _failure(error: BaseException, seconds: float) -> Report:
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    try:
        data = pickle.dumps(error)
    except Exception:
        data = None
    ours = error.__traceback__
    while ours is not None and ours.tb_frame.f_code.co_filename == __file__:
        ours = ours.tb_next
    text = "".join(traceback.format_exception(kind, error, ours or error.__traceback__))
    return Report(error=data, error_text=f"{name}: {error}", traceback=text, seconds=seconds)


def _destroy_process_group() -> None:
    from evenstep.comm.gloo_threads import destroy_process_group

    destroy_process_group()


def _leave_quietly() -> None:
    """Destroy what the failed function left; its own error has been told and matters more."""
    try:
        _destroy_process_group()
    except Exception:
        traceback.print_exc()
