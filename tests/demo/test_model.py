from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from evenstep.demo.model import Gpt, GptConfig
from evenstep.packing import pack_text

CONFIG = GptConfig(vocabulary=50, width=16, layers=2, heads=2)


def model() -> Gpt:
    torch.manual_seed(0)
    return Gpt(CONFIG).double()


def row_of(lengths: list[int], seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    samples = [{"input_ids": torch.randint(50, (n,), generator=generator)} for n in lengths]
    row = pack_text(samples, sum(lengths))
    return {name: row[name] for name in ("input_ids", "labels", "position_ids", "cu_seqlens")}


def alone(gpt: Gpt, tokens: Tensor) -> Tensor:
    length = len(tokens)
    features = gpt(tokens, torch.arange(length), torch.tensor([0, length], dtype=torch.int32))
    return gpt.logits(features)


lengths_strategy = st.lists(st.integers(1, 20), min_size=1, max_size=6)


@settings(max_examples=20, deadline=None)
@given(lengths=lengths_strategy)
def test_logits_are_those_of_each_document_alone(lengths: list[int]) -> None:
    gpt, row = model(), row_of(lengths)
    packed = gpt.logits(gpt(row["input_ids"], row["position_ids"], row["cu_seqlens"]))
    single = torch.cat([alone(gpt, tokens) for tokens in torch.split(row["input_ids"], lengths)])
    torch.testing.assert_close(packed, single, rtol=1e-10, atol=1e-10)


@settings(max_examples=20, deadline=None)
@given(lengths=lengths_strategy)
def test_loss_predicts_each_token_but_the_first_of_its_document(lengths: list[int]) -> None:
    gpt, row = model(), row_of(lengths)
    expected = torch.stack(
        [
            F.cross_entropy(alone(gpt, tokens)[:-1], tokens[1:], reduction="sum")
            for tokens in torch.split(row["input_ids"], lengths)
        ]
    ).sum()
    torch.testing.assert_close(gpt.loss(**row), expected, rtol=1e-10, atol=1e-10)


def test_a_later_token_changes_nothing_before_it() -> None:
    gpt, row = model(), row_of([12])
    before = alone(gpt, row["input_ids"])
    changed = row["input_ids"].clone()
    changed[7] = (changed[7] + 1) % 50
    after = alone(gpt, changed)
    torch.testing.assert_close(after[:7], before[:7], rtol=0, atol=0)
    assert not torch.equal(after[7:], before[7:])


def test_order_of_tokens_matters() -> None:
    gpt = model()
    forward, swapped = alone(gpt, torch.tensor([1, 2, 3])), alone(gpt, torch.tensor([2, 1, 3]))
    assert not torch.allclose(forward[2], swapped[2])


def test_first_loss_is_that_of_guessing() -> None:
    gpt, row = model(), row_of([40])
    with torch.no_grad():
        mean = float(gpt.loss(**row)) / 39
    assert mean == pytest.approx(torch.tensor(50.0).log().item() + 0.5, abs=0.6)  # logits are about N(0, 1)
