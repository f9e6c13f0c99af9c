"""Any iterable, driven alike: begin a pass, take an item, say where it stands, go there again."""

from __future__ import annotations

import copy
import io
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torchdata.nodes import BaseNode

__all__ = ["Stream", "check_serialisable", "open_stream", "pass_epoch_on"]

_END = object()


class Stream(Protocol):
    """A source with a position."""

    def begin(self, epoch: int | None = None) -> None:
        """Go to the beginning of the next pass; a source with ``set_epoch`` is told ``epoch``, unless it is None."""

    def load(self, state: Any) -> None:
        """Go to where `state` was taken."""

    def state(self) -> Any:
        """A copy of the position."""

    def next(self) -> Any:
        """The next item, or StopIteration."""


def open_stream(source: Any, items: str) -> Stream:
    """What drives ``source``, which makes ``items``.

    Raises:
        TypeError: It cannot be iterated.
    """
    if isinstance(source, BaseNode):
        return _Node(source)
    if not hasattr(source, "__iter__"):
        raise TypeError(
            f"the source of {items} is {type(source).__name__} {source!r}, expected a torchdata node, a "
            f"StatefulDataLoader, an IterableDataset or another iterable of {items}"
        )
    if callable(getattr(source, "state_dict", None)) and callable(getattr(source, "load_state_dict", None)):
        return _Stateful(source)
    return _Replayed(source)


def pass_epoch_on(source: Any, epoch: int | None) -> None:
    """Tell ``source`` the epoch, where it is known and ``source`` has ``set_epoch``."""
    if epoch is not None and callable(getattr(source, "set_epoch", None)):
        source.set_epoch(epoch)


class _Node:
    """A graph of torchdata nodes."""

    def __init__(self, source: BaseNode[Any]) -> None:
        self._source = source

    def begin(self, epoch: int | None = None) -> None:
        pass_epoch_on(self._source, epoch)
        self._source.reset(None)

    def load(self, state: Any) -> None:
        self._source.reset(copy.deepcopy(state))

    def state(self) -> Any:
        return copy_state(self._source.state_dict())

    def next(self) -> Any:
        return next(self._source)


class _Stateful:
    """An iterable with ``state_dict`` and ``load_state_dict``, such as StatefulDataLoader.

    Many keep their position until they are exhausted, so that `iter` alone is no beginning: the pass under way is
    ended first. Where items of it are left, it is begun again from the state that it began with, since reading on to
    its end may take hours, or for ever.
    """

    def __init__(self, source: Any) -> None:
        self._source = source
        self._items: Iterator[Any] = iter(())
        self._under_way = False  # begun or loaded, and not exhausted
        self._untouched = False  # begun, and nothing taken
        self._beginning: Any = None  # the state there; None until somebody asks for it
        self._loaded: Any = None  # until an item is taken: many sources only then go there, and say so

    def begin(self, epoch: int | None = None) -> None:
        if not self._untouched:  # else it stands there, whether or not it says so yet
            self._loaded = None
            self._leave()
        pass_epoch_on(self._source, epoch)
        self._items = iter(self._source)
        self._under_way = self._untouched = True

    def load(self, state: Any) -> None:
        self._source.load_state_dict(copy.deepcopy(state))
        self._items = iter(self._source)
        self._under_way, self._untouched = True, False
        self._loaded = copy.deepcopy(state)
        _count_once(self._items, state)

    def state(self) -> Any:
        if self._loaded is not None:
            return copy.deepcopy(self._loaded)
        state = copy_state(self._source.state_dict())
        if self._untouched:
            self._beginning = copy.deepcopy(state)
        return state

    def next(self) -> Any:
        self._untouched, self._loaded = False, None
        try:
            return next(self._items)
        except StopIteration:
            self._under_way = False
            raise

    def _leave(self) -> None:
        if not self._under_way or next(self._items, _END) is _END:
            return
        if self._beginning is None:
            deque(self._items, maxlen=0)
            return
        self._source.load_state_dict(copy.deepcopy(self._beginning))
        if not hasattr(self._source, "set_epoch"):  # else its state may soon tell another epoch
            self._loaded = copy.deepcopy(self._beginning)


def _count_once(items: Any, state: Any) -> None:
    """Torchdata 0.11 counts what it skips on a load twice, where the dataset under its loader has no state.

    The state it gives next would then skip twice as much.
    """
    if not isinstance(state, Mapping):
        return
    for name in ("_num_yielded", "_sampler_iter_yielded"):
        if state.get(name) and getattr(items, name, None) == 2 * state[name]:
            setattr(items, name, state[name])


class _Replayed:
    """Keeps no position: its items are counted, and iterated again on a resume."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self._items: Iterator[Any] | None = None
        self._pulled = False
        self._taken = 0

    def begin(self, epoch: int | None = None) -> None:
        pass_epoch_on(self._source, epoch)
        self._items, self._taken = None, 0

    def load(self, state: Any) -> None:
        if not isinstance(state, Mapping) or type(state.get("taken")) is not int or state["taken"] < 0:
            raise ValueError(
                f"the state of the source is {state!r}, expected {{'taken': a number of items}}: it was saved with a "
                "source of another kind"
            )
        self._items, self._taken = None, state["taken"]

    def state(self) -> Any:
        return {"taken": self._taken}

    def next(self) -> Any:
        if self._items is None:
            self._items = self._open()
        self._pulled = True
        item = next(self._items)
        self._taken += 1
        return item

    def _open(self) -> Iterator[Any]:
        items: Iterator[Any] = iter(self._source)
        if items is self._source and self._pulled:
            raise RuntimeError(
                f"{type(self._source).__name__} can be iterated only once, and some of its items are gone: pass an "
                "object whose __iter__ begins again, or a node or loader that has a state"
            )
        for _ in range(self._taken):
            next(items, None)
        return items


def copy_state(state: Any) -> Any:
    """A copy of a source's state, which goes on changing.

    Raises:
        TypeError: It cannot be copied, and so not saved; the message names the key.
    """
    try:
        return copy.deepcopy(state)
    except Exception:
        check_serialisable(state, "state")
        raise


def check_serialisable(state: Any, where: str) -> None:
    """Refuse a state that no checkpoint can hold, by the name of the key that holds it.

    Raises:
        TypeError: A value cannot be saved.
    """
    if isinstance(state, Mapping):
        for key, value in state.items():
            check_serialisable(value, f"{where}[{key!r}]")
    elif isinstance(state, (list, tuple)):
        for k, value in enumerate(state):
            check_serialisable(value, f"{where}[{k}]")
    else:
        try:
            torch.save(state, io.BytesIO())
        except Exception as error:
            raise TypeError(
                f"the source's {where} is {state!r} ({type(state).__name__}), which no checkpoint can hold ({error}): a "
                "state is made of plain values, arrays and tensors"
            ) from error
