"""The shared position in the sample stream at an optimizer step: the whole state of a loader."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from evenstep.errors import StateMismatch

__all__ = ["CURSOR_VERSION", "Cursor", "find_cursor", "next_epoch_state"]

CURSOR_VERSION = 1
_UINT64 = 1 << 64
_ORDER = re.compile(r"[A-Za-z0-9_-]{0,16}")  # bounded, so that the state is
_OTHERS = {"version", "dataset_size", "micro_batch", "global_batch_size"}  # tell one that lost its position
_HYPER_PARALLEL = "_index_sampler_state"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """Where a stream of optimizer steps stands; the same on every rank, and says nothing about ranks.

    Attributes:
        version: Version of this format.
        epoch: Pass over the dataset, from 0.
        consumed_samples: Samples of this epoch used by complete optimizer steps.
        micro_batch: Micro-batches of the current step already delivered.
        step: Optimizer steps since the start of training.
        global_batch_size: Rows (samples for a `StepSampler`) of one optimizer step when it was taken.
        micro_batch_size: Rows of one micro-batch when it was taken.
        accumulation_steps: Micro-batches per rank and step when it was taken; 0 means "auto".
        window: Micro-batches planned together when it was taken; 0 means "auto".
        dp_size: Data-parallel ranks when it was taken.
        plan: 8-byte digest of the plan under way; 0 between windows.
        dataset_size: Samples of the stream's dataset; 0 if unknown.
        order: Name of the stream's order, at most 16 ASCII letters, digits, '-' or '_'; empty if unknown.
        seed: Seed of the order.
        stream: 8-byte digest of all else that defines the sequence; 0 if nothing else does.
    """

    version: int = CURSOR_VERSION
    epoch: int = 0
    consumed_samples: int = 0
    micro_batch: int = 0
    step: int = 0
    global_batch_size: int = 0
    micro_batch_size: int = 0
    accumulation_steps: int = 0
    window: int = 0
    dp_size: int = 0
    plan: int = 0
    dataset_size: int = 0
    order: str = ""
    seed: int = 0
    stream: int = 0

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name == "order":
                if not isinstance(value, str):
                    raise TypeError(_bad(f.name, value, "a string"))
                if not _ORDER.fullmatch(value):
                    raise ValueError(_bad(f.name, value, "at most 16 ASCII letters, digits, '-' or '_'"))
                continue
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
                raise TypeError(_bad(f.name, value, "an integer"))
            if not 0 <= value < _UINT64:
                raise ValueError(_bad(f.name, value, "an integer in [0, 2**64)"))
            if type(value) is not int:  # NumPy's: a sampler's arithmetic gives them, and JSON has none
                object.__setattr__(self, f.name, int(value))
        if self.version != CURSOR_VERSION:
            raise ValueError(
                _bad("version", self.version, f"version {CURSOR_VERSION}; it was written by another evenstep")
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-able values under fixed keys, less than 512 bytes of JSON."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Cursor:
        """Read what `to_dict` wrote, or the cursor of a HyperParallel loader.

        Raises:
            TypeError: ``state`` is no mapping, or a field has the wrong type.
            ValueError: A key is missing or unknown, or a value is out of range; the message names it.
        """
        if not isinstance(state, Mapping):
            raise TypeError(f"a cursor is a mapping, got {type(state).__name__} {state!r}")
        if _HYPER_PARALLEL in state:
            return _from_hyper_parallel(state)
        if "version" in state:
            cls(version=state["version"])  # before the keys, which another version may have changed
        names = [f.name for f in fields(cls)]
        missing = [name for name in names if name not in state]
        unknown = [str(key) for key in state if key not in names]
        if missing or unknown:
            raise ValueError(
                f"this is not an evenstep cursor: missing keys {missing}, unknown keys {unknown}; "
                "pass what loader.state_dict() returned"
            )
        return cls(**{name: state[name] for name in names})

    def at_epoch(self, epoch: int) -> Cursor:
        """The beginning of ``epoch``; the count of optimizer steps goes on."""
        return replace(self, epoch=epoch, consumed_samples=0, micro_batch=0, plan=0)

    def next_epoch(self) -> Cursor:
        """The epoch after the last item handed out; the same epoch if nothing of it was handed out."""
        started = self.consumed_samples or self.micro_batch
        return self.at_epoch(self.epoch + 1) if started else self

    def check_stream(self, expected: Cursor, *, allow_changed_dataset: bool = False) -> None:
        """Refuse a position in another stream than ``expected``'s.

        Raises:
            StateMismatch: dataset size, order, seed or stream digest differ (unknown values match all).
        """
        for name in ("dataset_size", "order", "seed", "stream"):
            saved, current = getattr(self, name), getattr(expected, name)
            known = self.order or saved  # a foreign cursor leaves what it does not know empty
            if not known or saved == current or allow_changed_dataset:
                continue
            # The digest of a sampler means nothing to a reader.
            cause = ", so another kind of sampler made it, or one of other lengths, order or weights" * (
                name == "stream"
            )
            raise StateMismatch(
                f"the state was saved with {name}={saved!r}, this loader has {name}={current!r}{cause}: resuming would "
                "skip, repeat or reshuffle samples. Load it with the dataset and sampler it was saved with, or "
                "pass allow_changed_dataset=True to continue at the same position of the other stream."
            )


def _bad(key: str, value: object, expected: str) -> str:
    return f"cursor[{key!r}] is {value!r} ({type(value).__name__}), expected {expected}"


def _from_hyper_parallel(state: Mapping[str, Any]) -> Cursor:
    """HyperParallel keeps the same position under other names; what it does not know stays unknown."""
    inner = state[_HYPER_PARALLEL]
    if not isinstance(inner, Mapping):
        raise TypeError(_bad(_HYPER_PARALLEL, inner, "a mapping"))
    try:
        batch, consumed, epoch = inner["global_batch_size"], inner["consumed_samples"], inner["epoch"]
        dp_size = inner["dp_world_size"]
    except KeyError as error:
        raise ValueError(f"cursor[{_HYPER_PARALLEL!r}] has no key {error.args[0]!r}") from None
    finished = state.get("_iterator_finished", False)
    if not isinstance(finished, bool):
        raise TypeError(_bad("_iterator_finished", finished, "a bool"))
    checked = Cursor(epoch=epoch, consumed_samples=consumed, global_batch_size=batch, dp_size=dp_size)
    if checked.global_batch_size == 0:
        raise ValueError(_bad("global_batch_size", batch, "a positive integer"))
    dataset = state.get("dataset_state")
    if dataset is not None and not isinstance(dataset, Mapping):
        raise TypeError(_bad("dataset_state", dataset, "a mapping or None"))
    size = seed = 0
    if dataset is not None:
        size, seed = dataset.get("dataset_size", 0), dataset.get("seed", 0) or 0
    offset = inner.get("optimizer_step_offset", 0)
    step = Cursor(step=offset).step + checked.consumed_samples // checked.global_batch_size
    cursor = replace(checked, dataset_size=size, seed=seed, step=step)
    if finished and size and cursor.consumed_samples < size:
        # It ended this epoch with a remainder that its sampler left out: stand where no step follows.
        return replace(cursor, consumed_samples=size)
    return cursor


def find_cursor(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The one cursor inside ``state``: bare, or under wrappers of the stock Loader, Mapper, Prefetcher, ...

    Raises:
        ValueError: ``state`` holds no cursor, or more than one.
    """
    found = list(_cursors(state))
    if len(found) != 1:
        raise ValueError(
            f"the state with keys {sorted(map(str, state))} holds {len(found)} evenstep cursors, expected one; "
            "pass what loader.state_dict() returned"
        )
    return found[0]


def _is_cursor(value: Mapping[str, Any]) -> bool:
    """Whether ``value`` is meant to be a cursor; `Cursor.from_dict` says what is wrong with it."""
    return "consumed_samples" in value or _HYPER_PARALLEL in value or value.keys() >= _OTHERS


def _cursors(value: object) -> list[Mapping[str, Any]]:
    if not isinstance(value, Mapping):
        return []
    if _is_cursor(value):
        return [value]
    return [cursor for inner in value.values() for cursor in _cursors(inner)]


def next_epoch_state(state: Any) -> Any:
    """``state`` with the cursor inside it moved to `Cursor.next_epoch`; everything else stays as it is."""
    if not isinstance(state, Mapping):
        return state
    if _is_cursor(state):
        if _HYPER_PARALLEL in state:
            return Cursor.from_dict(state).next_epoch().to_dict()
        rest = {key: value for key, value in state.items() if key == "source"}
        bare = {key: value for key, value in state.items() if key != "source"}
        return {**Cursor.from_dict(bare).next_epoch().to_dict(), **rest}
    return {key: next_epoch_state(value) for key, value in state.items()}
