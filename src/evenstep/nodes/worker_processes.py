"""Worker processes that read samples: torch's own DataLoader, fed window by window."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias

# NumPy loads these when they are first used. A worker that is forked while another thread loads one would wait for that
# thread for ever, and torch's workers use numpy.random before anything else.
import numpy.ma
import numpy.random  # noqa: F401
import torch
from torch.utils.data import DataLoader

from evenstep.nodes.fetch import Pending
from evenstep.nodes.sample_seed import SeedKey
from evenstep.nodes.worker_dataset import Chunk, FailedSample, GuardedDataset
from evenstep.nodes.worker_message import pack_message, unpack_message

__all__ = ["ProcessFetcher"]

_PARTS = 8  # of a request for each worker: fine enough that no worker waits long for the last one
_LARGEST_PART = 32
_LAST_BREATH = 2.0  # seconds in which a worker whose connection broke is seen to be dead
_PATIENCE = 5.0  # seconds that the driving thread gets to end its workers


@dataclass
class _Request:
    chunks: list[Chunk]
    futures: list[Future[list[Any]]] = field(default_factory=list)


class ProcessFetcher:
    """Reads in processes that live as long as the loader: for datasets that decode in Python.

    One thread drives a ``DataLoader`` with persistent workers, so that a window is read while nobody waits, and
    so that torch reports a dead worker to us rather than in the middle of the training loop.

    Args:
        dataset: Anything with ``dataset[i]``, optionally ``__getitems__``; it is copied into every worker.
        num_workers: Processes.
        prefetch_factor: Parts of a request under way per worker.
        worker_init_fn: Called in each worker with its number.
        multiprocessing_context: ``"fork"``, ``"spawn"``, ``"forkserver"`` or a context; None: the default.
        seed: Of the workers' ``torch.utils.data.get_worker_info().seed``.
        name: Of the driving thread.
    """

    ahead = True

    def __init__(
        self,
        dataset: Any,
        num_workers: int,
        *,
        prefetch_factor: int = 4,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: str | BaseContext | None = None,
        seed: int = 0,
        name: str = "evenstep-read",
    ) -> None:
        self._workers = num_workers
        self._requests: _Requests = SimpleQueue()
        work = _Work(self._requests)

        def build() -> DataLoader[Any]:
            return DataLoader(
                GuardedDataset(dataset),
                batch_sampler=work,  # type: ignore[arg-type]  # any iterable of what __getitems__ takes
                num_workers=num_workers,
                collate_fn=pack_message,
                persistent_workers=True,
                prefetch_factor=prefetch_factor,
                worker_init_fn=worker_init_fn,
                multiprocessing_context=multiprocessing_context,
                # Else the seed of the workers is drawn from the global generator, which is the user's.
                generator=torch.Generator().manual_seed(seed),
            )

        self._build = build
        self._thread = threading.Thread(
            target=_drive, args=(self._requests, work), name=f"{name}-workers", daemon=True
        )
        self.renew()
        self._thread.start()
        self._finalizer = weakref.finalize(self, _end, self._requests, self._thread)

    def submit(self, indices: Sequence[int], key: SeedKey) -> Pending:
        """Begin to fetch ``indices``."""
        if not self._finalizer.alive:
            raise RuntimeError("the worker processes of this loader have been closed")
        size = min(max(1, len(indices) // (_PARTS * self._workers)), _LARGEST_PART)
        request = _Request([(key, list(indices[k : k + size])) for k in range(0, len(indices), size)])
        request.futures = [Future() for _ in request.chunks]
        self._requests.put(request)
        return Pending(request.futures)

    def renew(self) -> None:
        """Start other workers, with the dataset as it is now."""
        self._requests.put(self._build)
        self._requests.put(_Request([]))  # nothing, for which they are started all the same

    def close(self) -> None:
        """End the workers."""
        self._finalizer()


_Requests: TypeAlias = "SimpleQueue[_Request | Callable[[], DataLoader[Any]] | None]"


class _Work:
    """What the DataLoader takes for its batch sampler: the chunks of all that has been asked for.

    It looks for more whenever a worker is free, so that workers do not wait for each other between requests.
    """

    def __init__(self, requests: _Requests) -> None:
        self._requests = requests
        self._chunks: deque[tuple[Chunk, Future[list[Any]]]] = deque()
        self._running: deque[Future[list[Any]]] = deque()
        self.held: deque[Callable[[], DataLoader[Any]] | None] = deque()

    def __iter__(self) -> Iterator[Chunk]:
        while self._chunks or self._take_more():
            chunk, future = self._chunks.popleft()
            if future.set_running_or_notify_cancel():
                self._running.append(future)
                yield chunk

    def _take_more(self) -> bool:
        """Whether chunks came; what is no request is held back until all running ones are done."""
        while not self.held:
            try:
                item = self._requests.get_nowait()
            except Empty:
                return False
            if not isinstance(item, _Request):
                self.held.append(item)
                return False
            self.add(item)
            if self._chunks:
                return True
        return False

    def add(self, request: _Request) -> None:
        """Begin with ``request`` after what is under way."""
        self._chunks.extend(zip(request.chunks, request.futures, strict=True))

    def done(self, values: list[Any]) -> None:
        """The oldest running chunk has come back."""
        self._running.popleft().set_result(values)

    def fail(self, error: Exception) -> None:
        """Nothing of what has been asked for will come."""
        waiting = [future for _, future in self._chunks if future.set_running_or_notify_cancel()]
        for future in [*self._running, *waiting]:
            future.set_exception(error)
        self._running.clear()
        self._chunks.clear()


def _drive(requests: _Requests, work: _Work) -> None:
    """Serve requests until there is None."""
    build: Callable[[], DataLoader[Any]] | None = None
    loader: DataLoader[Any] | None = None
    while (item := work.held.popleft() if work.held else requests.get()) is not None:
        if not isinstance(item, _Request):
            build, loader = item, None
            continue
        work.add(item)
        try:
            assert build is not None
            loader = build() if loader is None else loader
            for message in loader:
                work.done([v.unwrap() if isinstance(v, FailedSample) else v for v in unpack_message(message)])
        except Exception as error:
            told = _explain(error, loader)
            _stop(loader)
            loader = None  # the traceback of the error keeps this frame, and so whatever it ends with
            work.fail(told)
            del told
    loader = None


def _stop(loader: DataLoader[Any] | None) -> None:
    """End the workers that are left of ``loader``."""
    iterator = getattr(loader, "_iterator", None)
    if iterator is not None:
        iterator._shutdown_workers()


def _explain(error: Exception, loader: DataLoader[Any] | None) -> Exception:
    """``error``, or which worker died of what, where one did."""
    workers = getattr(getattr(loader, "_iterator", None), "_workers", [])
    # A connection breaks a moment before its process can be asked how it ended.
    alive = {w.sentinel: w for w in workers if w.is_alive()}
    if len(alive) == len(workers) > 0 and isinstance(error, (OSError, EOFError)):
        for sentinel in wait(list(alive), timeout=_LAST_BREATH):
            alive[sentinel].join(_LAST_BREATH)  # its pipe closes before its exit code is there
    dead = [(number, w.pid, w.exitcode) for number, w in enumerate(workers) if not w.is_alive()]
    if not dead:
        return error
    number, pid, code = dead[0]
    told = RuntimeError(
        f"worker process {number} (pid {pid}) that reads samples died with exit code {code}, and the samples it was "
        "reading with it. A negative code is the signal that ended it: -9 is mostly a lack of memory, -11 a crash in "
        "a library."
    )
    told.__cause__ = error
    return told


def _end(requests: _Requests, thread: threading.Thread) -> None:
    requests.put(None)
    if thread is not threading.current_thread():
        thread.join(_PATIENCE)
