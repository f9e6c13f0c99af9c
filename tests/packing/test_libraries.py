"""With Hugging Face libraries where they are installed: a model sees each document as if it were alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from evenstep.packing import (
    block_diagonal_mask,
    collate_rows,
    collate_varlen,
    count_loss_tokens,
    document_ids,
    from_collator,
    pack_text,
)
from evenstep.testing.packs import check_pack
from evenstep.testing.strategies import samples

transformers: Any = pytest.importorskip("transformers")

LENGTHS = st.lists(st.lists(st.integers(1, 7), min_size=1, max_size=3), min_size=1, max_size=3)


def varlen_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    cu_seq_lens_q: torch.Tensor,
    cu_seq_lens_k: torch.Tensor,
    max_length_q: int,
    max_length_k: int,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """What a variable-length kernel computes; tokens outside of all segments are NaN, as flash-attention may leave them."""
    out = torch.full_like(query, float("nan"))
    assert torch.equal(cu_seq_lens_q, cu_seq_lens_k)
    for start, end in zip(cu_seq_lens_q[:-1].tolist(), cu_seq_lens_q[1:].tolist(), strict=True):
        assert end - start <= max_length_q == max_length_k
        part = (slice(None), slice(None), slice(start, end))
        out[part] = scaled_dot_product_attention(
            query[part], key[part], value[part], is_causal=True, enable_gqa=True
        )
    return out.transpose(1, 2), None


@pytest.fixture(scope="module")
def model() -> Any:
    transformers.AttentionInterface.register("varlen_reference", varlen_attention)
    # No mask is built for an attention without a mask function of its name.
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=50,
    )
    return transformers.LlamaForCausalLM(config).double().eval()


def batch_of(lengths: list[list[int]], collate: Callable[..., Any], **options: Any) -> dict[str, Any]:
    torch.manual_seed(1)
    rows = [pack_text([{"input_ids": torch.randint(1, 50, (n,))} for n in docs], 24) for docs in lengths]
    batch: dict[str, Any] = collate(rows, **options)
    return batch


def masked(batch: dict[str, Any]) -> dict[str, Any]:
    return {"attention_mask": block_diagonal_mask(document_ids(batch)), "position_ids": batch["position_ids"]}


def positioned(batch: dict[str, Any]) -> dict[str, Any]:
    return {"position_ids": batch["position_ids"]}


def bounded(batch: dict[str, Any]) -> dict[str, Any]:
    names = ("position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    return {name: batch[name] for name in names}


@pytest.mark.parametrize(
    ("attention", "arguments", "collate", "options"),
    [
        ("sdpa", masked, collate_rows, {}),
        ("sdpa", positioned, collate_rows, {"pad_to_multiple_of": 32}),
        ("sdpa", masked, collate_varlen, {"pad_to_multiple_of": 8}),
        ("sdpa", masked, collate_varlen, {"pad_documents_to_multiple_of": 4}),
        ("sdpa", positioned, collate_varlen, {}),
        ("varlen_reference", bounded, collate_varlen, {}),
        ("varlen_reference", bounded, collate_varlen, {"pad_to_multiple_of": 8}),
        ("varlen_reference", bounded, collate_varlen, {"pad_documents_to_multiple_of": 4, "pad_to": 160}),
    ],
)
@settings(max_examples=8)
@given(lengths=LENGTHS)
def test_logits_of_a_document_are_those_of_it_alone(
    model: Any,
    attention: str,
    arguments: Callable[[dict[str, Any]], dict[str, Any]],
    collate: Callable[..., Any],
    options: dict[str, int],
    lengths: list[list[int]],
) -> None:
    batch = batch_of(lengths, collate, **options)
    with torch.no_grad():
        model.set_attn_implementation(attention)
        packed = model(input_ids=batch["input_ids"], use_cache=False, **arguments(batch)).logits
        assert bool(packed.isfinite().all())
        model.set_attn_implementation("sdpa")
        ids = document_ids(batch)
        for row in range(len(ids)):
            for document in range(int(ids[row].max()) + 1):
                here = ids[row] == document
                alone = model(input_ids=batch["input_ids"][row, here][None], use_cache=False).logits[0]
                torch.testing.assert_close(packed[row, here], alone, rtol=0, atol=1e-12)


def test_the_loss_of_a_model_is_over_the_counted_tokens(model: Any) -> None:
    torch.manual_seed(2)
    documents = [{"input_ids": torch.randint(1, 50, (n,))} for n in (5, 1, 7)]
    batch = collate_rows([pack_text(documents, 16)])
    count = sum(count_loss_tokens(document) or 0 for document in documents)
    with torch.no_grad():
        packed = model(
            input_ids=batch["input_ids"],
            labels=batch["labels"],
            position_ids=batch["position_ids"],
            num_items_in_batch=count,
            use_cache=False,  # with a cache, transformers does not look for documents in position_ids
        ).loss
        alone = [
            model(input_ids=d["input_ids"][None], labels=d["input_ids"][None], num_items_in_batch=1).loss
            for d in documents
            if len(d["input_ids"]) > 1
        ]
    torch.testing.assert_close(packed, torch.stack(alone).sum() / count)


def test_a_model_compiles_as_one_graph(model: Any) -> None:
    torch.compiler.reset()
    model.set_attn_implementation("sdpa")
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    for lengths in ([3, 4], [5, 1, 2], [8]):
        batch = batch_of([lengths], collate_varlen, pad_to=16)
        arguments = {"input_ids": batch["input_ids"], "use_cache": False, **bounded(batch)}
        with torch.no_grad():
            torch.testing.assert_close(compiled(**arguments).logits, model(**arguments).logits)


@pytest.mark.parametrize("bounds", [False, True])
def test_the_flattening_collator_of_transformers(bounds: bool) -> None:
    collator = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=bounds)
    pack, collate = from_collator(collator)
    check_pack(pack, collate, samples=samples(extras=()), max_examples=50)
    rows: list[list[dict[str, Any]]] = [
        [{"input_ids": torch.tensor([1, 2, 3])}],
        [{"input_ids": [4, 5]}, {"input_ids": [6]}],
    ]
    theirs = collate([pack(row, 4) for row in rows])
    ours = collate_varlen([pack_text(row, 4) for row in rows])
    for name in theirs:
        assert name in ours
        assert (
            (theirs[name] == ours[name])
            if isinstance(ours[name], int)
            else torch.equal(theirs[name], ours[name])
        )


def test_the_collator_of_trl() -> None:
    trainer = pytest.importorskip("trl.trainer.sft_trainer")
    collator = trainer.DataCollatorForLanguageModeling(
        pad_token_id=0, padding_free=True, pad_to_multiple_of=8
    )
    pack, collate = from_collator(collator)
    check_pack(pack, collate, samples=samples(extras=()), max_examples=50)
