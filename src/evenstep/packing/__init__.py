"""From samples to what a model eats: rows, and batches of rows, in the layouts that trainers use."""

from __future__ import annotations

from evenstep.packing.collate import collate_rows
from evenstep.packing.text import count_loss_tokens, pack_text, padding_row
from evenstep.packing.varlen import collate_varlen

__all__ = ["collate_rows", "collate_varlen", "count_loss_tokens", "pack_text", "padding_row"]
