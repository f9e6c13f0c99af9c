"""How a rank leaves a data plane: the others are told, nobody waits for ever, and no thread is left in a collective."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from evenstep.comm.communicator import Communicator
from evenstep.comm.rounds import Rounds

__all__ = ["abandon", "leave", "leave_gently", "shut"]

_PATIENCE = 2.0  # seconds that a thread gets to notice that it is to give up


def abandon(rounds: Rounds | None, communicators: Sequence[Communicator]) -> None:
    """Wait for nobody any more, in any thread, now and later."""
    for communicator in communicators:
        communicator.abandon()
    if rounds is not None:
        rounds.give_up()


def shut(rounds: Rounds, communicators: Sequence[Communicator], grace: float) -> bool:
    """Begin no more windows, and wait until another thread has ended the one it is in; whether it has.

    After ``grace`` seconds its collectives are abandoned.
    """
    if rounds.is_inherited:
        return True
    with _alarm(rounds, communicators, grace):
        return rounds.shut(_PATIENCE)


def leave(rounds: Rounds | None, communicators: Sequence[Communicator], grace: float) -> None:
    """Tell the other ranks; after ``grace`` seconds without an answer, or then, use the groups no more.

    A forked child that ends, or drops a loader, leaves nobody: its parent goes on.
    """
    if rounds is not None and rounds.is_inherited:
        return
    if rounds is not None:
        with _alarm(rounds, communicators, grace):
            if rounds.shut(_PATIENCE):
                rounds.leave()
    abandon(rounds, communicators)


@contextmanager
def _alarm(rounds: Rounds, communicators: Sequence[Communicator], grace: float) -> Iterator[None]:
    alarm = threading.Timer(grace, abandon, (rounds, communicators))
    alarm.daemon = True
    alarm.start()
    try:
        yield
    finally:
        alarm.cancel()
        alarm.join()  # it holds the groups: freed by a thread that outlives the interpreter, they abort it


def leave_gently(rounds: Rounds | None, communicators: Sequence[Communicator], grace: float) -> None:
    """`leave`, of a plane that was collected: whichever thread that happened in must not wait for other ranks."""
    if _exiting.is_set() or rounds is None or rounds.is_inherited or not rounds.is_open:
        leave(rounds, communicators, grace)
        return
    thread = threading.Thread(
        target=leave, args=(rounds, communicators, grace), name="evenstep-leave", daemon=True
    )
    _leaving.add(thread)
    thread.start()


_exiting = threading.Event()
_leaving: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def _at_exit() -> None:
    """From here on finalizers wait; and no thread may be inside a collective when the interpreter goes."""
    _exiting.set()
    for thread in list(_leaving):
        thread.join()


# Finalizers run in an exit hook that the first of them registers; ours must come before it, so it is registered later.
weakref.finalize(_exiting, lambda: None)
atexit.register(_at_exit)
