"""The training loop: what a user writes, with a clock beside it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import evenstep
from evenstep.cost import CostModel
from evenstep.demo.model import Gpt, GptConfig
from evenstep.demo.records import LocalMicroBatch, LocalStep, StepRecord
from evenstep.demo.settings import Settings
from evenstep.demo.tokens import Pieces
from evenstep.packing import collate_varlen
from evenstep.samples import MetadataTable, SampleMetadata

__all__ = ["Trainer", "build_model", "data_parallel_mesh", "gather", "open_loader"]

Batch = Mapping[str, Any]


def data_parallel_mesh() -> DeviceMesh:
    """All ranks as one data-parallel dimension."""
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))


def open_loader(
    settings: Settings,
    mesh: DeviceMesh,
    pieces: Pieces,
    cost: CostModel,
    algorithm: Literal["auto", "reference"],
) -> evenstep.Loader[Any]:
    """The loader of the demo; ``algorithm="reference"`` keeps the sampler's layout."""
    config = evenstep.LoaderConfig(seq_len=settings.seq_len, algorithm=algorithm)
    return evenstep.build_loader(
        pieces,
        mesh,
        config,
        sampler=settings.sampler(pieces),
        metadata_fn=metadata_of,
        collate=collate_varlen,
        cost=cost,
    )


def build_model(settings: Settings, pieces: Pieces) -> Gpt:
    """The same model wherever it is built."""
    torch.manual_seed(settings.seed)
    return Gpt(GptConfig(vocabulary=pieces.store.vocabulary))


def metadata_of(sample: Mapping[str, Any]) -> SampleMetadata:
    """Nothing predicts the first token of a document, so one token less than it has carries a loss."""
    length = len(sample["input_ids"])
    return SampleMetadata(length, loss_tokens=max(length - 1, 0))


class Trainer:
    """A model and its optimizer; gradients are reduced after every micro-batch, as FSDP and ZeRO-3 do.

    So the ranks meet at every micro-batch, and the slowest of them sets the pace of all.
    """

    def __init__(self, model: Gpt, settings: Settings, cost: CostModel) -> None:
        self.model = model
        self.cost = cost
        parameters = list(model.parameters())
        self.optimizer: torch.optim.AdamW = torch.optim.AdamW(parameters, lr=settings.learning_rate)
        sizes = [parameter.numel() for parameter in parameters]
        self._gradients = torch.zeros(sum(sizes))  # of one micro-batch, flat: one collective reduces all
        self._sum = torch.zeros(sum(sizes))  # of the micro-batches so far, over all ranks
        for parameter, view in zip(parameters, torch.split(self._gradients, sizes), strict=True):
            parameter.grad = view.view_as(parameter)

    def step(self, batches: Iterator[Batch]) -> LocalStep:
        """Train one optimizer step; the ranks start it together."""
        dist.barrier()
        begin = time.perf_counter()
        done = []
        for batch in batches:
            done.append(self.micro_batch(batch))
            if batch["info"].is_last_micro_batch:
                self.update()
                seconds = time.perf_counter() - begin
                info = batch["info"]
                return LocalStep(
                    step=info.step, seconds=seconds, loss_tokens=info.step_loss_tokens, micro_batches=done
                )
        raise RuntimeError(
            f"the loader ended after {len(done)} micro-batches of a step: no step was complete"
        )

    def micro_batch(self, batch: Batch) -> LocalMicroBatch:
        """Forward, backward and reduction of one micro-batch."""
        info = batch["info"]
        begin, begin_compute = time.perf_counter(), time.thread_time()
        loss_sum = 0.0
        if info.num_tokens:
            loss = self.model.loss(
                batch["input_ids"][0], batch["labels"][0], batch["position_ids"][0], batch["cu_seqlens"]
            )
            (loss / info.step_loss_tokens).backward()
            loss_sum = loss.item()
        compute, elapsed = time.thread_time() - begin_compute, time.perf_counter() - begin
        dist.all_reduce(self._gradients)
        self._sum += self._gradients
        self._gradients.zero_()
        lengths = batch["cu_seqlens"].diff().tolist()
        return LocalMicroBatch(
            loss_sum=loss_sum,
            compute=compute,
            elapsed=elapsed,
            predicted=float(self.cost.cost(MetadataTable.from_tokens(lengths)).sum()),
            tokens=info.num_tokens,
            padding=info.num_padding,
            samples=dict(zip(batch.get("sample", ()), lengths, strict=True)),
        )

    def update(self) -> None:
        """The optimizer step, on the gradients of all micro-batches."""
        self._gradients.copy_(self._sum)
        self.optimizer.step()
        self._gradients.zero_()
        self._sum.zero_()


def gather(local: LocalStep) -> list[StepRecord]:
    """The step over all ranks on rank 0, nothing elsewhere."""
    ranks: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(local, ranks)
    return [] if ranks is None else [StepRecord.of(ranks)]
