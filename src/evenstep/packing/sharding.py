"""Pads and divides whole batches for context parallelism: on the host what needs lengths, on the device what does not."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch

from evenstep.packing.collate import collate_rows
from evenstep.packing.fields import Padding, round_up
from evenstep.packing.fused import keywords_of
from evenstep.packing.places import TOKENS, Places, boundaries_of, lengthen, other_length
from evenstep.packing.shard import Shard, shard_indices, shard_tensor
from evenstep.packing.text import pack_text
from evenstep.packing.varlen import collate_varlen
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
_TARGETS = "shift_labels"


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
        main = chosen.get(TOKENS) or next(iter(chosen.values()), None)
        if main is None:
            return batch
        documents = [shard for shard in chosen.values() if shard.unit == "document"]
        places = Places.of(batch, self._divisor(documents[0])) if documents else None

        def pad(path: str, leaf: Any) -> Any:
            shard = chosen.get(path)
            if shard is None:
                return leaf
            fill = self._fill(path) if shard.pad is None else shard.pad
            if shard.unit == "document":
                return leaf if places is None else places.move(path, leaf, shard.dim, fill)
            return _pad(
                leaf, shard.dim, round_up(leaf.shape[shard.dim], "divisor", self._divisor(shard)), fill
            )

        before = batch
        batch = map_leaves(pad, batch)
        if not isinstance(batch, MutableMapping) or not isinstance(batch.get(TOKENS), torch.Tensor):
            return batch
        if places is not None:
            return places.tell(batch)
        if main.unit == "row" and TOKENS in chosen:
            return lengthen(before, batch, batch[TOKENS].shape[main.dim])
        return batch

    def slice(
        self, batch: Any, bring: Callable[[torch.Tensor, torch.device], torch.Tensor] | None = None
    ) -> Any:
        """This rank's part of a batch whose units are padded; nothing waits for a device where boundaries are on it.

        Args:
            batch: The whole.
            bring: Copies boundaries to the device of a field that is divided by document, where they are not there; None:
                ``tensor.to(device)``, for which the host waits.

        Raises:
            ValueError: A named field is missing, or its length is no multiple of the divisor.
        """
        chosen = self._chosen(batch)
        indices: dict[torch.device, torch.Tensor] = {}  # the same for all fields that are divided by document
        length = 0

        def cut(path: str, leaf: Any) -> Any:
            nonlocal length
            shard = chosen.get(path)
            if shard is None:
                return leaf
            part, parts = self.parts[shard.mesh_dim]
            if shard.unit == "row":
                return shard_tensor(leaf, shard.dim, part, parts, shard.mode)
            if not indices:
                length = leaf.shape[shard.dim]
            if leaf.shape[shard.dim] != length:
                raise other_length(path, leaf.shape[shard.dim], length)
            if leaf.device not in indices:
                bounds = boundaries_of(batch)
                here = (
                    bounds
                    if bounds.device == leaf.device
                    else (bring or torch.Tensor.to)(bounds, leaf.device)
                )
                indices[leaf.device] = shard_indices(length, part, parts, shard.mode, here)
            return leaf.index_select(shard.dim, indices[leaf.device])

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
        tokens = chosen.get(TOKENS)
        if tokens is not None:
            length = leaves[TOKENS].shape[tokens.dim]
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
        shard = self.shards.get("labels", self.shards.get(TOKENS))
        if shard is None:
            return batch
        labels = batch["labels"]
        length = labels.shape[shard.dim]
        last = torch.full_like(labels.narrow(shard.dim, 0, 1), self.padding.ignore_index)
        batch = copy.copy(batch)
        batch[_TARGETS] = torch.cat([labels.narrow(shard.dim, 1, length - 1), last], shard.dim)
        return batch


def _pad(whole: torch.Tensor, dim: int, length: int, fill: float) -> torch.Tensor:
    missing = length - whole.shape[dim]
    if not missing:
        return whole
    shape = list(whole.shape)
    shape[dim] = missing
    return torch.cat([whole, torch.full(shape, fill, dtype=whole.dtype)], dim)
