"""Plain DistributedDataParallel: gradients meet once a step, so ranks must be even over the whole step.

torchrun --nproc-per-node 2 docs/recipes/plain_ddp.py
"""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

from evenstep import Loader, LoaderConfig, Objective, StepSampler, build_loader
from evenstep.packing import block_diagonal_mask, document_ids

VOCAB, WIDTH, SEQ_LEN = 64, 16, 96


class Documents:
    """Stands for your dataset: documents of very different lengths."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.arange(index, index + 2 + index * index * 37 % 90) % VOCAB}


class Model(nn.Module):
    """Stands for yours: one layer whose attention stays inside documents."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Logits ``[rows, seq_len, vocabulary]``."""
        x = self.embedding(input_ids)
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, dim=-1)
        attended = scaled_dot_product_attention(q, k, v, attn_mask=mask).squeeze(1)
        logits: torch.Tensor = self.head(x + attended)
        return logits


def make_loader() -> Loader[dict[str, Any]]:
    """Steps of 16 documents in as few micro-batches as fit, even over the step."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    config = LoaderConfig(
        seq_len=SEQ_LEN,
        micro_batch_size=1,
        accumulation_steps="auto",
        objective=Objective(sync="step"),  # under no_sync ranks wait for each other once a step
    )
    documents = Documents()
    return build_loader(documents, mesh, config, sampler=StepSampler(len(documents), global_batch_size=16))


def train(folder: Path, steps: int) -> list[torch.Tensor]:
    """Train up to optimizer step ``steps``, from the checkpoint in ``folder`` if there is one; the parameters."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    parallel = DistributedDataParallel(model)
    checkpoint = folder / "checkpoint.pt"
    with make_loader() as loader:
        if checkpoint.exists():
            saved = torch.load(checkpoint)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            loader.load_state_dict(saved["loader"])
        while loader.step < steps:
            for batch in loader:  # an epoch, or the rest of one
                info = batch["info"]
                with nullcontext() if info.is_last_micro_batch else parallel.no_sync():
                    logits = parallel(batch["input_ids"], block_diagonal_mask(document_ids(batch)))
                    loss = cross_entropy(
                        logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum"
                    )
                    # DDP divides by the number of ranks, step_loss_tokens counts those of all ranks already.
                    (loss * dist.get_world_size() / info.step_loss_tokens).backward()
                if not info.is_last_micro_batch:
                    continue
                optimizer.step()
                optimizer.zero_grad()
                if loader.step == steps:
                    break
        if dist.get_rank() == 0:
            parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": loader}
            torch.save({name: part.state_dict() for name, part in parts.items()}, checkpoint)
        dist.barrier()
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
