"""Composes the graph that a rank needs, after everything was checked on every rank."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torchdata.nodes import BaseNode

from evenstep.comm.batch_spec import BatchSpec
from evenstep.comm.codec import Codec
from evenstep.comm.plane import DataPlane
from evenstep.config import LoaderConfig
from evenstep.cost import DEFAULT_COST, CostModel, describe_cost
from evenstep.cost.model import check_model
from evenstep.cursor import Cursor
from evenstep.loader import Loader
from evenstep.nodes import (
    CallerPrefetch,
    ContextShard,
    DevicePrefetch,
    ExternalStepReader,
    HostPrefetch,
    MetadataGather,
    ModelBroadcast,
    Packer,
    PayloadAllToAll,
    PinMemory,
    PlannedReader,
    Planner,
    SamplerReader,
    ShardPad,
)
from evenstep.nodes.balance import Balance
from evenstep.nodes.known import KnownMetadata, known_metadata
from evenstep.packing import Shard, collate_rows, pack_text, padding_of, with_oversized
from evenstep.sampling import LocalStepSource, Sampler

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["build_loader"]

log = logging.getLogger("evenstep")


def build_loader(
    dataset: Any,
    mesh: DeviceMesh | DataPlane | None,
    config: LoaderConfig,
    *,
    sampler: Sampler | LocalStepSource | None = None,
    metadata_fn: Callable[[Any], Any] | None = None,
    metadata: Any = None,
    pack: Callable[[Any, int], Any] = pack_text,
    collate: Callable[[list[Any]], Any] = collate_rows,
    cost: CostModel | None = None,
    explode: Callable[[Any], Iterable[Any]] | None = None,
    codec: Codec | None = None,
    batch_spec: BatchSpec | None = None,
    shard: Mapping[str, Shard | None] | None = None,
    on_balance: Callable[[Balance], object] | None = None,
    start: Cursor | None = None,
    allow_changed_dataset: bool = False,
    device: torch.device | str | None = None,
) -> Loader[Any]:
    """Build this rank's loader; call it on every rank, in the same order, on the main thread.

    Args:
        dataset: Anything with ``dataset[i]`` and ``len``; None on ranks that read nothing. Without a ``sampler``: a
            rank-local source of steps ``[[sample, ...], ...]``, one row after the other; see `ExternalStepReader`.
        mesh: Device mesh over the whole world; a ready `DataPlane`; None: one process.
        config: What the loader does; equal on every rank.
        sampler: Which samples make a step; equal on every rank. A `RankLocalBatchSampler` knows this rank's alone.
        metadata_fn: ``sample -> int | SampleMetadata``; default ``len(sample["input_ids"])``.
        metadata: Lengths known ahead: integers ``[len(dataset)]``, the path of an ``.npy`` file of them, a mapping of
            columns (``"tokens"``, ``"loss_tokens"``, features by name), a sequence of `SampleMetadata`, or a
            `MetadataTable`. Then each rank reads only the samples that it trains on, and no payload moves.
        pack: ``(samples, seq_len) -> row``.
        collate: ``rows -> batch``.
        cost: Predicts the compute of samples; default `evenstep.cost.LinearQuadraticCost`.
        explode: ``sample -> documents``, for samples that were packed before: with ``config.repack`` their documents are
            balanced one by one, else rows stay whole and ``pack`` gets the documents of each.
        codec: How samples travel; default `evenstep.comm.codec.PayloadCodec`.
        batch_spec: What every batch looks like, so that model-parallel peers need not be told.
        shard: How fields are divided over the ranks of a mesh dimension, e.g.
            ``{"input_ids": Shard("cp", mode="zigzag")}``; fields that belong to the tokens (labels, positions, ...) go
            along unless they are named, with None to stay whole.
        on_balance: Called with the `Balance` of each window when its first batch is delivered, on the planner rank.
        start: Where a fresh loader begins; default: the beginning of epoch 0.
        allow_changed_dataset: Load states of another dataset size, order or seed too, at the same position.
        device: Where batches go; default: CPU under gloo, else the current accelerator.

    Raises:
        ValueError, TypeError: An argument does not fit, on the rank where it does not.
        RemoteRankError: The same, on all other ranks.
        ConfigMismatch: Ranks were given different configurations.
    """
    if not isinstance(config, LoaderConfig):
        raise TypeError(f"config is {type(config).__name__} {config!r}, expected a LoaderConfig")
    where = _device(device, config)
    plane = mesh if isinstance(mesh, DataPlane) else _plane(mesh, config, where)
    request = _Request(
        dataset=dataset,
        config=config,
        sampler=sampler,
        metadata_fn=metadata_fn,
        metadata=metadata,
        pack=pack,
        collate=collate,
        cost=cost,
        explode=explode,
        codec=codec,
        batch_spec=batch_spec,
        shard=shard,
        on_balance=on_balance,
        start=start,
        allow_changed_dataset=allow_changed_dataset,
        device=where,
    )
    told: dict[str, str] = {}
    problem: Exception | None = None
    root: BaseNode[Any] | None = None
    try:
        told = request.describe()
        root = request.compose(plane)
    except Exception as error:
        problem = error
    plane.agree(told, problem)
    assert root is not None  # else agree() has raised
    if plane.topology.rank == 0:
        log.info("cost model: %s", describe_cost(DEFAULT_COST if cost is None else cost))
    return Loader(root, on_balance=on_balance, log_balance=config.log_balance)


def _device(device: torch.device | str | None, config: LoaderConfig) -> torch.device:
    if device is not None:
        return torch.device(device)
    backends = {config.backend, config.payload_backend or config.backend}
    accelerator = torch.accelerator.current_accelerator() if backends - {"gloo"} else None
    return torch.device("cpu") if accelerator is None else accelerator


def _plane(mesh: DeviceMesh | None, config: LoaderConfig, device: torch.device) -> DataPlane:
    if mesh is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(
            f"mesh=None means one process, but torch.distributed runs {dist.get_world_size()} ranks: each would train "
            "on the same samples. Pass the device mesh, e.g. init_device_mesh('cpu', (world_size,), "
            "mesh_dim_names=('dp',))."
        )
    return DataPlane.from_mesh(
        mesh,
        dp_dims=config.dp_dims,
        reader_ranks=config.reader_ranks,
        planner_rank=config.planner_rank,
        balance_group_size=config.balance_group_size,
        backend=config.backend,
        payload_backend=config.payload_backend,
        device=device,
        timeout=config.timeout,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """What was asked for, before it is known whether it fits."""

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

    def describe(self) -> dict[str, str]:
        """What must be equal on every rank, as text."""
        self._check()
        return {
            **self.config.to_dict(),
            "cost": describe_cost(DEFAULT_COST if self.cost is None else self.cost),
            "sampler": self._describe_steps(),
            "start": repr(self.start),
            "allow_changed_dataset": repr(self.allow_changed_dataset),
            "metadata": "known ahead" if self.metadata is not None else "read",
            "shard": repr(self.shard),
            "explode": "given" if self.explode is not None else "none",
            "codec": type(self.codec).__name__,
            "batch_spec": repr(self.batch_spec),
        }

    def _describe_steps(self) -> str:
        """Who makes the steps."""
        sampler = self.sampler
        if sampler is None:
            return "external source"
        told = f"{type(sampler).__name__} {sampler.start().to_dict()}"
        return (
            told if isinstance(sampler, LocalStepSource) else f"{told}, {sampler.rows_per_step} rows a step"
        )

    def _check(self) -> None:
        if self.sampler is not None and not isinstance(self.sampler, (Sampler, LocalStepSource)):
            raise TypeError(
                f"sampler is {self.sampler!r}, expected a StepSampler, TokenBudgetSampler or another object with "
                "step_at(cursor), start() and rows_per_step; or None for a dataset that makes its own steps"
            )
        if self.metadata is not None and not isinstance(self.sampler, Sampler):
            raise ValueError(
                "metadata describes the samples of a dataset by index, which a rank-local stream of steps does not "
                "tell the other ranks: pass a sampler over the whole dataset, or leave metadata out"
            )
        for name in ("pack", "collate"):
            if not callable(getattr(self, name)):
                raise TypeError(f"{name} is {getattr(self, name)!r}, expected a function")
        for name, what in (("metadata_fn", "a sample"), ("explode", "a sample"), ("on_balance", "a Balance")):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                raise TypeError(f"{name} is {getattr(self, name)!r}, expected a function of {what}")
        if self.batch_spec is not None and not isinstance(self.batch_spec, BatchSpec):
            raise TypeError(f"batch_spec is {self.batch_spec!r}, expected a BatchSpec")
        if self.explode is not None and self.metadata is not None and self.config.repack:
            raise ValueError(
                "explode with repack=True needs the documents of each sample before planning, which metadata does not "
                "give: choose repack=False to keep the rows whole, or leave metadata out"
            )
        if self.cost is not None:
            check_model("cost", self.cost)
        if self.start is not None and not isinstance(self.start, Cursor):
            raise TypeError(f"start is {self.start!r}, expected an evenstep.Cursor")
        if not isinstance(self.allow_changed_dataset, bool):
            raise TypeError(f"allow_changed_dataset is {self.allow_changed_dataset!r}, expected a bool")
        _launched_by_caller(self.config)
        if isinstance(self.sampler, Sampler):
            _check_size(self.dataset, self.sampler)

    def compose(self, plane: DataPlane) -> BaseNode[Any]:
        """The graph of this rank, by its role."""
        root = ModelBroadcast(self._constructed(plane), plane, self.batch_spec)
        return root if self.shard is None else ContextShard(root, plane, self.shard)

    def _constructed(self, plane: DataPlane) -> BaseNode[Any]:
        """The batches of this replica, at its constructor; elsewhere what only knows where they stand."""
        config, topology = self.config, plane.topology
        groups = topology.dp_size // topology.balance_group_size
        if groups > 1 and (config.accumulation_steps == "auto" or config.resume == "micro_batch"):
            raise ValueError(
                f"balance_group_size={topology.balance_group_size} makes {groups} groups with plans of their own, "
                "which neither accumulation_steps='auto' nor resume='micro_batch' can follow; leave it at None"
            )
        reads = topology.is_reader if self.metadata is None else topology.is_constructor
        if self.dataset is None and reads:
            raise ValueError(f"dataset=None, but rank {topology.rank} reads samples; pass the dataset here")
        known = None
        if self.metadata is not None:
            assert self.sampler is not None
            known = known_metadata(self.metadata, self.sampler.start().dataset_size, config.budgets or ())
        source = self._reader(plane, known)
        if not topology.in_data_plane:
            return source
        if known is None:
            source = Planner(MetadataGather(source, plane, uneven=config.uneven), plane, config)
            source = PayloadAllToAll(source, plane, config, codec=self.codec)
        else:
            source = Planner(source, plane, config)
            source = PlannedReader(
                source, self.dataset, plane, config, metadata_fn=self.metadata_fn, explode=self.explode
            )
        if plane.is_constructor:
            pack = with_oversized(self.pack, config.oversized)
            if self.explode is not None and not config.repack:
                pack = functools.partial(_pack_documents, self.explode, pack)
            source = Packer(source, pack, self.collate)
            if self.shard is not None:
                padding, unshifted = padding_of(self.pack, self.collate)
                source = ShardPad(source, plane, self.shard, padding=padding, unshifted=unshifted)
            if config.pin_memory:
                source = PinMemory(source, self.device, cpu_fields=config.cpu_fields)
        if config.host_prefetch != 0:
            if _launched_by_caller(config):
                only_gloo = {config.backend, config.payload_backend or config.backend} == {"gloo"}
                device = torch.device("cpu") if only_gloo else self.device
                source = CallerPrefetch(source, config.host_prefetch, device=device)
            else:
                source = HostPrefetch(source, config.host_prefetch)
        if plane.is_constructor:
            source = DevicePrefetch(source, self.device, config.device_prefetch, cpu_fields=config.cpu_fields)
        return source

    def _reader(self, plane: DataPlane, known: KnownMetadata | None) -> BaseNode[Any]:
        """Where the steps come from."""
        common: dict[str, Any] = {
            "metadata_fn": self.metadata_fn,
            "cost": self.cost,
            "codec": self.codec,
            "explode": self.explode,
            "start": self.start,
            "allow_changed_dataset": self.allow_changed_dataset,
        }
        if isinstance(self.sampler, Sampler):
            return SamplerReader(self.sampler, self.dataset, plane, self.config, metadata=known, **common)
        if self.sampler is None:
            return ExternalStepReader(self.dataset, plane, self.config, **common)
        source = self.sampler if plane.is_constructor else None
        return ExternalStepReader(source, plane, self.config, dataset=self.dataset, **common)


def _launched_by_caller(config: LoaderConfig) -> bool:
    """Whether the training thread starts the collectives.

    Raises:
        ValueError: The producer thread was to start those of a backend that does not bear it.
    """
    backends = {"backend": config.backend, "payload_backend": config.payload_backend or config.backend}
    bound = {field: name for field, name in backends.items() if name != "gloo"}
    if bound and config.collectives == "producer":
        field, name = next(iter(bound.items()))
        raise ValueError(
            f"collectives='producer' with {field}={name!r}: its collectives run in the order in which one thread starts "
            "them, and with the training step's beside them the ranks would hang. Choose collectives='auto' (or "
            "'caller'), or the backend 'gloo'."
        )
    return config.collectives == "caller" or bool(bound)


def _pack_documents(
    explode: Callable[[Any], Iterable[Any]], pack: Callable[[Any, int], Any], samples: list[Any], seq_len: int
) -> Any:
    return pack([document for sample in samples for document in explode(sample)], seq_len)


def _check_size(dataset: Any, sampler: Sampler) -> None:
    """A dataset of another size than the sampler's is found now rather than at its last index."""
    expected = sampler.start().dataset_size
    if dataset is None or not hasattr(dataset, "__len__") or not expected:
        return
    if len(dataset) == 0:
        raise ValueError("the dataset is empty: there is nothing to train on")
    if len(dataset) != expected:
        raise ValueError(
            f"the sampler was made for {expected} samples, the dataset has {len(dataset)}: samples would be missing "
            f"or out of range. Build the sampler with {len(dataset)} samples."
        )
