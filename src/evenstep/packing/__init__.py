"""From samples to what a model eats: rows, and batches of rows, in the layouts that trainers use.

| file | what it does |
|---|---|
| `fields.py` | the rules by which fields are read, cut and padded |
| `documents.py` | the samples of a row, read and checked |
| `layout.py` | labels, positions and boundaries from where documents end |
| `text.py` | documents to a row |
| `vision.py` | documents with images to a row |
| `padding.py` | a row without samples |
| `collate.py` | rows to a padded batch |
| `varlen.py` | rows to one flat sequence |
| `fused.py` | `text.py` and a collate in one pass |
| `parts.py` | what that pass reads and writes |
| `collator.py` | a Hugging Face collator as pack and collate |
| `masks.py` | document ids, masks, the arguments of attention kernels |
| `policy.py` | samples longer than a row, and rows without samples, for any pack |
| `shard.py` | which tokens a context-parallel rank gets |
| `places.py` | documents padded one by one for such ranks |
| `sharding.py` | batches padded and divided for context parallelism |
| `loss.py` | the loss tokens of a sample |
"""

from __future__ import annotations

from evenstep.packing.collate import collate_rows
from evenstep.packing.collator import from_collator
from evenstep.packing.fused import FusedPack, fused, fused_pack
from evenstep.packing.loss import count_loss_tokens
from evenstep.packing.masks import block_diagonal_mask, document_ids, document_mask_mod, thd_arguments
from evenstep.packing.padding import padding_row
from evenstep.packing.policy import (
    LossCounter,
    empty_row,
    loss_counter,
    pack_documents,
    padded_alike,
    slice_sample,
    truncate_sample,
    with_oversized,
)
from evenstep.packing.shard import Shard, shard_indices, shard_tensor, unshard
from evenstep.packing.sharding import Sharding, padding_of
from evenstep.packing.text import pack_text
from evenstep.packing.varlen import collate_varlen
from evenstep.packing.vision import pack_vision, vision_metadata

__all__ = [
    "FusedPack",
    "LossCounter",
    "Shard",
    "Sharding",
    "block_diagonal_mask",
    "collate_rows",
    "collate_varlen",
    "count_loss_tokens",
    "document_ids",
    "document_mask_mod",
    "empty_row",
    "from_collator",
    "fused",
    "fused_pack",
    "loss_counter",
    "pack_documents",
    "pack_text",
    "pack_vision",
    "padded_alike",
    "padding_of",
    "padding_row",
    "shard_indices",
    "shard_tensor",
    "slice_sample",
    "thd_arguments",
    "truncate_sample",
    "unshard",
    "vision_metadata",
    "with_oversized",
]
