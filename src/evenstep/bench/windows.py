"""Counts what a whole loader says to the other ranks: collectives and bytes per window."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from evenstep.build import build_loader
from evenstep.comm.plane import DataPlane
from evenstep.comm.process_group import ProcessGroupCommunicator
from evenstep.config import LoaderConfig
from evenstep.sampling import StepSampler

__all__ = ["count_collectives"]

_MICRO_BATCHES = 4
_SEQ_LEN = 4096


class _Documents:
    """Lengths as in web text: many short, a few long."""

    def __init__(self, count: int) -> None:
        lengths = np.random.default_rng(0).lognormal(6.5, 1.0, count)
        self._lengths = np.clip(lengths, 16, _SEQ_LEN).astype(np.int64).tolist()
        self.read_bytes = 0

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.read_bytes += 8 * self._lengths[index]
        return {"input_ids": torch.arange(self._lengths[index])}


def count_collectives(windows: int = 16) -> dict[str, Any]:
    """Run one epoch of ``windows`` windows; this rank's counts, without the header that ends the epoch.

    Raises:
        RuntimeError: The default process group has one rank.
    """
    ranks = dist.get_world_size()
    plane = DataPlane.from_mesh(
        init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",)), timeout=timedelta(minutes=5)
    )
    group = plane.payload
    if not isinstance(group, ProcessGroupCommunicator):
        raise RuntimeError("one rank has nobody to talk to; start at least two")
    calls_before, sent_before = Counter(group.calls), Counter(group.sent_bytes)  # while building
    rows = ranks * _MICRO_BATCHES
    dataset = _Documents(rows * windows)
    sampler = StepSampler(len(dataset), global_batch_size=rows)
    with build_loader(dataset, plane, LoaderConfig(seq_len=_SEQ_LEN), sampler=sampler) as loader:
        batches = sum(1 for _ in loader)
    calls, sent = group.calls - calls_before, group.sent_bytes - sent_before
    control = sum(calls.values()) - calls["all_to_all"] - 1
    return {
        "windows": windows,
        "micro_batches": batches,
        "control_per_window": control / windows,
        "exchanges_per_micro_batch": calls["all_to_all"] / batches,
        "control_bytes_per_window": (sum(sent.values()) - sent["all_to_all"]) / windows,
        "exchanged_bytes": sent["all_to_all"],
        "read_bytes": dataset.read_bytes,
    }
