"""FLOPs of real modules, counted by torch, are what the formula says, exactly."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop, sdpa_flop

from evenstep.cost import TransformerCost
from evenstep.samples import MetadataTable, SampleMetadata

_ATEN = torch.ops.aten


def _forward(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop(query, key, value))


def _backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop(grad, query, key, value))


CPU_KERNELS: dict[Any, Any] = {
    # torch counts the flash kernels of accelerators; the one of the CPU has the same shapes.
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _forward,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _backward,
}


class Attention(nn.Module):
    """Attention whose every query multiplies only the keys that its mask lets through."""

    def __init__(self, cost: TransformerCost, window: int | None) -> None:
        super().__init__()
        self.cost, self.window = cost, window
        heads = cost.heads or 1
        width = cost.head_dim or cost.hidden // heads
        self.heads, self.kv_heads, self.width = heads, cost.kv_heads or heads, width
        self.query = nn.Linear(cost.hidden, heads * width, bias=False)
        self.key = nn.Linear(cost.hidden, self.kv_heads * width, bias=False)
        self.value = nn.Linear(cost.hidden, self.kv_heads * width, bias=False)
        self.out = nn.Linear(heads * width, cost.hidden, bias=False)

    def forward(self, x: Tensor, documents: list[int]) -> Tensor:
        query = self.query(x).view(-1, self.heads, self.width).transpose(0, 1)
        groups = self.heads // self.kv_heads
        key, value = (
            part.view(-1, self.kv_heads, self.width).transpose(0, 1).repeat_interleave(groups, dim=0)
            for part in (self.key(x), self.value(x))
        )
        parts = [
            self.attend(*document)
            for document in zip(*(part.split(documents, dim=1) for part in (query, key, value)), strict=True)
        ]
        return self.out(torch.cat(parts, dim=1).transpose(0, 1).reshape(len(x), -1))  # type: ignore[no-any-return]

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.cost.attention == "flash":
            return functional.scaled_dot_product_attention(query[None], key[None], value[None])[0]
        rows = []
        for position in range(query.shape[1]):
            reach = self.window or query.shape[1]
            seen = slice(max(position - reach + 1, 0), position + 1 if self.cost.causal else position + reach)
            scores = query[:, position : position + 1] @ key[:, seen].transpose(1, 2)
            rows.append(scores.softmax(dim=-1) @ value[:, seen])
        return torch.cat(rows, dim=1)


class FeedForward(nn.Module):
    def __init__(self, cost: TransformerCost, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(cost.hidden, width * (2 if cost.gated else 1), bias=False)
        self.down = nn.Linear(width, cost.hidden, bias=False)
        self.gated = cost.gated

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        if self.gated:
            gate, up = up.chunk(2, dim=-1)
            up = functional.silu(gate) * up
        return self.down(up)  # type: ignore[no-any-return]


class Experts(nn.Module):
    def __init__(self, cost: TransformerCost) -> None:
        super().__init__()
        width = cost.ffn if cost.expert_ffn is None else cost.expert_ffn
        self.router = nn.Linear(cost.hidden, cost.experts, bias=False)
        self.routed = nn.ModuleList(FeedForward(cost, width) for _ in range(cost.experts))
        self.shared = nn.ModuleList(FeedForward(cost, width) for _ in range(cost.shared_experts))
        self.top_k = cost.top_k

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(dim=-1).topk(self.top_k, dim=-1)
        out = torch.stack([expert(x) for expert in self.shared]).sum(0) if len(self.shared) else x * 0
        for number, expert in enumerate(self.routed):
            token, slot = (chosen == number).nonzero(as_tuple=True)
            if len(token):
                out = out.index_add(0, token, expert(x[token]) * weights[token, slot, None])
        return out


class Block(nn.Module):
    def __init__(self, cost: TransformerCost, number: int) -> None:
        super().__init__()
        self.attention = Attention(cost, None if number < cost.full_attention_layers else cost.window)
        sparse = cost.experts and number >= cost.dense_layers
        self.feed_forward = Experts(cost) if sparse else FeedForward(cost, cost.ffn)

    def forward(self, x: Tensor, documents: list[int]) -> Tensor:
        x = x + self.attention(x, documents)
        return x + self.feed_forward(x)  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """As plain as it gets: no norms, no positions, because neither has a matrix product."""

    def __init__(self, cost: TransformerCost) -> None:
        super().__init__()
        self.cost = cost
        self.embedding = nn.Embedding(max(cost.vocab, 8), cost.hidden)
        self.blocks = nn.ModuleList(Block(cost, number) for number in range(cost.layers))
        self.head = nn.Linear(cost.hidden, cost.vocab, bias=False) if cost.vocab else nn.Identity()

    def forward(self, tokens: Tensor, documents: list[int]) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.cost.checkpointing:
                x = checkpoint(block, x, documents, use_reentrant=False)
            else:
                x = block(x, documents)
        return self.head(x)  # type: ignore[no-any-return]


def counted(cost: TransformerCost, documents: list[int]) -> int:
    torch.manual_seed(0)
    model = Transformer(cost)
    tokens = torch.randint(8, (sum(documents),))
    with (
        FlopCounterMode(display=False, custom_mapping=CPU_KERNELS) as counter,
        nn.attention.sdpa_kernel(nn.attention.SDPBackend.FLASH_ATTENTION),
        set_checkpoint_early_stop(False),
    ):
        if cost.backward:
            model(tokens, documents).sum().backward()
        else:
            with torch.no_grad():
                model(tokens, documents)
    return int(counter.get_total_flops())


EAGER: dict[str, Any] = {"attention": "eager"}
CASES = {
    "dense": TransformerCost(16, 2, 24, 40, heads=2, **EAGER),
    "default heads": TransformerCost(16, 1, 24, 40, **EAGER),
    "not gated": TransformerCost(16, 2, 24, 40, heads=2, gated=False, **EAGER),
    "grouped query": TransformerCost(16, 2, 24, 40, heads=4, kv_heads=2, **EAGER),
    "wide heads": TransformerCost(16, 2, 24, 40, heads=4, kv_heads=1, head_dim=6, **EAGER),
    "sliding window": TransformerCost(16, 3, 24, 40, heads=2, window=4, **EAGER),
    "some full layers": TransformerCost(16, 3, 24, 40, heads=2, window=4, full_attention_layers=1, **EAGER),
    "window both ways": TransformerCost(16, 2, 24, 0, heads=2, window=3, causal=False, **EAGER),
    "encoder": TransformerCost(16, 2, 24, 0, heads=2, causal=False, gated=False, **EAGER),
    "mixture": TransformerCost(16, 2, 24, 40, heads=2, experts=4, top_k=2, **EAGER),
    "shared experts": TransformerCost(
        16, 3, 24, 40, heads=2, experts=4, top_k=2, expert_ffn=8, shared_experts=2, dense_layers=1, **EAGER
    ),
    "forward only": TransformerCost(16, 2, 24, 40, heads=2, backward=False, **EAGER),
    "checkpointing": TransformerCost(16, 2, 24, 40, heads=2, checkpointing=True, **EAGER),
    "flash": TransformerCost(16, 2, 24, 40, heads=2, causal=False),
    "flash forward": TransformerCost(16, 2, 24, 40, heads=2, causal=False, backward=False),
    "flash checkpointing": TransformerCost(16, 2, 24, 40, heads=2, causal=False, checkpointing=True),
}


@pytest.mark.parametrize("documents", [[9], [5, 1, 7]], ids=["one document", "three documents"])
@pytest.mark.parametrize("cost", CASES.values(), ids=CASES.keys())
def test_formula_is_what_torch_counts(cost: TransformerCost, documents: list[int]) -> None:
    table = MetadataTable.from_samples([SampleMetadata(sum(documents), documents=documents)])
    assert cost.cost(table).tolist() == [counted(cost, documents)]


def test_known_size() -> None:
    """Llama 3 8B: 6 FLOPs per parameter in a matrix product, and 2 pairs of causal attention a layer."""
    llama = TransformerCost(4096, 32, 14336, 128256, heads=32, kv_heads=8, attention="eager")
    parameters = 32 * (4096 * (4096 + 2 * 1024 + 4096) + 3 * 4096 * 14336) + 4096 * 128256
    assert parameters == 7_504_658_432
    assert llama.per_token == 6 * parameters
    length = 8192
    attention = 32 * 12 * 4096 * length * (length + 1) // 2
    assert llama.cost(MetadataTable.from_tokens([length])).tolist() == [6 * parameters * length + attention]


def test_repr_says_what_differs_from_the_defaults() -> None:
    assert repr(TransformerCost(16, 2, 24, 40, heads=2, causal=False)) == (
        "TransformerCost(hidden=16, layers=2, ffn=24, vocab=40, heads=2, causal=False)"
    )


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"hidden": 0}, ValueError, "hidden is 0, expected an integer of at least 1"),
    ({"layers": 2.0}, TypeError, "layers is 2.0 (float), expected an integer"),
    ({"vocab": None}, TypeError, "vocab is None (NoneType), expected an integer"),
    ({"causal": 1}, TypeError, "causal is 1 (int), expected True or False"),
    ({"window": 0}, ValueError, "window is 0, expected an integer of at least 1"),
    ({"attention": "fast"}, ValueError, "attention is 'fast', expected 'flash' or 'eager'"),
    ({"kv_heads": 2}, ValueError, "kv_heads is 2 but heads is None; give heads as well"),
    ({"heads": 3}, ValueError, "hidden 16 is not divisible by heads 3; give head_dim as well"),
    (
        {"heads": 4, "kv_heads": 3},
        ValueError,
        "heads 4 is not divisible by kv_heads 3: query heads share key and value heads in equal groups",
    ),
    (
        {"full_attention_layers": 1},
        ValueError,
        "full_attention_layers is 1 but window is None, so every layer has full attention; "
        "give the window of the others or leave it 0",
    ),
    (
        {"full_attention_layers": 3, "window": 4},
        ValueError,
        "full_attention_layers is 3 of only 2 layers",
    ),
    ({"top_k": 2}, ValueError, "top_k is 2 but experts is 0; give experts as well"),
    (
        {"experts": 4, "top_k": 5},
        ValueError,
        "top_k is 5, expected 1 to 4, the number of experts",
    ),
    (
        {"experts": 4, "top_k": 1, "dense_layers": 3},
        ValueError,
        "dense_layers is 3 of only 2 layers",
    ),
]


@pytest.mark.parametrize(("given", "error", "message"), BAD, ids=[message[:32] for _, _, message in BAD])
def test_impossible_dimensions_are_named(given: dict[str, Any], error: type[Exception], message: str) -> None:
    dimensions: dict[str, Any] = {"hidden": 16, "layers": 2, "ffn": 24, "vocab": 40}
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        TransformerCost(**{**dimensions, **given})
