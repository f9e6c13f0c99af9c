"""torch.compile takes the batches whole: no graph break from a boundary or a longest document."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from evenstep.packing import block_diagonal_mask, collate_rows, collate_varlen, document_ids, pack_text

WIDTH = 8


def forward(table: torch.Tensor, input_ids: torch.Tensor, ids: torch.Tensor, longest: int) -> torch.Tensor:
    """One attention layer that, as kernels do, sizes something by the longest document."""
    hidden = table[input_ids]
    mask = block_diagonal_mask(ids) & (torch.ones(1) * longest > 0)
    mixed = scaled_dot_product_attention(hidden[:, None], hidden[:, None], hidden[:, None], attn_mask=mask)[
        :, 0
    ]
    return mixed / max(longest, 1)


@pytest.mark.parametrize(
    ("collate", "name"),
    [(collate_rows, "max_seqlen"), (collate_varlen, "max_length_q"), (collate_varlen, "max_seqlen")],
)
def test_a_batch_is_one_graph(collate: Callable[..., dict[str, Any]], name: str) -> None:
    torch.compiler.reset()
    table = torch.randn(50, WIDTH)
    compiled = torch.compile(forward, backend="eager", fullgraph=True)
    for lengths in ([3, 4], [5, 1, 2], [8], [2, 2, 2, 2]):
        batch = collate([pack_text([{"input_ids": torch.arange(n)} for n in lengths], 8)] * 2)
        arguments = (table, batch["input_ids"], document_ids(batch), batch[name])
        torch.testing.assert_close(compiled(*arguments), forward(*arguments))
