"""The shape of a torchtitan trainer: parallel dims, a batch generator, accumulation inside ``train_step``.

torchrun --nproc-per-node 2 docs/recipes/torchtitan_style.py
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy

from evenstep import Loader, LoaderConfig, StepSampler, build_loader, pack_text

VOCAB = 64


@dataclass(frozen=True, kw_only=True)
class JobConfig:
    """The part of a job's configuration that a loader needs."""

    seq_len: int = 96
    local_batch_size: int = 2
    global_batch_size: int = 16
    steps: int = 8
    dp_replicate: int = 1
    dp_shard: int = 2


class Documents:
    """Stands for a tokenised text dataset."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.arange(index, index + 2 + index * index * 37 % 90) % VOCAB}


def build_text_dataloader(job: JobConfig) -> Loader[dict[str, Any]]:
    """What the train spec's ``build_dataloader_fn`` would be; add ``pp``, ``cp``, ``tp`` to the mesh as you have them."""
    mesh = init_device_mesh(
        "cpu", (job.dp_replicate, job.dp_shard), mesh_dim_names=("dp_replicate", "dp_shard")
    )
    documents = Documents()
    return build_loader(
        documents,
        mesh,
        LoaderConfig(seq_len=job.seq_len, micro_batch_size=job.local_batch_size),
        sampler=StepSampler(len(documents), global_batch_size=job.global_batch_size, seed=7),
        pack=functools.partial(pack_text, shifted=True),  # torchtitan's labels are shifted by the loader
    )


class Trainer:
    """Owns model, optimizer and loader, and is itself what the checkpoint holds."""

    def __init__(self, job: JobConfig, folder: Path) -> None:
        torch.manual_seed(0)
        self.job, self.folder = job, folder
        self.model = nn.Sequential(nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2)
        self.dataloader = build_text_dataloader(job)
        self.losses: list[float] = []

    def batch_generator(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor, Any]]:
        """``(inputs, labels, info)`` without end: epoch after epoch."""
        while True:
            for batch in self.dataloader:
                yield {"input": batch["input_ids"]}, batch["labels"], batch["info"]

    def train_step(self, batches: Iterator[tuple[dict[str, torch.Tensor], torch.Tensor, Any]]) -> None:
        """One optimizer step over all its micro-batches."""
        total = torch.zeros(())
        while True:
            inputs, labels, info = next(batches)
            logits = self.model(inputs["input"])
            loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            loss = loss / info.step_loss_tokens  # of all ranks: no reduction of token counts is needed
            loss.backward()
            total += loss.detach()
            if info.is_last_micro_batch:
                break
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)  # stands for FSDP's reduce-scatter with a divide factor of 1
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.all_reduce(total)
        self.losses.append(float(total))

    def train(self) -> None:
        """Up to the job's last step, then a checkpoint."""
        self.load()
        batches = self.batch_generator()
        while self.dataloader.step < self.job.steps:
            self.train_step(batches)
        self.save()
        self.dataloader.close()

    def save(self) -> None:
        """The loader's state is one small dictionary, the same on every rank."""
        parts: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "dataloader": self.dataloader,
        }
        if dist.get_rank() == 0:
            torch.save({name: part.state_dict() for name, part in parts.items()}, self.folder / "step.pt")
        dist.barrier()

    def load(self) -> None:
        """From the last checkpoint, if there is one."""
        if (self.folder / "step.pt").exists():
            saved = torch.load(self.folder / "step.pt")
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.dataloader.load_state_dict(saved["dataloader"])


def train(folder: Path, steps: int) -> list[torch.Tensor]:
    """Train up to optimizer step ``steps``, from the checkpoint in ``folder`` if there is one; the parameters."""
    trainer = Trainer(JobConfig(steps=steps, dp_shard=dist.get_world_size()), folder)
    trainer.train()
    return [parameter.detach() for parameter in trainer.model.parameters()]


def main() -> None:
    """Four steps, a new start from the checkpoint, and four more."""
    dist.init_process_group("gloo")
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    train(Path(folder[0]), 4)
    train(Path(folder[0]), 8)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
