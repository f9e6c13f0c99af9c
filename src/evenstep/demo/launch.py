"""Starts the demo's own ranks on this machine, as torchrun --standalone does: a free port, loopback only."""

from __future__ import annotations

import os
import signal
import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from evenstep.comm.gloo_threads import destroy_process_group

__all__ = ["RanksFailed", "launch"]

T = TypeVar("T")
_TIMEOUT = timedelta(minutes=5)
_HANDLED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")


class RanksFailed(RuntimeError):  # noqa: N818 - it says what happened
    """A rank of the demo ended with an error; the message is that of the first one that failed."""


def launch(ranks: int, function: Callable[..., T], *args: Any) -> T:
    """Run ``function(*args)`` on new processes joined by gloo, and return what rank 0 returned.

    Every rank computes on one thread, so that ranks do not take each other's cores.

    Args:
        ranks: Number of processes.
        function: A function of a module; it travels by name.
        args: Its arguments; they are pickled.

    Raises:
        RanksFailed: A rank raised or died, or a signal came; the others have been stopped.
        KeyboardInterrupt: The signal was that of Ctrl-C.
    """
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=0.1,
        start_method="spawn",
    )
    try:
        with _signals_restored(), _environment(OMP_NUM_THREADS="1", **_loopback()):
            results = elastic_launch(config, _rank)(function, *args)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        message = failure.message
        text = message["message"] if isinstance(message, dict) else message
        raise RanksFailed(f"rank {rank} failed: {text}") from error
    except SignalException as error:  # the launcher has stopped the ranks
        if error.sigval is signal.SIGINT:
            raise KeyboardInterrupt from error
        raise RanksFailed(f"the ranks were stopped by {error.sigval.name}") from error
    first: T = results[0]
    return first


@record
def _rank(function: Callable[..., T], *args: Any) -> T:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    try:
        result = function(*args)
        dist.barrier()  # who leaves early would cut off a peer that is still connecting
        return result
    finally:
        destroy_process_group()


def _loopback() -> dict[str, str]:
    """Gloo listens on the interface of the host name unless it is told another."""
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    return {"GLOO_SOCKET_IFNAME": names[0]} if names else {}


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Variables that new processes inherit; what the user has set stays, what is added goes again."""
    before = dict(os.environ)
    os.environ.update({**values, **before})
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():  # the launcher leaves some of its own too
            del os.environ[name]


@contextmanager
def _signals_restored() -> Iterator[None]:
    """The launcher leaves handlers of its own, which would end the caller's next wait as if it were a rank's."""
    numbers = [getattr(signal, name) for name in _HANDLED if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                if handler is not None:  # not one that was set outside Python
                    signal.signal(number, handler)
