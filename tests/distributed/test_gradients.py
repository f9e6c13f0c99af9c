"""Law 8: balancing and packing change where a sample is trained on, never the gradient of the step."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from evenstep import LoaderConfig, StepSampler, TokenBudgetSampler, build_loader, collate_rows, collate_varlen
from evenstep.testing import run_ranks

SEQ_LEN = 24
VOCAB = 11
TOLERANCE = 1e-10
IGNORED = -100

KINDS = ("one sample a row", "token budget", "auto")
COLLATE = {"rows": collate_rows, "varlen": collate_varlen}


class Dataset:
    """Documents with a prompt whose tokens carry no loss; one is nothing but prompt, one is empty."""

    def __init__(self, n: int = 40) -> None:
        rng = np.random.default_rng(7)
        self.lengths = np.minimum(rng.geometric(0.12, n), SEQ_LEN)
        self.lengths[3] = 0
        self.prompts = rng.integers(0, self.lengths // 2 + 1)
        self.prompts[5] = self.lengths[5]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(1, VOCAB, (int(self.lengths[index]),), generator=generator)
        labels = ids.clone()
        labels[: int(self.prompts[index])] = IGNORED
        return {"input_ids": ids, "labels": labels}


class Model(nn.Module):
    """One causal attention layer that attends inside documents only, in float64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB, 8)
        self.position = nn.Embedding(SEQ_LEN, 8)
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, VOCAB)
        self.double()

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, allowed: torch.Tensor) -> Any:
        x = self.embedding(input_ids) + self.position(position_ids)
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = (q @ k.transpose(-1, -2)).masked_fill(~allowed, float("-inf"))
        return self.out(x + torch.nan_to_num(scores.softmax(-1)) @ v)


def loss_sum(model: Model, batch: dict[str, Any]) -> torch.Tensor:
    """The sum of token losses, as a Hugging Face model shifts them."""
    ids, positions = batch["input_ids"], batch["position_ids"]
    # A document begins where positions restart; padding attends to itself at most.
    document = (positions == 0).cumsum(-1)
    allowed = (document[..., :, None] == document[..., None, :]) & torch.ones(
        ids.shape[-1], ids.shape[-1], dtype=torch.bool
    ).tril()
    logits = model(ids, positions, allowed)
    return nn.functional.cross_entropy(
        logits[..., :-1, :].reshape(-1, VOCAB),
        batch["labels"][..., 1:].reshape(-1),
        ignore_index=IGNORED,
        reduction="sum",
    )


def alone(model: Model, indices: list[int]) -> list[torch.Tensor]:
    """The gradient of a step as one big batch: every document by itself, neither packed nor padded."""
    dataset, total, tokens = Dataset(), torch.zeros((), dtype=torch.float64), 0
    for index in indices:
        sample = dataset[index]
        if not len(sample["input_ids"]):
            continue
        batch = {name: value[None] for name, value in sample.items()}
        batch["position_ids"] = torch.arange(len(sample["input_ids"]))[None]
        total = total + loss_sum(model, batch)
        tokens += int((sample["labels"][1:] != IGNORED).sum())
    model.zero_grad()
    (total / tokens).backward()
    return gradients(model)


def gradients(model: Model) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def sampler_of(kind: str) -> Any:
    dataset = Dataset()
    if kind == "token budget":
        return TokenBudgetSampler(dataset.lengths, rows_per_step=8, seq_len=SEQ_LEN, seed=1)
    return StepSampler(len(dataset), global_batch_size=16, seed=1)


def one_step(rank: int, layout: str, kind: str, algorithm: str) -> tuple[list[torch.Tensor], list[int], int]:
    """The gradient of the first step on all ranks, what this rank trained on in it, and how many samples moved."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    config = LoaderConfig(
        seq_len=SEQ_LEN,
        micro_batch_size=2,
        accumulation_steps="auto" if kind == "auto" else None,
        algorithm=algorithm,  # type: ignore[arg-type]
        host_prefetch=0,
    )
    model, used, moved = Model(), [], 0
    members = {tuple(Dataset()[i]["input_ids"].tolist()): i for i in range(len(Dataset()))}
    with build_loader(Dataset(), mesh, config, sampler=sampler_of(kind), collate=COLLATE[layout]) as loader:
        for batch in loader:
            info = batch["info"]
            assert info.step_loss_tokens is not None
            (loss_sum(model, batch) / info.step_loss_tokens).backward()
            used += documents_of(batch, members)
            if loader.last_balance is not None:
                moved = loader.last_balance.moved_samples
            if info.is_last_micro_batch:
                break
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)  # the sum: step_loss_tokens is already the number of all ranks
    return gradients(model), used, moved


def documents_of(batch: dict[str, Any], members: dict[tuple[int, ...], int]) -> list[int]:
    """Dataset indices of the documents in a batch, by their tokens."""
    ids, positions = batch["input_ids"].flatten(), batch["position_ids"].flatten()
    starts = [*torch.nonzero(positions == 0).flatten().tolist(), len(ids)]
    pieces = [tuple(ids[a:b].tolist()) for a, b in itertools.pairwise(starts)]
    return [members[piece] for piece in pieces if any(piece)]


def steps(rank: int, layout: str) -> dict[tuple[str, str], Any]:
    """The first step of every kind of stream, balanced and not."""
    return {(kind, how): one_step(rank, layout, kind, how) for kind in KINDS for how in ("auto", "reference")}


@pytest.mark.gloo
@pytest.mark.parametrize("layout", COLLATE)
@pytest.mark.parametrize("world", [2, 4])
def test_gradients_are_those_of_the_unbalanced_step_and_of_one_big_batch(world: int, layout: str) -> None:
    ranks = run_ranks(steps, world, layout)
    lengths = Dataset().lengths
    for kind in KINDS:
        sampler = sampler_of(kind)
        step = sampler.step_at(sampler.start())
        members = sorted(i for i in step.indices.tolist() if i >= 0 and lengths[i])
        expected = alone(Model(), members)
        assert max(float(g.abs().max()) for g in expected) > 1e-3
        balanced = [outcome[kind, "auto"] for outcome in ranks]
        reference = [outcome[kind, "reference"] for outcome in ranks]
        for outcome in (balanced, reference):
            assert sorted(i for _, used, _ in outcome for i in used) == members
            for found, _, _ in outcome:
                for mine, wanted in zip(found, expected, strict=True):
                    torch.testing.assert_close(mine, wanted, rtol=TOLERANCE, atol=TOLERANCE)
        assert [used for _, used, _ in balanced] != [used for _, used, _ in reference], "nothing was balanced"
        assert any(moved for _, _, moved in balanced)
        if kind != "auto":  # whose blocks of samples shift where an empty sample was left out
            assert not any(moved for _, _, moved in reference)
