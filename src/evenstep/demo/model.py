"""A small GPT whose attention is computed per document, so that its cost is that of real packed training."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody uses
from torch import Tensor, nn

__all__ = ["Gpt", "GptConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GptConfig:
    """Shape of the model.

    Attributes:
        vocabulary: Number of tokens.
        width: Features of a token.
        layers: Transformer blocks.
        heads: Attention heads; they divide ``width``.
    """

    vocabulary: int
    width: int = 128
    layers: int = 2
    heads: int = 4


class Gpt(nn.Module):
    """A decoder with pre-norm blocks, sinusoidal positions and tied embeddings.

    It takes documents one after another with their boundaries. Nothing mixes two documents: their logits are
    those of running each alone.
    """

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding: nn.Embedding = nn.Embedding(config.vocabulary, config.width)
        nn.init.normal_(self.embedding.weight, std=1 / math.sqrt(config.width))  # logits start near N(0, 1)
        self.blocks: nn.ModuleList = nn.ModuleList(_Block(config) for _ in range(config.layers))
        self.norm: nn.LayerNorm = nn.LayerNorm(config.width)

    def forward(self, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Features of each token, ``[tokens, width]``.

        Args:
            input_ids: int64 ``[tokens]``.
            position_ids: int64 ``[tokens]``, from 0 in each document.
            cu_seqlens: int32 ``[documents + 1]``, from 0 to ``tokens``.
        """
        lengths = cu_seqlens.diff().tolist()
        x = self.embedding(input_ids) + _sinusoids(position_ids, self.config.width)
        for block in self.blocks:
            x = block(x, lengths)
        return torch.as_tensor(self.norm(x))

    def logits(self, features: Tensor) -> Tensor:
        """Scores of the next token, ``[tokens, vocabulary]``."""
        return features @ self.embedding.weight.T

    def loss(self, input_ids: Tensor, labels: Tensor, position_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Sum of the cross entropy over the labels that are not -100.

        Args:
            input_ids: int64 ``[tokens]``.
            labels: int64 ``[tokens]``, unshifted: the label of a token is predicted at the token before it.
            position_ids: As in `forward`.
            cu_seqlens: As in `forward`.
        """
        features = self(input_ids, position_ids, cu_seqlens)[:-1]
        return F.cross_entropy(self.logits(features), labels[1:], ignore_index=-100, reduction="sum")


class _Block(nn.Module):
    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, lengths: list[int]) -> Tensor:
        tokens, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(tokens, 3, self.heads, width // self.heads)
        # split, not slices: the backward of each slice would write zeros to the whole row.
        q, k, v = (part.split(lengths, dim=1) for part in qkv.permute(1, 2, 0, 3))
        attended = torch.cat([_attend(*document) for document in zip(q, k, v, strict=True)], dim=1)
        x = x + self.out(attended.transpose(0, 1).reshape(tokens, width))
        return x + torch.as_tensor(self.down(F.gelu(self.up(self.norm_mlp(x)))))


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention inside one document, ``[heads, length, head width]``."""
    return torch.as_tensor(F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0])


def _sinusoids(position_ids: Tensor, width: int) -> Tensor:
    """Positions as in "Attention Is All You Need" (Vaswani et al., 2017): no parameters, any length."""
    frequencies = torch.exp(torch.arange(0, width, 2) * (-9.210340371976184 / width))  # ln(10000)
    angles = position_ids[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=1) / math.sqrt(width)
