"""Times the model on rows of different shapes, so that the cost model predicts seconds of this machine."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from evenstep.cost import FittedCost, fit_cost
from evenstep.demo.model import Gpt

__all__ = ["calibrate"]


def calibrate(model: Gpt, seq_len: int) -> FittedCost:
    """Seconds per token and per pair of tokens of a document, the same model on every rank.

    All ranks measure at the same time, as they compute at the same time in training. Seconds are those of
    the processor, and the fastest rank counts: what disturbs a measurement only makes it slower.
    """
    shapes = _shapes(seq_len)
    _seconds(model, shapes[-1])  # the first run allocates
    local = []
    for shape in shapes:
        dist.barrier()
        local.append(_seconds(model, shape))
    fastest = torch.tensor(local, dtype=torch.float64)
    dist.all_reduce(fastest, dist.ReduceOp.MIN)
    model.zero_grad(set_to_none=False)
    return fit_cost(shapes, fastest.numpy())


def _shapes(seq_len: int) -> list[list[int]]:
    """Document lengths of rows from one giant to many small ones, and of rows that are not full."""
    whole = [[seq_len // parts] * parts for parts in (1, 2, 4, 16)]
    partial = [[seq_len // 2 + seq_len // 4], [seq_len // 2], [seq_len // 4], [seq_len // 32] * 8]
    return whole + partial


def _seconds(model: Gpt, lengths: list[int]) -> float:
    total = sum(lengths)
    tokens = torch.arange(total) % model.config.vocabulary
    positions = torch.cat([torch.arange(length) for length in lengths])
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    begin = time.thread_time()
    model.loss(tokens, tokens, positions, ends).backward()
    return time.thread_time() - begin
