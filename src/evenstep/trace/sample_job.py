"""A small job to look at: heavy-tailed documents, and training steps that last as long as their rows are costly."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from evenstep.build import build_loader
from evenstep.config import LoaderConfig
from evenstep.cost import LinearQuadraticCost
from evenstep.sampling import StepSampler
from evenstep.timeline import Timeline

__all__ = ["record"]

_SEQ_LEN = 4096
_SECONDS = 0.03 / (_SEQ_LEN**2 / 2)  # a row of one long document "trains" for 30 ms
_SAMPLES = 8  # per rank and step


class _Documents:
    """``length[i]`` tokens each; making them takes as long as reading a small file."""

    def __init__(self, number: int) -> None:
        lengths = np.random.default_rng(0).lognormal(6.3, 1.1, number)
        self._lengths = np.clip(lengths, 32, _SEQ_LEN).astype(np.int64)

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = torch.randint(
            1, 50_000, (int(self._lengths[index]),), generator=torch.Generator().manual_seed(index)
        )
        time.sleep(0.0005)
        return {"input_ids": tokens}


def record(rank: int, steps: int, folder: Path) -> None:  # noqa: ARG001 - run_ranks passes it
    """Run ``steps`` optimizer steps on this rank and write ``folder/rank-<rank>.json``.

    One before them warms up: it trains too, so that the loader is as far ahead as it is later on; one behind them is what it
    is ahead to.
    """
    ranks = dist.get_world_size()
    documents = _Documents(_SAMPLES * ranks * (steps + 2))
    loader = build_loader(
        documents,
        init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",)),
        LoaderConfig(seq_len=_SEQ_LEN, accumulation_steps="auto"),
        sampler=StepSampler(len(documents), global_batch_size=_SAMPLES * ranks, seed=0),
        cost=LinearQuadraticCost(0.0, 1.0),
    )
    with loader:
        for batch in loader:
            _train(batch)
            if batch["info"].is_last_micro_batch:
                break
        dist.barrier()
        with Timeline(loader, folder) as timeline:
            for batch in loader:
                with timeline.span("train"):
                    _train(batch)
                with timeline.span("gradients"):
                    dist.barrier()
                if loader.step > steps:
                    break


def _train(batch: dict[str, Any]) -> None:
    # Positions within a document add up to half the square of its length.
    time.sleep(_SECONDS * float(batch["position_ids"].sum()))
