"""Everything a loader can be told, checked once, at the edge."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from numbers import Real
from typing import Any, Literal, get_args, get_type_hints

import numpy as np

from evenstep.budget import checked_budgets
from evenstep.plan import Objective, PackingConstraints
from evenstep.shown import shown

__all__ = ["LoaderConfig"]

_CHOICES = (
    "oversized",
    "empty",
    "algorithm",
    "exchange",
    "collectives",
    "resume",
    "worker",
    "uneven",
    "on_sample_error",
)
_BACKENDS = ("gloo", "nccl", "hccl")
_FLAGS = ("broadcast_plan", "shared_memory", "repack", "pin_memory", "log_balance")
_COUNTS = {"seq_len": 1, "micro_batch_size": 1, "num_workers": 0, "device_prefetch": 0}
_OPTIONAL_COUNTS = {"balance_window": 1, "max_segments": 1, "host_prefetch": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderConfig:
    """What a loader does; equal on every rank.

    Attributes:
        seq_len: Capacity of a row in tokens.
        micro_batch_size: Rows of one rank in one forward/backward.
        accumulation_steps: Micro-batches per rank and optimizer step. None: derived from sampler and mesh, so
            that a resume on another number of ranks needs no edit. ``"auto"``: a step is a fixed number of
            samples, packed into as few micro-batches as fit.
        balance_window: Micro-batches planned together; None: the whole optimizer step.
        oversized: A sample longer than ``seq_len``: ``"error"``, ``"single"`` (a row of its own) or ``"truncate"``.
        budgets: Hard limits per row on sums of features, besides tokens.
        max_segments: Most samples in one row.
        empty: Samples without tokens: ``"drop"`` (counted) or ``"error"``.
        algorithm: Planner: ``"auto"``, ``"lpt"``, ``"levels"``, ``"refine"``, or ``"reference"`` (keep the
            sampler's layout).
        objective: What is balanced; see `evenstep.plan.Objective`.
        min_balance_gain: A plan must improve the objective by more than this fraction, or nothing moves; 1: never.
        broadcast_plan: The planner's plan is sent; False: every rank plans and digests are compared.
        exchange: One payload exchange per ``"micro_batch"`` or per ``"window"``.
        collectives: Which thread starts them: ``"producer"``, ``"caller"``, or by backend.
        backend: Backend of control messages.
        payload_backend: Backend of payload; None: ``backend``.
        shared_memory: Payload and batches of gloo go through memory where all ranks of a group share a host.
        timeout: Longest wait for another rank.
        dp_dims: Data-parallel mesh dimensions; None: ``dp_replicate``, ``dp_shard``, ``dp``.
        reader_ranks: None (one reader per replica), ``"all"``, or a tuple of global ranks.
        planner_rank: Global rank that plans; None: the first constructor of a balance group.
        balance_group_size: dp ranks balanced together, or ``"node"``; None: all.
        repack: Documents of a packed sample are balanced one by one; False: packed rows stay whole.
        resume: A step under way is begun again (``"step"``) or continued (``"micro_batch"``).
        num_workers: Workers that read samples.
        worker: ``"thread"`` or ``"process"``.
        host_prefetch: Micro-batches produced ahead in a thread; None: the next window, whole; 0: none.
        device_prefetch: Batches copied to the accelerator ahead.
        pin_memory: Copy from pinned memory.
        cpu_fields: Batch fields that stay on the host.
        uneven: Streams of different lengths are an ``"error"``, or ``"stop"`` together.
        on_sample_error: A sample that cannot be read: ``"raise"`` on all ranks, or ``"skip"`` (counted, logged).
        log_balance: Log each step's balance.

    Raises:
        TypeError, ValueError: A field does not fit; the message names it, its value and what was expected.
    """

    seq_len: int
    micro_batch_size: int = 1
    accumulation_steps: int | str | None = None
    balance_window: int | None = None
    oversized: Literal["error", "single", "truncate"] = "error"
    budgets: Mapping[str, float] | None = None
    max_segments: int | None = None
    empty: Literal["drop", "error"] = "drop"
    algorithm: Literal["auto", "lpt", "levels", "refine", "reference"] = "auto"
    objective: Objective = field(default_factory=Objective)
    min_balance_gain: float = 0.0
    broadcast_plan: bool = True
    exchange: Literal["micro_batch", "window"] = "micro_batch"
    collectives: Literal["auto", "producer", "caller"] = "auto"
    backend: str = "gloo"
    payload_backend: str | None = None
    shared_memory: bool = True
    timeout: timedelta = timedelta(minutes=5)
    dp_dims: tuple[str, ...] | None = None
    reader_ranks: str | tuple[int, ...] | None = None
    planner_rank: int | None = None
    balance_group_size: int | str | None = None
    repack: bool = True
    resume: Literal["step", "micro_batch"] = "step"
    num_workers: int = 0
    worker: Literal["thread", "process"] = "thread"
    host_prefetch: int | None = None
    device_prefetch: int = 1
    pin_memory: bool = True
    cpu_fields: tuple[str, ...] = ()
    uneven: Literal["error", "stop"] = "error"
    on_sample_error: Literal["raise", "skip"] = "raise"
    log_balance: bool = False

    def __post_init__(self) -> None:
        for name, least in _COUNTS.items():
            self._set_count(name, least)
        for name, least in _OPTIONAL_COUNTS.items():
            if getattr(self, name) is not None:
                self._set_count(name, least)
        if self.accumulation_steps not in (None, "auto"):
            self._set_count("accumulation_steps", 1, "an integer, 'auto' or None")
        hints = get_type_hints(type(self))
        for name in _CHOICES:
            choices = get_args(hints[name])
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={shown(getattr(self, name))}, expected one of {list(choices)}")
        if not isinstance(self.objective, Objective):
            raise TypeError(f"objective={shown(self.objective)}, expected an evenstep.Objective")
        if not isinstance(self.timeout, timedelta) or self.timeout <= timedelta(0):
            raise ValueError(f"timeout={shown(self.timeout)}, expected a positive datetime.timedelta")
        gain = self.min_balance_gain
        if isinstance(gain, bool) or not isinstance(gain, Real) or not 0 <= gain <= 1:
            raise ValueError(f"min_balance_gain={shown(gain)}, expected a fraction in [0, 1]")
        self._set("min_balance_gain", float(gain))
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}={shown(getattr(self, name))}, expected True or False")
        self._check_ranks()
        if self.accumulation_steps == "auto" and self.balance_window is not None:
            raise ValueError(
                f"balance_window={self.balance_window} with accumulation_steps='auto': the number of micro-batches is "
                "only known once the whole step is planned. Leave balance_window at None."
            )
        if self.budgets is not None:
            self._set("budgets", checked_budgets(self.budgets))
        self.constraints()

    def _check_ranks(self) -> None:
        """Backends and roles, also where one process never looks at them: the next mesh will."""
        for name, value in (("backend", self.backend), ("payload_backend", self.payload_backend)):
            if value not in _BACKENDS and (name, value) != ("payload_backend", None):
                raise ValueError(f"{name}={shown(value)}, expected one of {list(_BACKENDS)}")
        if self.planner_rank is not None:
            self._set_count("planner_rank", 0, "a global rank or None")
        if self.balance_group_size not in (None, "node"):
            self._set_count("balance_group_size", 1, "an integer, 'node' or None")
        readers = self.reader_ranks
        if not (readers is None or (isinstance(readers, str) and readers == "all")):
            if not _all_of(readers, (int, np.integer)):
                raise TypeError(
                    f"reader_ranks={shown(readers)}, expected None, 'all' or a tuple of global ranks"
                )
            self._set("reader_ranks", _in_order(map(int, readers), readers))
        for name in ("dp_dims", "cpu_fields"):
            value = getattr(self, name)
            if name == "dp_dims" and value is None:
                continue
            if not _all_of(value, str):
                raise TypeError(f"{name}={shown(value)}, expected a tuple of names")
            self._set(name, _in_order(value, value))

    def _set_count(self, name: str, least: int, expected: str = "an integer") -> None:
        """Refuse anything but an integer >= ``least``."""
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise TypeError(f"{name}={shown(value)} ({type(value).__name__}), expected {expected}")
        if value < least:
            raise ValueError(f"{name}={value}, expected at least {least}")
        self._set(name, int(value))

    def _set(self, name: str, value: Any) -> None:
        """Keep ``value`` in its plain form: ranks compare texts, and equal fields must have equal ones."""
        object.__setattr__(self, name, value)

    def constraints(self) -> PackingConstraints:
        """The hard limits of a row."""
        return PackingConstraints(
            self.seq_len,
            oversized=self.oversized,
            budgets=self.budgets,
            max_segments=self.max_segments,
        )

    def to_dict(self) -> dict[str, str]:
        """Every field as text: what ranks compare."""
        return {f.name: repr(getattr(self, f.name)) for f in fields(self)}


def _all_of(values: Any, kind: type | tuple[type, ...]) -> bool:
    """Whether ``values`` is a sequence or set of ``kind``; a bool is no int."""
    if not isinstance(values, (tuple, list, set, frozenset)):
        return False
    return all(isinstance(value, kind) and not isinstance(value, bool) for value in values)


def _in_order(values: Iterable[Any], like: object) -> tuple[Any, ...]:
    """``values`` as a tuple; those of a set, which has another order in every process, sorted."""
    return tuple(sorted(values)) if isinstance(like, (set, frozenset)) else tuple(values)
