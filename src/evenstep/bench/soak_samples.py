"""Samples of which every byte follows from the index, so that whoever receives one can tell whether it is right."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["SoakSamples", "digest_of", "keep", "mix", "together"]

SEQ_LEN = 2048


class SoakSamples:
    """Documents of very different lengths; every third one comes with an image.

    Args:
        size: Number of samples.
        seed: Of lengths and contents.
    """

    def __init__(self, size: int, seed: int) -> None:
        lengths = np.random.default_rng(seed).lognormal(5.5, 1.0, size)
        self._lengths = np.clip(lengths, 8, SEQ_LEN).astype(np.int64).tolist()
        self._seed = seed

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        chance = np.random.default_rng([self._seed, index])
        tokens = torch.from_numpy(chance.integers(0, 1 << 40, self._lengths[index]))
        sample: dict[str, Any] = {"input_ids": tokens, "index": index, "name": f"document {index}"}
        if index % 3 == 0:
            sample["image"] = chance.integers(0, 256, (3, 8 + index % 57, 64), dtype=np.uint8)
        return sample


def digest_of(sample: dict[str, Any]) -> bytes:
    """Digest of every byte of a sample."""
    digest = blake2b(f"{sample['index']} {sample['name']} {sorted(sample)}".encode(), digest_size=16)
    digest.update(sample["input_ids"].numpy().data)
    if "image" in sample:
        digest.update(np.ascontiguousarray(sample["image"]).data)
    return digest.digest()


def mix(indices: Sequence[int] | npt.NDArray[np.int64]) -> int:
    """A number, int64, that tells sets of indices apart: the sum, modulo 2**64, of a hash of each (SplitMix64)."""
    x = np.asarray(indices, dtype=np.int64).view(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return int((x ^ (x >> np.uint64(31))).sum(dtype=np.uint64).astype(np.int64))


def keep(samples: list[dict[str, Any]], _seq_len: int) -> list[dict[str, Any]]:
    """A pack function: the samples themselves, which still are views of what was received."""
    return samples


def together(rows: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """A collate function: all samples of a micro-batch."""
    return [sample for row in rows for sample in row]
