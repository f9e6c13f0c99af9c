"""How a sequence is divided over context-parallel ranks: which tokens each of them gets, and how they come back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

__all__ = ["Shard", "shard_indices", "shard_tensor", "unshard"]

_MODES = ("contiguous", "zigzag")
_UNITS = ("row", "document")


@dataclass(frozen=True, slots=True)
class Shard:
    """How one field of a batch is divided over the ranks of a mesh dimension.

    ```
    unit="row", 2 ranks        contiguous  0 0 0 0 1 1 1 1      zigzag  0 0 1 1 1 1 0 0
    unit="document", 2 ranks   contiguous  0 0 1 1|0 0 1 1      zigzag  0 1 1 0|0 1 1 0
    ```

    A causal token's work grows with its position, so under ``"contiguous"`` the last rank has nearly twice the mean.
    ``"zigzag"`` cuts into two chunks per rank and gives rank ``r`` of ``n`` the chunks ``r`` and ``2n - 1 - r``: all ranks
    have the same work (ring attention with load balancing; Megatron-LM, Transformer Engine and torch's
    ``context_parallel`` divide this way).

    Attributes:
        mesh_dim: Name of the mesh dimension whose ranks share the field; not a data-parallel one.
        dim: Dimension of the field that counts tokens.
        mode: Which tokens a rank gets.
        unit: What is divided: the whole ``"row"`` (or flat sequence), or each ``"document"`` of a flat sequence by itself,
            which balances rows of many documents too (the ``thd`` layout of Transformer Engine).
        pad: What fills the field up to a multiple of the divisor; None: as the field is padded elsewhere
            (``pad_token_id``, ``ignore_index``, ``pad_values``, else 0).

    Raises:
        TypeError, ValueError: An attribute does not fit; the message names it.
    """

    mesh_dim: str
    dim: int = -1
    mode: Literal["contiguous", "zigzag"] = "contiguous"
    unit: Literal["row", "document"] = "row"
    pad: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.mesh_dim, str):
            raise TypeError(f"Shard mesh_dim={self.mesh_dim!r}, expected the name of a mesh dimension")
        if isinstance(self.dim, bool) or not isinstance(self.dim, int):
            raise TypeError(f"Shard dim={self.dim!r} ({type(self.dim).__name__}), expected an integer")
        for name, choices in (("mode", _MODES), ("unit", _UNITS)):
            if getattr(self, name) not in choices:
                raise ValueError(f"Shard {name}={getattr(self, name)!r}, expected one of {list(choices)}")
        if self.pad is not None and (isinstance(self.pad, bool) or not isinstance(self.pad, (int, float))):
            raise TypeError(f"Shard pad={self.pad!r} ({type(self.pad).__name__}), expected a number or None")

    def divisor(self, parts: int) -> int:
        """What must divide the length of a unit that ``parts`` ranks share."""
        return parts * (2 if self.mode == "zigzag" else 1)


def shard_indices(
    length: int, part: int, parts: int, mode: str, boundaries: torch.Tensor | None = None
) -> torch.Tensor:
    """Where the tokens of one slice stand in the whole; nothing waits for a device.

    Args:
        length: Tokens of the whole; each unit's is a multiple of ``parts`` (``2 * parts`` for zigzag).
        part: Which slice, from 0.
        parts: Number of slices.
        mode: ``"contiguous"`` or ``"zigzag"``.
        boundaries: Where the documents stand, integers ``[documents + 1]`` from 0 to ``length``; None, or no document:
            the whole is one unit.

    Returns:
        int64 ``[length // parts]``, on the device of ``boundaries``.
    """
    device = None if boundaries is None else boundaries.device
    local = torch.arange(length // parts, device=device)
    if boundaries is None or len(boundaries) < 2:
        return _of_unit(local, length, part, parts, mode)
    bounds = boundaries.to(torch.int64)
    local_bounds = bounds // parts
    document = torch.searchsorted(local_bounds, local, right=True) - 1
    sizes = bounds.diff()[document]
    return bounds[document] + _of_unit(local - local_bounds[document], sizes, part, parts, mode)


def _of_unit(
    offset: torch.Tensor, size: int | torch.Tensor, part: int, parts: int, mode: str
) -> torch.Tensor:
    """Place inside its unit of the token ``offset`` of the slice's share of it."""
    if mode == "contiguous":
        return offset + part * (size // parts)
    chunk = size // (2 * parts)
    head, tail = (
        part * chunk,
        (2 * parts - 2 - part) * chunk,
    )  # the tail's chunk 2n - 1 - r, less its share's head
    return offset + torch.where(offset < chunk, head, tail)


def shard_tensor(
    whole: torch.Tensor, dim: int, part: int, parts: int, mode: str, boundaries: torch.Tensor | None = None
) -> torch.Tensor:
    """One slice of ``whole`` along ``dim``; arguments as for `shard_indices`.

    Raises:
        ValueError: The length is no multiple of the divisor.
    """
    length = whole.shape[dim]
    divisor = parts * (2 if mode == "zigzag" else 1)
    if length % divisor:
        raise ValueError(
            f"a dimension of {length} tokens cannot be divided over {parts} ranks in mode {mode!r}: some would get fewer "
            f"than others. Pad it to a multiple of {divisor}."
        )
    if boundaries is not None:
        index = shard_indices(length, part, parts, mode, boundaries)
        return whole.index_select(dim, index.to(whole.device))
    size = length // divisor
    if mode == "contiguous":
        return whole.narrow(dim, part * size, size).contiguous()
    ends = (part, 2 * parts - 1 - part)
    return torch.cat([whole.narrow(dim, chunk * size, size) for chunk in ends], dim)


def unshard(
    slices: Sequence[torch.Tensor], dim: int, mode: str, boundaries: torch.Tensor | None = None
) -> torch.Tensor:
    """The whole, from the slices of all ranks in their order (logits that were gathered, say).

    Args:
        slices: What `shard_tensor` made of it.
        dim: As they were divided.
        mode: As they were divided.
        boundaries: As they were divided.
    """
    parts, joined = len(slices), torch.cat(list(slices), dim)
    length = joined.shape[dim]
    index = torch.cat([shard_indices(length, part, parts, mode, boundaries) for part in range(parts)])
    return torch.empty_like(joined).index_copy_(dim, index.to(joined.device), joined)
