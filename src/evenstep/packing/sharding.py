"""Pads and divides whole batches for context parallelism: on the host what needs lengths, on the device what does not."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from evenstep.packing.collate import collate_rows
from evenstep.packing.fields import Array, Padding, round_up
from evenstep.packing.fused import keywords_of
from evenstep.packing.shard import Shard, shard_indices, shard_tensor
from evenstep.packing.text import pack_text
from evenstep.packing.varlen import collate_varlen, global_boundaries
from evenstep.packing.vision import pack_vision
from evenstep.tree import flatten, map_leaves

__all__ = ["FOLLOWERS", "Sharding", "padding_of"]

# Per-token fields that the tokens are useless without; they go along unless `shard` says otherwise.
FOLLOWERS = (
    "labels",
    "shift_labels",
    "position_ids",
    "loss_weights",
    "loss_mask",
    "token_type_ids",
    "mm_token_type_ids",
)
_TOKENS = "input_ids"
_TARGETS = "shift_labels"
_PLACES = "cu_seqlens_padded"


def padding_of(pack: Callable[..., Any], collate: Callable[..., Any]) -> tuple[Padding, bool]:
    """How built-in functions pad, and whether ``pack`` is known to leave ``labels`` at their own token."""
    keywords: dict[str, Any] = {}
    unshifted = False
    packs: tuple[Callable[..., Any], ...] = (pack_text, pack_vision)
    for built_in in packs:
        found = keywords_of(pack, built_in)
        if found is not None:
            keywords, unshifted = found, not found.get("shifted", False)
    collates: tuple[Callable[..., Any], ...] = (collate_rows, collate_varlen)
    for built_in in collates:
        keywords = {**keywords, **(keywords_of(collate, built_in) or {})}
    padding = Padding(
        keywords.get("pad_token_id", 0), keywords.get("ignore_index", -100), keywords.get("pad_values") or {}
    )
    return padding, unshifted


@dataclass(frozen=True, slots=True)
class Sharding:
    """What a rank does with the fields that are divided.

    Attributes:
        shards: How each named field (``"input_ids"``, ``"vision.grid"``) is divided; None: it stays whole.
        parts: This rank's position in each mesh dimension, and its size.
        padding: Values of padding, where a shard has none of its own.
        targets: Whether labels are unshifted: then ``shift_labels`` are made of them before they are cut.
    """

    shards: Mapping[str, Shard | None]
    parts: Mapping[str, tuple[int, int]]
    padding: Padding = field(default_factory=Padding)
    targets: bool = False

    @classmethod
    def of(
        cls,
        shards: Mapping[str, Shard | None],
        coordinate: Callable[[str], tuple[int, int]],
        padding: Padding | None = None,
        *,
        targets: bool = False,
    ) -> Sharding:
        """Check ``shards`` and find this rank's part in each.

        Args:
            shards: How each field is divided.
            coordinate: A rank's position in a mesh dimension, and its size.
            padding: See the attributes.
            targets: See the attributes.

        Raises:
            TypeError, ValueError: A shard does not fit; the message names it.
        """
        if not isinstance(shards, Mapping):
            raise TypeError(f"shard is {shards!r}, expected a mapping of field names to Shard")
        for name, shard in shards.items():
            if not isinstance(name, str) or not (shard is None or isinstance(shard, Shard)):
                raise TypeError(
                    f"shard[{name!r}] is {shard!r}, expected a Shard, or None for a field that stays whole"
                )
        given = [shard for shard in shards.values() if shard is not None]
        layouts = {(shard.mesh_dim, shard.mode) for shard in given if shard.unit == "document"}
        if len(layouts) > 1:
            raise ValueError(
                f"shard divides documents in {len(layouts)} ways {sorted(layouts)}: the fields would no longer stand "
                "beside each other. Give all fields with unit='document' the same mesh_dim and mode."
            )
        parts = {shard.mesh_dim: coordinate(shard.mesh_dim) for shard in given}
        return cls(dict(shards), parts, padding or Padding(), targets)

    def pad(self, batch: Any) -> Any:
        """``batch`` with every unit as long as its divisor asks, and boundaries that say so; host tensors.

        Raises:
            ValueError: A named field is missing, or documents are to be divided where none are told.
        """
        if self.targets:
            batch = self._with_targets(batch)
        chosen = self._chosen(batch)
        main = chosen.get(_TOKENS) or next(iter(chosen.values()), None)
        if main is None:
            return batch
        documents = [shard for shard in chosen.values() if shard.unit == "document"]
        places = _Places.of(batch, self._divisor(documents[0])) if documents else None

        def pad(path: str, leaf: Any) -> Any:
            shard = chosen.get(path)
            if shard is None:
                return leaf
            fill = self._fill(path) if shard.pad is None else shard.pad
            if shard.unit == "document" and places is not None:
                return places.move(path, leaf, shard.dim, fill)
            return _pad(
                leaf, shard.dim, round_up(leaf.shape[shard.dim], "divisor", self._divisor(shard)), fill
            )

        before = batch
        batch = map_leaves(pad, batch)
        if not isinstance(batch, MutableMapping) or not isinstance(batch.get(_TOKENS), torch.Tensor):
            return batch
        if places is not None:
            return places.tell(batch)
        if main.unit == "row" and _TOKENS in chosen:
            return _lengthen(before, batch, batch[_TOKENS].shape[main.dim])
        return batch

    def slice(self, batch: Any) -> Any:
        """This rank's part of a batch whose units are padded; nothing waits for a device.

        Raises:
            ValueError: A named field is missing, or its length is no multiple of the divisor.
        """
        chosen = self._chosen(batch)
        index: torch.Tensor | None = None  # the same for all fields that are divided by document

        def cut(path: str, leaf: Any) -> Any:
            nonlocal index
            shard = chosen.get(path)
            if shard is None:
                return leaf
            part, parts = self.parts[shard.mesh_dim]
            if shard.unit == "row":
                return shard_tensor(leaf, shard.dim, part, parts, shard.mode)
            if index is None:
                index = shard_indices(leaf.shape[shard.dim], part, parts, shard.mode, _boundaries(batch))
            return leaf.index_select(shard.dim, index.to(leaf.device))

        return map_leaves(cut, batch)

    def _fill(self, name: str) -> float:
        return self.padding.ignore_index if name == _TARGETS else self.padding.of(name)

    def _divisor(self, shard: Shard) -> int:
        return shard.divisor(self.parts[shard.mesh_dim][1])

    def _chosen(self, batch: Any) -> dict[str, Shard]:
        """How the fields of ``batch`` are divided, followers included."""
        leaves = dict(flatten(batch))
        chosen = {name: shard for name, shard in self.shards.items() if shard is not None}
        for name, shard in chosen.items():
            leaf = leaves.get(name)
            if not isinstance(leaf, torch.Tensor) or not -leaf.dim() <= shard.dim < leaf.dim():
                what = f"{tuple(leaf.shape)}" if isinstance(leaf, torch.Tensor) else f"{type(leaf).__name__}"
                known = (
                    f"is {what} in the batch"
                    if name in leaves
                    else f"is not among the fields {sorted(leaves)[:16]}"
                )
                raise ValueError(
                    f"shard names the field {name!r}, which {known}: it cannot be divided along dimension {shard.dim}. "
                    "Name a tensor that collate makes."
                )
        if "labels" in chosen and _TARGETS in leaves:
            chosen.setdefault(_TARGETS, chosen["labels"])
        tokens = chosen.get(_TOKENS)
        if tokens is not None:
            length = leaves[_TOKENS].shape[tokens.dim]
            for name in FOLLOWERS:
                leaf = leaves.get(name)
                if (
                    name not in self.shards
                    and name not in chosen
                    and isinstance(leaf, torch.Tensor)
                    and leaf.dim()
                ):
                    dim = tokens.dim if -leaf.dim() <= tokens.dim < leaf.dim() else -1
                    if leaf.shape[dim] == length:
                        chosen[name] = Shard(tokens.mesh_dim, dim, tokens.mode, tokens.unit)
        return chosen

    def _with_targets(self, batch: Any) -> Any:
        """A model that shifts labels itself would predict across the cuts: give it the targets instead."""
        if not isinstance(batch, MutableMapping) or _TARGETS in batch or "labels" not in batch:
            return batch
        shard = self.shards.get("labels", self.shards.get(_TOKENS))
        if shard is None:
            return batch
        labels = batch["labels"]
        length = labels.shape[shard.dim]
        last = torch.full_like(labels.narrow(shard.dim, 0, 1), self.padding.ignore_index)
        batch = copy.copy(batch)
        batch[_TARGETS] = torch.cat([labels.narrow(shard.dim, 1, length - 1), last], shard.dim)
        return batch


@dataclass(frozen=True, slots=True)
class _Places:
    """Where the documents of a flat batch stand, and where they will once each is padded."""

    lengths: Array
    starts: Array
    length: int
    total: int
    old: torch.Tensor
    new: torch.Tensor

    @classmethod
    def of(cls, batch: Any, divisor: int) -> _Places:
        known = batch if isinstance(batch, Mapping) else {}
        real, tokens = known.get("cu_seqlens"), known.get(_TOKENS)
        if (
            not isinstance(tokens, torch.Tensor)
            or tokens.numel() != tokens.shape[-1]
            or not isinstance(real, torch.Tensor)
        ):
            shape = tuple(tokens.shape) if isinstance(tokens, torch.Tensor) else type(tokens).__name__
            raise ValueError(
                "unit='document' divides the documents of one flat sequence, but this batch has input_ids of shape "
                f"{shape} and as cu_seqlens a {type(real).__name__}: nobody could tell where they end. Use "
                "collate=collate_varlen, or unit='row'."
            )
        length = tokens.shape[-1]
        ends: Array = np.asarray(real, dtype=np.int64)
        lengths: Array = np.diff(ends)
        before = np.asarray(batch.get(_PLACES, real), dtype=np.int64)[: len(lengths)]
        starts = np.concatenate(([0], np.cumsum(round_up(lengths, "divisor", divisor))))
        total = max(int(starts[-1]), int(round_up(length, "divisor", divisor)))
        within = np.arange(int(ends[-1])) - np.repeat(ends[:-1], lengths)
        old = torch.from_numpy(np.repeat(before, lengths) + within)
        return cls(
            lengths, starts, length, total, old, torch.from_numpy(np.repeat(starts[:-1], lengths) + within)
        )

    def move(self, name: str, whole: torch.Tensor, dim: int, fill: float) -> torch.Tensor:
        if whole.shape[dim] != self.length:
            raise ValueError(
                f"field {name!r} has {whole.shape[dim]} values along dimension {dim}, input_ids have {self.length} tokens: "
                "its values would stand in the wrong documents. Shard it with unit='row', or not at all."
            )
        shape = list(whole.shape)
        shape[dim] = self.total
        out = torch.full(shape, fill, dtype=whole.dtype)
        return out.index_copy_(dim, self.new, whole.index_select(dim, self.old))

    def tell(self, batch: Any) -> Any:
        told = global_boundaries(self.lengths, self.starts.copy(), self.total)
        batch = copy.copy(batch)
        batch.update({name: value for name, value in told.items() if name in batch or name == _PLACES})
        return batch


def _boundaries(batch: Any) -> torch.Tensor:
    places = batch.get(_PLACES) if isinstance(batch, Mapping) else None
    if not isinstance(places, torch.Tensor):
        raise ValueError(
            f"unit='document' needs {_PLACES!r} in the batch to know where the documents stand; put ShardPad behind the "
            "Packer, or use unit='row'"
        )
    return places


def _pad(whole: torch.Tensor, dim: int, length: int, fill: float) -> torch.Tensor:
    missing = length - whole.shape[dim]
    if not missing:
        return whole
    shape = list(whole.shape)
    shape[dim] = missing
    return torch.cat([whole, torch.full(shape, fill, dtype=whole.dtype)], dim)


def _lengthen(before: Any, batch: Any, total: int) -> Any:
    """Boundaries that cover all tokens cover the new padding too, as a segment of its own or with the last one."""
    if total == before[_TOKENS].shape[-1] or not isinstance(batch.get(_PLACES), torch.Tensor):
        return batch
    ends: Array = np.asarray(batch["cu_seqlens"], dtype=np.int64)
    lengths: Array = np.diff(ends)
    starts = np.asarray(batch[_PLACES], dtype=np.int64).copy()
    if len(lengths):
        starts[-1] = total
    told = global_boundaries(lengths, starts, total)
    batch = copy.copy(batch)
    batch.update({name: value for name, value in told.items() if name in batch})
    return batch
