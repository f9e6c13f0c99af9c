"""What a loader was asked to be, and whether that fits together, before anything is built from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torchdata.nodes import BaseNode

from evenstep.comm.batch_spec import BatchSpec
from evenstep.comm.codec import Codec
from evenstep.comm.groups import check_device
from evenstep.config import LoaderConfig
from evenstep.cost import DEFAULT_COST, CostModel, describe_cost
from evenstep.cost.model import check_model
from evenstep.cursor import Cursor
from evenstep.nodes.balance import Balance
from evenstep.nodes.known import KnownMetadata, known_metadata
from evenstep.nodes.local_streams import is_local_step
from evenstep.packing import Shard
from evenstep.sampling import LocalStepSource, Sampler, StepSampler
from evenstep.shown import shown
from evenstep.topology import Topology

__all__ = ["Request"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The arguments of `evenstep.build_loader`, its device resolved."""

    dataset: Any
    config: LoaderConfig
    sampler: Sampler | LocalStepSource | None
    metadata_fn: Callable[[Any], Any] | None
    metadata: Any
    pack: Callable[[Any, int], Any]
    collate: Callable[[list[Any]], Any]
    cost: CostModel | None
    explode: Callable[[Any], Iterable[Any]] | None
    codec: Codec | None
    batch_spec: BatchSpec | None
    shard: Mapping[str, Shard | None] | None
    on_balance: Callable[[Balance], object] | None
    start: Cursor | None
    allow_changed_dataset: bool
    device: torch.device

    @property
    def launched_by_caller(self) -> bool:
        """Whether the training thread starts the collectives."""
        return self.config.collectives == "caller" or self._bound_backend() is not None

    def describe(self) -> dict[str, str]:
        """What must be equal on every rank, as text."""
        return {
            **self.config.to_dict(),
            "cost": describe_cost(DEFAULT_COST if self.cost is None else self.cost),
            **self._describe_steps(),
            "start": repr(self.start),
            "allow_changed_dataset": repr(self.allow_changed_dataset),
            "metadata": "known ahead" if self.metadata is not None else "read",
            "shard": repr(self.shard),
            "explode": "given" if self.explode is not None else "none",
            "codec": type(self.codec).__name__,
            "batch_spec": repr(self.batch_spec),
        }

    def _describe_steps(self) -> dict[str, str]:
        """Who makes the steps, and the identity of the stream, each field for itself."""
        sampler = self.sampler
        if sampler is None:
            return {"sampler": "external source"}
        told = {"sampler": type(sampler).__name__}
        if not isinstance(sampler, LocalStepSource):
            told["sampler.rows_per_step"] = repr(sampler.rows_per_step)
        return told | {f"sampler.{name}": repr(value) for name, value in sampler.start().to_dict().items()}

    def check(self, topology: Topology) -> None:
        """Refuse what does not fit together, or not this rank.

        Raises:
            ValueError, TypeError: Names the argument, its value and what was expected.
        """
        self._check_types()
        self._check_combinations(topology)
        if self.sampler is None:
            _check_makes_steps(self.dataset)
        check_device(self.device)
        if isinstance(self.sampler, Sampler) and hasattr(self.dataset, "__len__"):
            self._check_size(self.sampler, len(self.dataset))

    def known_metadata(self) -> KnownMetadata | None:
        """The metadata that is known ahead, as something to take steps from.

        Raises:
            TypeError, ValueError: It is nothing of the kind, or belongs to another dataset.
        """
        if self.metadata is None:
            return None
        assert isinstance(self.sampler, Sampler)
        known = known_metadata(self.metadata, self._expected_size(self.sampler), self.config.budgets or ())
        dataset_size = len(self.dataset) if hasattr(self.dataset, "__len__") else len(known)
        if dataset_size != len(known):
            raise ValueError(
                f"metadata has {len(known)} samples, the dataset has {dataset_size}: rows would be planned with the "
                "lengths of other samples. Compute the metadata from the dataset as it is now."
            )
        _check_reach(self.sampler, "metadata", len(known))
        return known

    @staticmethod
    def _expected_size(sampler: Sampler) -> int:
        """Samples of the sampler's dataset; 0 where it may name any part of one, in an order of the user's."""
        free = isinstance(sampler, StepSampler) and sampler.order in ("torch", "custom")
        return 0 if free else sampler.start().dataset_size

    def _check_size(self, sampler: Sampler, size: int) -> None:
        """A dataset of another size than the sampler's is found now rather than at its last index."""
        if size == 0:
            raise ValueError("the dataset is empty: there is nothing to train on")
        expected = self._expected_size(sampler)
        if expected and size != expected:
            raise ValueError(
                f"the sampler was made for {expected} samples, the dataset has {size}: samples would be missing "
                f"or out of range. Build the sampler with {size} samples."
            )
        _check_reach(sampler, "the dataset", size)

    def _check_types(self) -> None:
        if self.sampler is not None and not isinstance(self.sampler, (Sampler, LocalStepSource)):
            raise TypeError(
                "sampler must be a StepSampler, TokenBudgetSampler or another object with step_at(cursor), start() "
                "and rows_per_step, or None for a dataset that makes its own steps, but is "
                f"{shown(self.sampler)} ({type(self.sampler).__name__}){_adapter_for(self.sampler)}"
            )
        if self.sampler is not None and self.dataset is not None and not _has_index(self.dataset):
            raise TypeError(
                "dataset must have dataset[index], because the sampler names samples by their index, but is "
                f"{shown(self.dataset)}. Pass the dataset that it makes, or leave "
                "sampler out for a dataset that makes its own steps."
            )
        for name in ("pack", "collate"):
            if not callable(getattr(self, name)):
                raise TypeError(f"{name} is {shown(getattr(self, name))}, expected a function")
        for name, what in (("metadata_fn", "a sample"), ("explode", "a sample"), ("on_balance", "a Balance")):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                raise TypeError(f"{name} is {shown(getattr(self, name))}, expected a function of {what}")
        if self.batch_spec is not None and not isinstance(self.batch_spec, BatchSpec):
            raise TypeError(f"batch_spec is {shown(self.batch_spec)}, expected a BatchSpec")
        if self.cost is not None:
            check_model("cost", self.cost)
        if self.start is not None and not isinstance(self.start, Cursor):
            raise TypeError(f"start is {shown(self.start)}, expected an evenstep.Cursor")
        if not isinstance(self.allow_changed_dataset, bool):
            raise TypeError(f"allow_changed_dataset is {shown(self.allow_changed_dataset)}, expected a bool")

    def _check_combinations(self, topology: Topology) -> None:
        config = self.config
        if self.metadata is not None and not isinstance(self.sampler, Sampler):
            raise ValueError(
                "metadata describes the samples of a dataset by index, which a rank-local stream of steps does not "
                "tell the other ranks: pass a sampler over the whole dataset, or leave metadata out"
            )
        rows_of = getattr(self.sampler, "seq_len", config.seq_len)
        if config.accumulation_steps != "auto" and rows_of > config.seq_len:
            raise ValueError(
                f"the sampler fills rows of seq_len={rows_of} tokens, the rows of the loader hold seq_len="
                f"{config.seq_len}: its steps would not fit. Give TokenBudgetSampler and LoaderConfig the same seq_len."
            )
        groups = topology.dp_size // topology.balance_group_size
        if groups > 1 and (config.accumulation_steps == "auto" or config.resume == "micro_batch"):
            raise ValueError(
                f"balance_group_size={topology.balance_group_size} makes {groups} groups with plans of their own, "
                "which neither accumulation_steps='auto' nor resume='micro_batch' can follow; leave it at None"
            )
        reads = topology.is_reader if self.metadata is None else topology.is_constructor
        if self.dataset is None and reads:
            raise ValueError(f"dataset=None, but rank {topology.rank} reads samples; pass the dataset here")
        field = self._bound_backend()
        if field is not None and config.collectives == "producer":
            raise ValueError(
                f"collectives='producer' with {field}={getattr(config, field)!r}: its collectives run in the order in "
                "which one thread starts them, and with the training step's beside them the ranks would hang. Choose "
                "collectives='auto' (or 'caller'), or the backend 'gloo'."
            )

    def _bound_backend(self) -> str | None:
        """The field that names a backend whose collectives only the training thread may start."""
        return next(
            (f for f in ("backend", "payload_backend") if getattr(self.config, f) not in (None, "gloo")), None
        )


