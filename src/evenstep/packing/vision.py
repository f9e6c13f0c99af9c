"""Packs documents with images: their patches and grids follow the tokens in row order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from evenstep.packing.documents import read_input_ids
from evenstep.packing.fields import as_tensor
from evenstep.packing.loss import count_loss_tokens
from evenstep.packing.text import pack_text
from evenstep.samples import SampleMetadata

__all__ = ["VISION_FIELDS", "pack_vision", "vision_metadata"]

# Patches and their grids, as the processors of Qwen-VL-like models name them.
VISION_FIELDS = {"pixel_values": "image_grid_thw", "pixel_values_videos": "video_grid_thw"}


def pack_vision(
    samples: Sequence[Mapping[str, Any]],
    seq_len: int,
    *,
    patches: Mapping[str, str] = VISION_FIELDS,
    image_token_ids: Sequence[int] | None = None,
    merge_size: int = 2,
    **options: Any,
) -> dict[str, Any]:
    """Packs text and images: tokens as ``pack_text``, then the patches of all images in the order of the row.

    A sample is what ``pack_text`` takes. With images it also has ``pixel_values`` (``[patches, width]``) and
    ``image_grid_thw`` (integers ``[images, 3]``: frames, height and width of each image in patches), likewise for
    videos. Samples without images stand beside those with some; if others of the row have ``position_ids`` of several axes
    (mrope, ``[3, L]``), theirs count up alike on every axis.

    Args:
        samples: The documents of the row, in order.
        seq_len: Tokens of the row.
        patches: Patch field to grid field.
        image_token_ids: The token ids that stand for merged patches; if given, their number in every sample must
            be that of its patches.
        merge_size: Patches that one such token stands for, per side.
        **options: Options of ``pack_text``.

    Returns:
        The row of ``pack_text``, and each patch field (``[patches, width]``) and grid field (int64 ``[images, 3]``) that a
        sample has, joined along the first dimension. A collate joins them over its rows; a batch without any image has none,
        so a model whose encoder communicates must then run it on a dummy image.

    Raises:
        ValueError: Patches, grids and tokens of a sample disagree, or a sample with images would be cut.
    """
    vision = [name for pair in patches.items() for name in pair]
    kept = [sample for k, sample in enumerate(samples) if len(read_input_ids(sample, k))]
    for position, sample in enumerate(kept):
        _check(sample, position, patches, image_token_ids, merge_size)
        length = len(sample["input_ids"])
        if (
            length > seq_len
            and options.get("oversized") == "truncate"
            and any(name in sample for name in vision)
        ):
            raise ValueError(
                f"sample {position} of a row of {seq_len} tokens has {length} tokens and images; cutting it would leave "
                'patches without tokens; choose oversized="single", or shorten it in the dataset'
            )
    axes = [as_tensor(sample["position_ids"]) for sample in kept if "position_ids" in sample]
    spatial = next((a for a in axes if a is not None and a.dim() == 2), None)
    texts = []
    for sample in kept:
        text = {name: value for name, value in sample.items() if name not in vision}
        if spatial is not None and "position_ids" not in text:
            count = torch.arange(len(text["input_ids"]), dtype=spatial.dtype)
            text["position_ids"] = count.expand(spatial.shape[0], -1)
        texts.append(text)
    row = pack_text(texts, seq_len, **options)
    for name in vision:
        parts = [as_tensor(sample[name]) for sample in kept if name in sample]
        present = [part for part in parts if part is not None]
        if present:
            row[name] = torch.cat(present) if len(present) > 1 else present[0].clone()
    return row


def _check(
    sample: Mapping[str, Any],
    position: int,
    patches: Mapping[str, str],
    image_token_ids: Sequence[int] | None,
    merge_size: int,
) -> None:
    count = 0
    for pixels, grid in patches.items():
        if (pixels in sample) != (grid in sample):
            lacking, given = (grid, pixels) if pixels in sample else (pixels, grid)
            raise ValueError(
                f"sample {position} of a row has {given!r} but no {lacking!r}; its images could not be told apart; "
                "give both, or none for a sample without images"
            )
        if pixels not in sample:
            continue
        expected = int(_grid(sample[grid]).prod(axis=1).sum())
        if len(sample[pixels]) != expected:
            raise ValueError(
                f"{pixels!r} of sample {position} of a row has {len(sample[pixels])} patches, but {grid!r} describes "
                f"{expected}; images would get each other's patches; correct the grid"
            )
        count += expected
    if image_token_ids is not None:
        placeholders = int(np.isin(np.asarray(sample["input_ids"]), list(image_token_ids)).sum())
        if placeholders * merge_size**2 != count:
            raise ValueError(
                f"sample {position} of a row has {placeholders} image tokens for {count} patches, {merge_size}x{merge_size} "
                "to a token; images would land on the wrong tokens; check the processor and merge_size"
            )


def _grid(value: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.asarray(value, dtype=np.int64).reshape(-1, 3)


def vision_metadata(
    sample: Mapping[str, Any], *, patches: Mapping[str, str] = VISION_FIELDS
) -> SampleMetadata:
    """What planning needs of a sample of ``pack_vision``; a ``metadata_fn`` for costs in two stages.

    Returns:
        Tokens, loss tokens and the features ``images`` (frames count one by one), ``patches`` and ``patches_squared``
        (sum over the frames of the square of their patches: attention inside the encoder is per frame).
    """
    grids = [_grid(sample[grid]) for grid in patches.values() if grid in sample]
    grid = np.concatenate(grids) if grids else np.empty((0, 3), dtype=np.int64)
    frames, area = grid[:, 0], grid[:, 1] * grid[:, 2]
    return SampleMetadata(
        tokens=len(sample["input_ids"]),
        features={
            "images": float(frames.sum()),
            "patches": float((frames * area).sum()),
            "patches_squared": float((frames * area.astype(np.float64) ** 2).sum()),
        },
        loss_tokens=count_loss_tokens(sample),
    )
