"""Composes the graph that a rank needs, after everything was checked on every rank."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torchdata.nodes import BaseNode

from evenstep.comm.batch_spec import BatchSpec
from evenstep.comm.codec import Codec
from evenstep.comm.plane import DataPlane
from evenstep.config import LoaderConfig
from evenstep.cost import DEFAULT_COST, CostModel, describe_cost
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
from evenstep.nodes.known import KnownMetadata, tells_documents
from evenstep.packing import (
    Shard,
    collate_rows,
    loss_counter,
    pack_documents,
    pack_text,
    padded_alike,
    padding_of,
    with_oversized,
)
from evenstep.packing.documents import Oversized
from evenstep.request import Request
from evenstep.sampling import LocalStepSource, Sampler
from evenstep.shown import shown

__all__ = ["build_loader"]

log: logging.Logger = logging.getLogger("evenstep")


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
            columns (``"tokens"``, ``"loss_tokens"``, features by name, ``"documents"`` with ``"document_offsets"``), a
            sequence of `SampleMetadata`, or a `MetadataTable`. Then each rank reads only the samples that it trains on, and no payload moves.
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
        raise TypeError(f"config is {type(config).__name__} {shown(config)}, expected a LoaderConfig")
    where = _device(device, config)
    plane = mesh if isinstance(mesh, DataPlane) else _plane(mesh, config, where)
    request = Request(
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
        request.check(plane.topology)
        told = request.describe()
        root = _compose(request, plane)
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
    # A torch that was built for one may find none on this machine, and torch 2.6 raises then.
    wanted = bool(backends - {"gloo"}) and torch.accelerator.is_available()
    return (torch.accelerator.current_accelerator() if wanted else None) or torch.device("cpu")


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
        shared_memory=config.shared_memory,
    )


def _compose(request: Request, plane: DataPlane) -> BaseNode[Any]:
    """The graph of this rank, by its role."""
    spec = None if request.batch_spec is None else request.batch_spec.with_info()
    root = ModelBroadcast(_constructed(request, plane), plane, spec)
    return root if request.shard is None else ContextShard(root, plane, request.shard)


def _constructed(request: Request, plane: DataPlane) -> BaseNode[Any]:
    """The batches of this replica, at its constructor; elsewhere what only knows where they stand."""
    config, topology = request.config, plane.topology
    known = request.known_metadata()
    if known is not None and request.explode is not None and config.repack and not tells_documents(known):
        raise ValueError(
            "explode with repack=True needs the documents of each sample before planning, which metadata does not "
            "give: pass them as the columns 'documents' and 'document_offsets', choose repack=False to keep the rows "
            "whole, or leave metadata out"
        )
    source = _reader(request, plane, known)
    if not topology.in_data_plane:
        return source
    if known is None:
        source = Planner(MetadataGather(source, plane, uneven=config.uneven), plane, config)
        source = PayloadAllToAll(source, plane, config, codec=request.codec)
    else:
        source = Planner(source, plane, config)
        tells = request.metadata_fn is not None or request.explode is not None
        source = PlannedReader(
            source,
            request.dataset,
            plane,
            config,
            metadata_fn=request.metadata_fn,
            explode=request.explode,
            loss_tokens=None if tells else loss_counter(request.pack, config.oversized),
        )
    if plane.is_constructor:
        pack = with_oversized(request.pack, config.oversized)
        if request.explode is not None and not config.repack:
            pack = functools.partial(_pack_documents, request.explode, pack, config.oversized)
        source = Packer(source, pack, padded_alike(request.pack, request.collate))
        if request.shard is not None:
            padding, unshifted = padding_of(request.pack, request.collate)
            source = ShardPad(source, plane, request.shard, padding=padding, unshifted=unshifted)
        if config.pin_memory:
            source = PinMemory(source, request.device, cpu_fields=config.cpu_fields)
    if config.host_prefetch != 0:
        if request.launched_by_caller:
            only_gloo = {config.backend, config.payload_backend or config.backend} == {"gloo"}
            device = torch.device("cpu") if only_gloo else request.device
            source = CallerPrefetch(source, config.host_prefetch, device=device)
        else:
            source = HostPrefetch(source, config.host_prefetch)
    if plane.is_constructor:
        source = DevicePrefetch(source, request.device, config.device_prefetch, cpu_fields=config.cpu_fields)
    return source


def _reader(request: Request, plane: DataPlane, known: KnownMetadata | None) -> BaseNode[Any]:
    """Where the steps come from."""
    common: dict[str, Any] = {
        "metadata_fn": request.metadata_fn,
        "cost": request.cost,
        "codec": request.codec,
        "explode": request.explode,
        "loss_tokens": loss_counter(request.pack, request.config.oversized),
        "start": request.start,
        "allow_changed_dataset": request.allow_changed_dataset,
    }
    if isinstance(request.sampler, Sampler):
        return SamplerReader(
            request.sampler, request.dataset, plane, request.config, metadata=known, **common
        )
    if request.sampler is None:
        return ExternalStepReader(request.dataset, plane, request.config, **common)
    source = request.sampler if plane.is_constructor else None
    return ExternalStepReader(source, plane, request.config, dataset=request.dataset, **common)


def _pack_documents(
    explode: Callable[[Any], Iterable[Any]],
    pack: Callable[[Any, int], Any],
    oversized: Oversized,
    samples: list[Any],
    seq_len: int,
) -> Any:
    documents = [document for sample in samples for document in explode(sample)]
    return pack_documents(pack, oversized, documents, seq_len)
