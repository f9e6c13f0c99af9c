"""The shape of an Accelerate loop: ``prepare`` all but the loader, ``backward``, ``save_state`` of registered objects.

The small `Accelerator` below does what Accelerate's does here, so that the file runs without it. With Accelerate,
import that one instead; the loader is not prepared, because it hands out each rank's own share already.

torchrun --nproc-per-node 2 docs/recipes/accelerate_style.py
"""

from __future__ import annotations

import tempfile
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from evenstep import Loader, LoaderConfig, Objective, StepSampler, build_loader

VOCAB, SEQ_LEN = 64, 96


class Documents:
    """Stands for a tokenised Hugging Face dataset with a prompt that carries no loss."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.arange(index, index + 2 + index * index * 37 % 90) % VOCAB
        labels = tokens.clone()
        labels[: len(tokens) // 4] = -100
        return {"input_ids": tokens, "labels": labels}


class Accelerator:
    """As much of Accelerate's as this loop needs."""

    def __init__(self) -> None:
        self.num_processes, self.is_main_process = dist.get_world_size(), dist.get_rank() == 0
        self._parts: list[Any] = []

    def prepare(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[Any, torch.optim.Optimizer]:
        """Wrap the model, and keep both for checkpoints."""
        self._parts += [model, optimizer]
        return DistributedDataParallel(model), optimizer

    def no_sync(self, model: Any) -> AbstractContextManager[None]:
        """Gradients stay on their rank."""
        context: AbstractContextManager[None] = model.no_sync()
        return context

    def backward(self, loss: torch.Tensor) -> None:
        """Accelerate divides by its own ``gradient_accumulation_steps``; leave that at 1."""
        loss.backward()

    def register_for_checkpointing(self, *parts: Any) -> None:
        """Anything with ``state_dict`` and ``load_state_dict``."""
        self._parts += parts

    def save_state(self, folder: Path) -> None:
        """Write everything that was prepared or registered."""
        if self.is_main_process:
            torch.save([part.state_dict() for part in self._parts], folder / "state.pt")
        dist.barrier()

    def load_state(self, folder: Path) -> None:
        """Read it again."""
        for part, state in zip(self._parts, torch.load(folder / "state.pt"), strict=True):
            part.load_state_dict(state)


def make_loader() -> Loader[dict[str, Any]]:
    """Steps of 16 conversations, packed into as few micro-batches as fit: what fine-tuning wants."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    config = LoaderConfig(seq_len=SEQ_LEN, accumulation_steps="auto", objective=Objective(sync="step"))
    documents = Documents()
    return build_loader(documents, mesh, config, sampler=StepSampler(len(documents), global_batch_size=16))


def train(folder: Path, steps: int) -> list[torch.Tensor]:
    """Train up to optimizer step ``steps``, from the checkpoint in ``folder`` if there is one; the parameters."""
    torch.manual_seed(0)
    accelerator = Accelerator()
    plain = nn.Sequential(nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB))
    model, optimizer = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters(), 1e-2))
    with make_loader() as loader:
        accelerator.register_for_checkpointing(loader)
        if (folder / "state.pt").exists():
            accelerator.load_state(folder)
        while loader.step < steps:
            for batch in loader:
                info = batch["info"]
                with nullcontext() if info.is_last_micro_batch else accelerator.no_sync(model):
                    logits = model(batch["input_ids"])[:, :-1].flatten(0, 1)
                    loss = cross_entropy(logits, batch["labels"][:, 1:].flatten(), reduction="sum")
                    accelerator.backward(loss * accelerator.num_processes / info.step_loss_tokens)
                if not info.is_last_micro_batch:
                    continue
                optimizer.step()
                optimizer.zero_grad()
                if loader.step == steps:
                    break
        accelerator.save_state(folder)
    return [parameter.detach() for parameter in plain.parameters()]


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
