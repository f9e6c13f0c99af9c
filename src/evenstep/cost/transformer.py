"""FLOPs of a transformer from its dimensions, so that nobody has to guess coefficients."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

import numpy as np
import numpy.typing as npt

from evenstep.cost.terms import checked_count, document_pairs, per_sample
from evenstep.samples import MetadataTable

__all__ = ["TransformerCost"]

_LEAST = {
    "hidden": 1,
    "layers": 1,
    "ffn": 0,
    "vocab": 0,
    "heads": 1,
    "kv_heads": 1,
    "head_dim": 1,
    "window": 1,
}
_FLAGS = ("gated", "causal", "padded", "checkpointing", "backward")


@dataclass(frozen=True, slots=True)
class TransformerCost:
    """FLOPs that a training step spends on each sample: ``per_token * tokens + attention per document``.

    Counts the matrix products of one forward and one backward pass, two FLOPs per multiplication with
    addition, as `torch.utils.flop_counter` does (norms, activations and the softmax are left out). Attention
    counts only the (query, key) pairs inside a document that the mask lets through. The backward pass of a
    matrix product is two of the forward's size; that of flash attention also computes the scores again, so it
    is 2.5 forwards (Dao et al., "FlashAttention-2", 2023).

    Attributes:
        hidden: Width of the residual stream.
        layers: Transformer layers.
        ffn: Inner width of a (dense) feed-forward.
        vocab: Rows of the output head; 0 for a model without one, such as an encoder.
        heads: Query heads; None means heads that fill ``hidden``.
        kv_heads: Key and value heads (grouped-query attention); None means ``heads``.
        head_dim: Width of a head; None means ``hidden / heads``.
        gated: Whether a feed-forward has three matrices (SwiGLU and the like) instead of two.
        causal: Whether a token sees only those before it.
        window: Sliding window in tokens, the token itself included; None means full attention.
        full_attention_layers: Layers that ignore ``window``.
        experts: Routed experts of a mixture-of-experts layer; 0 means a dense model.
        top_k: Routed experts that each token visits.
        expert_ffn: Inner width of a routed expert; None means ``ffn``.
        shared_experts: Experts of width ``expert_ffn`` that every token visits.
        dense_layers: Layers of a mixture-of-experts model whose feed-forward is dense.
        attention: ``"flash"`` (scores are computed again in the backward pass) or ``"eager"``.
        checkpointing: Whether every layer runs its whole forward pass a second time (activation checkpointing
            without torch's early stop, which spares the last product of a layer).
        backward: False counts the forward pass only (evaluation).
        padded: Whether the model computes padding tokens too; sets `padding`.

    Raises:
        TypeError: A field has the wrong type.
        ValueError: A dimension is out of range or contradicts another.
    """

    hidden: int
    layers: int
    ffn: int
    vocab: int
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    gated: bool = True
    causal: bool = True
    window: int | None = None
    full_attention_layers: int = 0
    experts: int = 0
    top_k: int = 0
    expert_ffn: int | None = None
    shared_experts: int = 0
    dense_layers: int = 0
    attention: Literal["flash", "eager"] = "flash"
    checkpointing: bool = False
    backward: bool = True
    padded: bool = False

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name in _FLAGS:
                if not isinstance(value, bool):
                    raise TypeError(f"{f.name} is {value!r} ({type(value).__name__}), expected True or False")
            elif f.name != "attention" and (value is not None or f.default is not None):
                object.__setattr__(self, f.name, checked_count(f.name, value, least=_LEAST.get(f.name, 0)))
        if self.attention not in ("flash", "eager"):
            raise ValueError(f"attention is {self.attention!r}, expected 'flash' or 'eager'")
        self._check_attention()
        self._check_experts()

    def _check_attention(self) -> None:
        if self.heads is None:
            for name in ("kv_heads", "head_dim"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} is {getattr(self, name)} but heads is None; give heads as well")
        elif self.head_dim is None and self.hidden % self.heads:
            raise ValueError(
                f"hidden {self.hidden} is not divisible by heads {self.heads}; give head_dim as well"
            )
        if self.heads is not None and self.kv_heads is not None and self.heads % self.kv_heads:
            raise ValueError(
                f"heads {self.heads} is not divisible by kv_heads {self.kv_heads}: "
                "query heads share key and value heads in equal groups"
            )
        if self.full_attention_layers and self.window is None:
            raise ValueError(
                f"full_attention_layers is {self.full_attention_layers} but window is None, so every layer has "
                "full attention; give the window of the others or leave it 0"
            )
        if self.full_attention_layers > self.layers:
            raise ValueError(
                f"full_attention_layers is {self.full_attention_layers} of only {self.layers} layers"
            )

    def _check_experts(self) -> None:
        if not self.experts:
            for name in ("top_k", "expert_ffn", "shared_experts", "dense_layers"):
                if getattr(self, name):
                    raise ValueError(
                        f"{name} is {getattr(self, name)} but experts is 0; give experts as well"
                    )
        elif not 1 <= self.top_k <= self.experts:
            raise ValueError(f"top_k is {self.top_k}, expected 1 to {self.experts}, the number of experts")
        if self.dense_layers > self.layers:
            raise ValueError(f"dense_layers is {self.dense_layers} of only {self.layers} layers")

    @property
    def stages(self) -> tuple[str, ...]:
        """One stage, the language model."""
        return ("llm",)

    @property
    def per_token(self) -> float:
        """FLOPs of one token outside attention's scores: projections, feed-forward, router and head."""
        queries, keys = self._widths()
        projections = 2 * self.hidden * (2 * queries + 2 * keys)
        matrices = 2 * self.hidden * (3 if self.gated else 2)
        sparse = 0
        if self.experts:
            width = self.ffn if self.expert_ffn is None else self.expert_ffn
            visited = self.top_k + self.shared_experts
            sparse = 2 * self.hidden * self.experts + matrices * width * visited
        dense_layers = self.dense_layers if self.experts else self.layers
        blocks = (
            self.layers * projections
            + dense_layers * matrices * self.ffn
            + (self.layers - dense_layers) * sparse
        )
        passes = 3 if self.backward else 1
        head = 2 * self.hidden * self.vocab
        return float(passes * head + (passes + self._again) * blocks)

    @property
    def per_pair(self) -> float:
        """FLOPs of one (query, key) pair in one layer: scores and weighted values."""
        forward = 4 * self._widths()[0]
        back = (2.5 if self.attention == "flash" else 2.0) if self.backward else 0.0
        return float(forward * (1 + back + self._again))

    @property
    def padding(self) -> float:
        """FLOPs of one padding token: it passes all layers but takes part in no document's attention."""
        return self.per_token if self.padded else 0.0

    def cost(self, table: MetadataTable) -> npt.NDArray[np.float64]:
        """FLOPs of each sample, float64 ``[n]``."""
        full_layers = self.layers if self.window is None else self.full_attention_layers
        pairs = np.zeros(len(table.documents))
        if full_layers:
            pairs += full_layers * document_pairs(table.documents, causal=self.causal)
        if full_layers < self.layers:
            windowed = document_pairs(table.documents, causal=self.causal, window=self.window)
            pairs += (self.layers - full_layers) * windowed
        return self.per_token * table.tokens + self.per_pair * per_sample(table, pairs)

    @property
    def _again(self) -> int:
        return int(self.checkpointing and self.backward)

    def _widths(self) -> tuple[int, int]:
        """Widths of all query heads together and of all key heads together."""
        if self.heads is None:
            return self.hidden, self.hidden
        width = self.hidden // self.heads if self.head_dim is None else self.head_dim
        return self.heads * width, (self.heads if self.kv_heads is None else self.kv_heads) * width

    def __repr__(self) -> str:
        said = [
            f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default
        ]
        return f"TransformerCost({', '.join(said)})"