def _adapter_for(sampler: object) -> str:
    """What makes a sampler of torch's kind one of ours."""
    if isinstance(sampler, (list, tuple)) or not hasattr(sampler, "__iter__"):
        return ""
    return (
        ". A torch sampler over the whole dataset goes through evenstep.sampling.TorchSamplerAdapter, one that gives this "
        "rank its micro-batches of indices through evenstep.sampling.RankLocalBatchSampler"
    )


def _check_makes_steps(dataset: Any) -> None:
    """Refuse samples by index where steps were to be, as they are where somebody forgot the sampler."""
    if isinstance(dataset, (BaseNode, type)) or hasattr(dataset, "state_dict"):
        return
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        return
    if hasattr(dataset, "__iter__"):
        try:
            if is_local_step(dataset[0]):
                return
        except Exception:  # empty, or not by position: what it makes is seen when it is iterated
            return
    raise TypeError(
        f"no sampler was given, and dataset is {shown(dataset)} ({type(dataset).__name__}), {len(dataset):,} samples by "
        "index, which make no steps by themselves: pass sampler=StepSampler(len(dataset), global_batch_size=...). "
        "Without a sampler a dataset is an iterable of local steps [[sample, ...], ...], as evenstep.nodes.StepBuilder "
        "makes them of a stream of samples."
    )


def _has_index(dataset: Any) -> bool:
    """A class has the methods of its datasets, but no samples."""
    reads = hasattr(dataset, "__getitem__") or hasattr(dataset, "__getitems__")
    return reads and not isinstance(dataset, type)


def _check_reach(sampler: Sampler, name: str, size: int) -> None:
    """Refuse an index that nothing has, where the sampler knows its largest."""
    largest = getattr(sampler, "largest_index", None)
    if largest is not None and largest >= size:
        raise ValueError(
            f"the sampler names sample {largest}, {name} has {size}: it would be out of range. Build the sampler over "
            "the dataset that is passed here."
        )
