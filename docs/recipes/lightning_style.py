"""The shape of a Lightning program: a module, a data module, and a fit loop that asks for ``len`` and ``set_epoch``.

The small `Trainer` below does what Lightning's does with a loader, so that the file runs without it. With Lightning,
keep `Module` (manual optimization) and `Data`, and call ``lightning.Trainer(...).fit(module, datamodule=data)``.

torchrun --nproc-per-node 2 docs/recipes/lightning_style.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy

from evenstep import Loader, LoaderConfig, StepSampler, build_loader

VOCAB, SEQ_LEN, GLOBAL_BATCH = 64, 96, 16


class Documents:
    """Stands for your dataset."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.arange(index, index + 2 + index * index * 37 % 90) % VOCAB}


class Module(nn.Module):
    """A LightningModule with ``automatic_optimization = False``: the batch says when the optimizer steps."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """One optimizer."""
        return torch.optim.AdamW(self.parameters(), 1e-2)

    def training_step(self, batch: dict[str, Any], _batch_idx: int) -> torch.Tensor:
        """This micro-batch's share of the step's loss, already divided by the tokens of all ranks."""
        logits = self.model(batch["input_ids"])[:, :-1].flatten(0, 1)
        loss = cross_entropy(logits, batch["labels"][:, 1:].flatten(), reduction="sum")
        total: int = batch["info"].step_loss_tokens
        return loss / total


class Data:
    """A LightningDataModule whose state is the loader's cursor."""

    def __init__(self) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
        documents = Documents()
        self.loader = build_loader(
            documents,
            mesh,
            LoaderConfig(seq_len=SEQ_LEN, micro_batch_size=2),
            sampler=StepSampler(len(documents), global_batch_size=GLOBAL_BATCH),
        )

    def train_dataloader(self) -> Loader[dict[str, Any]]:
        """The loader as it is; no distributed sampler is to be put into it (``use_distributed_sampler=False``)."""
        return self.loader

    def state_dict(self) -> dict[str, Any]:
        """Beside the model in the checkpoint."""
        return self.loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue there."""
        self.loader.load_state_dict(state_dict)


class Trainer:
    """As much of a fit loop as a loader notices."""

    def __init__(self, max_epochs: int, max_steps: int) -> None:
        self.max_epochs, self.max_steps = max_epochs, max_steps

    def fit(self, module: Module, data: Data, checkpoint: Path) -> None:
        """Train up to ``max_steps`` and write a checkpoint."""
        optimizer = module.configure_optimizers()
        if checkpoint.exists():
            saved = torch.load(checkpoint)
            module.load_state_dict(saved["state_dict"])
            optimizer.load_state_dict(saved["optimizer"])
            data.load_state_dict(saved["datamodule"])
        loader = data.train_dataloader()
        batches_per_epoch = len(loader)
        for epoch in range(loader.state_dict()["epoch"], self.max_epochs):
            if loader.step == self.max_steps:
                break
            loader.set_epoch(epoch)  # nothing happens in the epoch of a resumed loader
            for batch_idx, batch in enumerate(loader):
                assert batch_idx < batches_per_epoch
                module.training_step(batch, batch_idx).backward()
                if batch["info"].is_last_micro_batch:
                    self._step(module, optimizer)
                if loader.step == self.max_steps:
                    break
        if dist.get_rank() == 0:
            state = {"state_dict": module.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "datamodule": data.state_dict()}, checkpoint)
        dist.barrier()

    def _step(self, module: Module, optimizer: torch.optim.Optimizer) -> None:
        for parameter in module.parameters():
            dist.all_reduce(parameter.grad)  # the sum, since the loss was divided by the tokens of all ranks
        optimizer.step()
        optimizer.zero_grad()


def train(folder: Path, steps: int) -> list[torch.Tensor]:
    """Train up to optimizer step ``steps``, from the checkpoint in ``folder`` if there is one; the parameters."""
    module, data = Module(), Data()
    with data.loader:
        Trainer(max_epochs=8, max_steps=steps).fit(module, data, folder / "last.ckpt")
    return [parameter.detach() for parameter in module.parameters()]


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
