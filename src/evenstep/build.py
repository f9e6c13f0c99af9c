"""Composes the graph that a rank needs, after everything was checked on every rank."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torchdata.nodes import BaseNode

from evenstep.comm.codec import Codec
from evenstep.comm.plane import DataPlane
from evenstep.config import LoaderConfig
from evenstep.cost import DEFAULT_COST, CostModel, describe_cost
from evenstep.cost.model import check_model
from evenstep.cursor import Cursor
from evenstep.loader import Loader
from evenstep.nodes import (
    DevicePrefetch,
    HostPrefetch,
    MetadataGather,
    ModelBroadcast,
    Packer,
    PayloadAllToAll,
    PinMemory,
    PlannedReader,
    Planner,
    SamplerReader,
)
from evenstep.packing import collate_rows, pack_text, with_oversized
from evenstep.samples import MetadataTable, SampleMetadata
from evenstep.sampling import Sampler

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["build_loader"]

log = logging.getLogger("evenstep")


def build_loader(
    dataset: Any,
    mesh: DeviceMesh | DataPlane | None,
    config: LoaderConfig,
    *,
    sampler: Sampler | None = None,
    metadata_fn: Callable[[Any], Any] | None = None,
    metadata: Any = None,
    pack: Callable[[Any, int], Any] = pack_text,
    collate: Callable[[list[Any]], Any] = collate_rows,
    cost: CostModel | None = None,
    codec: Codec | None = None,
    start: Cursor | None = None,
    device: torch.device | str | None = None,
) -> Loader[Any]:
    """Build this rank's loader; call it on every rank, in the same order, on the main thread.

    Args:
        dataset: Anything with ``dataset[i]`` and ``len``; None on ranks that read nothing.
        mesh: Device mesh over the whole world; a ready `DataPlane`; None: one process.
        config: What the loader does; equal on every rank.
        sampler: Which samples make a step; equal on every rank.
        metadata_fn: ``sample -> int | SampleMetadata``; default ``len(sample["input_ids"])``.
        metadata: Lengths known ahead: integers ``[len(dataset)]``, a sequence of `SampleMetadata`, or a
            `MetadataTable`. Then each rank reads only the samples that it trains on, and no payload moves.
        pack: ``(samples, seq_len) -> row``.
        collate: ``rows -> batch``.
        cost: Predicts the compute of samples; default `evenstep.cost.LinearQuadraticCost`.
        codec: How samples travel; default `evenstep.comm.codec.PayloadCodec`.
        start: Where a fresh loader begins; default: the beginning of epoch 0.
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
        dataset, config, sampler, metadata_fn, metadata, pack, collate, cost, codec, start, where
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
    return Loader(root)


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


@dataclass(frozen=True, slots=True)
class _Request:
    """What was asked for, before it is known whether it fits."""

    dataset: Any
    config: LoaderConfig
    sampler: Sampler | None
    metadata_fn: Callable[[Any], Any] | None
    metadata: Any
    pack: Callable[[Any, int], Any]
    collate: Callable[[list[Any]], Any]
    cost: CostModel | None
    codec: Codec | None
    start: Cursor | None
    device: torch.device

    def describe(self) -> dict[str, str]:
        """What must be equal on every rank, as text."""
        self._check()
        assert self.sampler is not None
        stream = self.sampler.start()
        return {
            **self.config.to_dict(),
            "cost": describe_cost(DEFAULT_COST if self.cost is None else self.cost),
            "sampler": f"{type(self.sampler).__name__} {stream.to_dict()}, {self.sampler.rows_per_step} rows a step",
            "start": repr(self.start),
            "metadata": "known ahead" if self.metadata is not None else "read",
            "codec": type(self.codec).__name__,
        }

    def _check(self) -> None:
        if not isinstance(self.sampler, Sampler):
            raise TypeError(
                f"sampler is {self.sampler!r}, expected a StepSampler, TokenBudgetSampler or another object with "
                "step_at(cursor), start() and rows_per_step"
            )
        for name in ("pack", "collate"):
            if not callable(getattr(self, name)):
                raise TypeError(f"{name} is {getattr(self, name)!r}, expected a function")
        if self.metadata_fn is not None and not callable(self.metadata_fn):
            raise TypeError(f"metadata_fn is {self.metadata_fn!r}, expected a function of a sample")
        if self.cost is not None:
            check_model("cost", self.cost)
        if self.start is not None and not isinstance(self.start, Cursor):
            raise TypeError(f"start is {self.start!r}, expected an evenstep.Cursor")
        if self.config.collectives == "caller":
            raise NotImplementedError("collectives='caller' is not available yet; use 'producer'")
        _check_size(self.dataset, self.sampler)

    def compose(self, plane: DataPlane) -> BaseNode[Any]:
        """The graph of this rank, by its role."""
        assert self.sampler is not None
        config, topology = self.config, plane.topology
        groups = topology.dp_size // topology.balance_group_size
        if groups > 1 and (config.accumulation_steps == "auto" or config.resume == "micro_batch"):
            raise ValueError(
                f"balance_group_size={topology.balance_group_size} makes {groups} groups with plans of their own, "
                "which neither accumulation_steps='auto' nor resume='micro_batch' can follow; leave it at None"
            )
        if self.dataset is None and topology.is_reader and self.metadata is None:
            raise ValueError(f"dataset=None, but rank {topology.rank} reads samples; pass the dataset here")
        table = None if self.metadata is None else _table(self.metadata, self.sampler)
        source: BaseNode[Any] = SamplerReader(
            self.sampler,
            self.dataset,
            plane,
            config,
            metadata_fn=self.metadata_fn,
            metadata=table,
            cost=self.cost,
            codec=self.codec,
            start=self.start,
        )
        if not topology.in_data_plane:
            return ModelBroadcast(source, plane)
        if table is None:
            source = Planner(MetadataGather(source, plane, uneven=config.uneven), plane, config)
            source = PayloadAllToAll(source, plane, config, codec=self.codec)
        else:
            source = Planner(source, plane, config)
            source = PlannedReader(source, self.dataset, plane, config, metadata_fn=self.metadata_fn)
        if plane.is_constructor:
            source = Packer(source, with_oversized(self.pack, config.oversized), self.collate)
            if config.pin_memory:
                source = PinMemory(source, self.device, cpu_fields=config.cpu_fields)
        if config.host_prefetch != 0:
            source = HostPrefetch(source, config.host_prefetch)
        if plane.is_constructor:
            source = DevicePrefetch(source, self.device, config.device_prefetch, cpu_fields=config.cpu_fields)
        return ModelBroadcast(source, plane)


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


def _table(metadata: Any, sampler: Sampler) -> MetadataTable:
    if isinstance(metadata, MetadataTable):
        table = metadata
    elif len(metadata) and isinstance(metadata[0], SampleMetadata):
        table = MetadataTable.from_samples(metadata)
    else:
        lengths = np.asarray(metadata)
        if lengths.ndim != 1 or lengths.dtype.kind not in "iu":
            raise TypeError(
                f"metadata has shape {lengths.shape} and dtype {lengths.dtype}, expected one integer length per sample"
            )
        table = MetadataTable.from_tokens(lengths)
    expected = sampler.start().dataset_size
    if expected and len(table) != expected:
        raise ValueError(f"metadata has {len(table)} samples, the sampler was made for {expected}")
    if (table.tokens < 0).any():
        raise ValueError(f"metadata gives sample {int(np.argmax(table.tokens < 0))} a negative length")
    return table
