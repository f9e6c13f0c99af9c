"""The shape of a Megatron-LM script with an external loader: a cyclic iterator, ``save_state``, one file per dp rank.

torchrun --nproc-per-node 2 docs/recipes/megatron_style.py
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy

from evenstep import Loader, LoaderConfig, StepSampler, build_loader, pack_text

VOCAB, SEQ_LEN, MICRO_BATCH, GLOBAL_BATCH = 64, 96, 2, 16
IGNORED = -100


class Documents:
    """Stands for an indexed dataset."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.arange(index, index + 2 + index * index * 37 % 90) % VOCAB}


class ExternalLoader:
    """What Megatron-LM takes with ``--dataloader-type external``: an iterator whose ``iterable`` has ``save_state``."""

    def __init__(self, iterable: Loader[dict[str, Any]]) -> None:
        self.iterable = iterable
        self._batches = self._cycle()

    def _cycle(self) -> Iterator[dict[str, Any]]:
        while True:
            yield from self.iterable

    def __iter__(self) -> ExternalLoader:
        return self

    def __next__(self) -> dict[str, Any]:
        return next(self._batches)


def train_datasets_provider() -> ExternalLoader:
    """Megatron shifts labels in the loader, so the packer does."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    documents = Documents()
    loader = build_loader(
        documents,
        mesh,
        LoaderConfig(seq_len=SEQ_LEN, micro_batch_size=MICRO_BATCH),
        sampler=StepSampler(len(documents), global_batch_size=GLOBAL_BATCH, seed=7),
        pack=functools.partial(pack_text, shifted=True),
    )
    return ExternalLoader(loader)


def get_batch(data_iterator: Iterator[dict[str, Any]]) -> tuple[Any, ...]:
    """Tokens, labels, loss mask, position ids, and what the batch says of itself."""
    batch = next(data_iterator)
    loss_mask = (batch["labels"] != IGNORED).float()
    return batch["input_ids"], batch["labels"], loss_mask, batch["position_ids"], batch["info"]


def forward_step(
    data_iterator: Iterator[dict[str, Any]], model: nn.Module
) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """Per-token losses and the function that makes one number of them."""
    tokens, labels, loss_mask, _, info = get_batch(data_iterator)
    losses = cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="none")

    def loss_function(output: torch.Tensor) -> torch.Tensor:
        # With --calculate-per-token-loss Megatron sums token counts over ranks after the step; this one is known.
        total: int = info.step_loss_tokens
        return (output * loss_mask.flatten()).sum() / total

    return losses, loss_function


def save_dataloader_state(iterator: ExternalLoader, folder: Path) -> None:
    """One file per dp rank, as Megatron writes them; they are all equal, so any one resumes any number of ranks."""
    state = {"dataloader_state_dict": iterator.iterable.save_state()}
    torch.save(state, folder / f"train_dataloader_dprank{dist.get_rank():03d}.pt")


def train(folder: Path, steps: int) -> list[torch.Tensor]:
    """Train up to iteration ``steps``, from the checkpoint in ``folder`` if there is one; the parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    iterator = train_datasets_provider()
    if (folder / "model.pt").exists():
        saved = torch.load(folder / "model.pt")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        saved = torch.load(folder / "train_dataloader_dprank000.pt")
        iterator.iterable.load_state_dict(saved["dataloader_state_dict"])
    num_microbatches = GLOBAL_BATCH // (MICRO_BATCH * dist.get_world_size())
    for _ in range(iterator.iterable.step, steps):
        optimizer.zero_grad()
        for _ in range(num_microbatches):
            output, loss_function = forward_step(iterator, model)
            loss_function(output).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
    if dist.get_rank() == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "model.pt")
    save_dataloader_state(iterator, folder)
    dist.barrier()
    iterator.iterable.close()
    return [parameter.detach() for parameter in model.parameters()]


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
