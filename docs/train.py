"""Train on a folder of text: torchrun --standalone --nproc-per-node 2 train.py FOLDER STEPS"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from evenstep import LoaderConfig, StepSampler, build_loader
from evenstep.datasets import SplitDocuments, TextFolder
from evenstep.packing import block_diagonal_mask, document_ids


class Model(nn.Module):  # stands for yours: one layer over bytes
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(256, 64)
        self.layer = nn.TransformerEncoderLayer(64, 1, 256, dropout=0.0, batch_first=True)
        self.head = nn.Linear(64, 256)

    def forward(self, ids, mask):
        return self.head(self.layer(self.embedding(ids), ~mask.squeeze(1)))


folder, steps, checkpoint = Path(sys.argv[1]), int(sys.argv[2]), Path("checkpoint.pt")
dist.init_process_group("gloo")
ranks = dist.get_world_size()
mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
files = TextFolder(folder, pattern="*.txt")  # their bytes are the tokens
texts = SplitDocuments(files, 512)  # a long one is several samples
config = LoaderConfig(seq_len=512, accumulation_steps="auto")
torch.manual_seed(0)
model = Model()
parallel, optimizer = DistributedDataParallel(model), torch.optim.AdamW(model.parameters(), 1e-3)
with build_loader(texts, mesh, config, sampler=StepSampler(len(texts), global_batch_size=16)) as loader:
    parts = {"model": model, "optimizer": optimizer, "loader": loader}
    if checkpoint.exists():  # of any number of ranks
        for name, state in torch.load(checkpoint).items():
            parts[name].load_state_dict(state)
    if dist.get_rank() == 0:
        print(f"{len(texts)} samples of {len(files)} files, from step {loader.step}")
    while loader.step < steps:
        for batch in loader:  # an epoch, or the rest of one
            info = batch["info"]
            logits = parallel(batch["input_ids"], block_diagonal_mask(document_ids(batch)))
            loss = cross_entropy(
                logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum"
            )
            (loss * ranks / info.step_loss_tokens).backward()  # DDP divides by the number of ranks
            if not info.is_last_micro_batch:
                continue
            optimizer.step()
            optimizer.zero_grad()
            if dist.get_rank() == 0 and loader.step % 5 == 0:
                torch.save({name: part.state_dict() for name, part in parts.items()}, "unfinished.pt")
                Path("unfinished.pt").replace(checkpoint)  # whole, or not at all
                print(f"step {loader.step}: saved")
            if loader.step == steps:
                break
dist.destroy_process_group()
