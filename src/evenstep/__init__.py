"""Balanced, packed and exactly resumable micro-batches for LLM and VLM training."""

from __future__ import annotations

__version__ = "0.1.0"
