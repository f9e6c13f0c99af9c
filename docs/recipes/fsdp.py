"""FSDP2 with a distributed checkpoint: every micro-batch ends with a collective, so each must be even.

torchrun --nproc-per-node 2 docs/recipes/fsdp.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from evenstep import Loader, LoaderConfig, TokenBudgetSampler, build_loader, collate_varlen
from evenstep.packing import block_diagonal_mask, document_ids

VOCAB, WIDTH, SEQ_LEN = 64, 16, 96


class Documents:
    """Stands for your dataset, whose lengths you know."""

    def __init__(self) -> None:
        self.lengths = 2 + np.arange(192) ** 2 * 37 % 90

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.arange(index, index + int(self.lengths[index])) % VOCAB}


class Model(nn.Module):
    """Stands for yours: one layer whose attention stays inside documents."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The sum of the token losses of one flat sequence."""
        x = self.embedding(input_ids)
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, dim=-1)
        attended = scaled_dot_product_attention(q, k, v, attn_mask=mask).squeeze(1)
        logits = self.head(x + attended)
        return cross_entropy(logits[0, :-1], labels[0, 1:], reduction="sum")


def make_loader(mesh: DeviceMesh) -> Loader[dict[str, Any]]:
    """Full rows of known lengths: nothing is read twice and no payload moves between ranks."""
    documents = Documents()
    return build_loader(
        documents,
        mesh,
        LoaderConfig(seq_len=SEQ_LEN, micro_batch_size=2),
        sampler=TokenBudgetSampler(documents.lengths, rows_per_step=8, seq_len=SEQ_LEN),
        # With the loss tokens known too, every batch can tell those of its whole step.
        metadata={"tokens": documents.lengths, "loss_tokens": documents.lengths - 1},
        collate=collate_varlen,
    )


class Training(Stateful):
    """Model and optimizer as one part of a distributed checkpoint."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        """Sharded state of both."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Put the state into both."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )


def train(folder: Path, steps: int) -> list[torch.Tensor]:
    """Train up to optimizer step ``steps``, from the last checkpoint in ``folder`` if there is one; the parameters."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    model = Model()
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    with make_loader(mesh) as loader:
        # The loader is Stateful as it is; its state is the same on every rank.
        checkpoint = {"training": Training(model, optimizer), "loader": loader}
        finished = sorted(folder.glob("step-*/.metadata"))
        if finished:
            dcp.load(checkpoint, checkpoint_id=finished[-1].parent)
        while loader.step < steps:
            for batch in loader:
                info = batch["info"]
                mask = block_diagonal_mask(document_ids(batch))
                loss = model(batch["input_ids"], batch["labels"], mask)
                # FSDP divides by the number of ranks, step_loss_tokens counts those of all ranks already.
                (loss * dist.get_world_size() / info.step_loss_tokens).backward()
                if not info.is_last_micro_batch:
                    continue
                optimizer.step()
                optimizer.zero_grad()
                if loader.step == steps:
                    break
        dcp.save(checkpoint, checkpoint_id=folder / f"step-{steps:06d}")
    return [parameter.full_tensor().detach() for parameter in model.parameters()]  # type: ignore[attr-defined]


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
