"""A training script whose step raises ends, whatever its variables still hold when the interpreter clears them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gloo

SCRIPT = """
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from evenstep import LoaderConfig, StepSampler, build_loader

rank, rendezvous = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
documents = [{"input_ids": torch.arange(1 + index * 7 % 50)} for index in range(400)]
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
sampler = StepSampler(len(documents), global_batch_size=4)
with build_loader(documents, mesh, LoaderConfig(seq_len=64), sampler=sampler) as loader:
    for step, batch in enumerate(loader):
        if step == 3 and rank == 1:
            time.sleep(0.5)  # until the other rank waits for this one in its backward pass
            raise FloatingPointError("the loss is not finite")
        model(batch["input_ids"].sum().float().reshape(1, 1)).sum().backward()
"""


def test_a_script_whose_step_raises_ends_while_its_peer_waits(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), (tmp_path / "rendezvous").as_uri()], stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        told = [rank.communicate(timeout=60)[1] for rank in ranks[::-1]][::-1]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert "FloatingPointError: the loss is not finite" in told[1]
    assert [rank.returncode for rank in ranks] == [1, 1], told
