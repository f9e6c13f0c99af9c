"""Reads the fields of samples and rows, so that every layout cuts and pads all of them by one set of rules."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

__all__ = [
    "INT32_MAX",
    "NOT_PER_TOKEN",
    "Array",
    "Padding",
    "as_tensor",
    "common_dim",
    "concatenate",
    "own",
    "round_up",
    "token_dim",
]

Array = npt.NDArray[np.int64]

INT32_MAX = 2**31 - 1

# Image fields of Hugging Face processors: their first dimension counts patches or images, and may equal the
# number of tokens by chance.
NOT_PER_TOKEN = frozenset(
    {
        "pixel_values",
        "image_grid_thw",
        "pixel_values_videos",
        "video_grid_thw",
        "second_per_grid_ts",
        "image_sizes",
    }
)


@dataclass(frozen=True, slots=True)
class Padding:
    """What stands where no token is.

    Attributes:
        pad_token_id: Value of ``input_ids``.
        ignore_index: Value of ``labels``.
        values: Value of every other per-token field by name; 0 for those not named.
    """

    pad_token_id: int = 0
    ignore_index: int = -100
    values: Mapping[str, float] = field(default_factory=dict)

    def of(self, name: str) -> float:
        """The padding value of field ``name``."""
        if name == "input_ids":
            return self.pad_token_id
        if name == "labels":
            return self.ignore_index
        return self.values.get(name, 0)


def as_tensor(value: Any) -> torch.Tensor | None:
    """``value`` as a CPU tensor without gradient, sharing storage where it can; None if it holds no numbers."""
    if isinstance(value, torch.Tensor):
        return value.detach() if value.requires_grad else value
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biufc":
            return None
        if not (value.flags.writeable and value.dtype.isnative and all(s >= 0 for s in value.strides)):
            # from_numpy warns on read-only memory (a memory map, say) and refuses the other two.
            value = np.array(value, dtype=value.dtype.newbyteorder("="))
        return torch.from_numpy(value)
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray):
        if len(value) == 0:
            return torch.empty(0, dtype=torch.int64)
        if not isinstance(value[0], int | float | np.number | Sequence) or isinstance(value[0], str | bytes):
            return None
        try:
            return torch.tensor(value)
        except (TypeError, ValueError):
            return None
    return None


def own(value: Any) -> Any:
    """``value`` without storage in common with its sample."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    return copy.deepcopy(value)


def token_dim(
    name: str, tensor: torch.Tensor | None, tokens: int, dims: Mapping[str, int | None]
) -> int | None:
    """The dimension of ``tensor`` that counts tokens, or None if the field is not per token.

    Without an entry in ``dims`` it is the last dimension if its size is ``tokens`` (``[tokens]``,
    ``[3, tokens]``), else the first one (``[tokens, width]``).

    Raises:
        ValueError: ``dims`` names a dimension whose size is not ``tokens``.
    """
    if name in dims:
        dim = dims[name]
        if dim is None:
            return None
        if tensor is None or not -tensor.dim() <= dim < tensor.dim() or tensor.shape[dim] != tokens:
            shape = None if tensor is None else list(tensor.shape)
            raise ValueError(
                f"field {name!r} has shape {shape}, but token_dims says that its dimension {dim} counts the "
                f"{tokens} tokens of the sample; it could not be cut with them; correct the field or token_dims"
            )
        return dim % tensor.dim()
    if tensor is None or tensor.dim() == 0 or name in NOT_PER_TOKEN:
        return None
    if tensor.shape[-1] == tokens:
        return tensor.dim() - 1
    return 0 if tensor.shape[0] == tokens else None


def common_dim(
    name: str,
    tensors: Sequence[torch.Tensor | None],
    lengths: Sequence[int],
    dims: Mapping[str, int | None],
) -> int | None:
    """The dimension that counts tokens in all ``tensors``, of samples with ``lengths`` tokens; None: in none of them.

    Raises:
        ValueError: Some tensors have one value per token and others do not.
    """
    found = [token_dim(name, tensor, n, dims) for tensor, n in zip(tensors, lengths, strict=True)]
    for dim in dict.fromkeys(found):
        # The size of another dimension may equal one sample's length by chance, not that of all.
        if dim is not None and all(
            t is not None and t.dim() > dim and t.shape[dim] == n
            for t, n in zip(tensors, lengths, strict=True)
        ):
            return dim
    if all(dim is None for dim in found):
        return None
    wrong = next(k for k, dim in enumerate(found) if dim is None or dim != found[0])
    raise length_error(name, tensors[wrong], wrong, lengths[wrong])


def length_error(name: str, tensor: torch.Tensor | None, position: int, length: int) -> ValueError:
    """What to tell of a field that is not as long as the tokens."""
    shape = "no numbers" if tensor is None else f"shape {list(tensor.shape)}"
    remedy = "" if name == "labels" else f", or say token_dims={{{name!r}: None}} if it is not per token"
    return ValueError(
        f"field {name!r} has {shape} in sample {position} of a row, which has {length} tokens; its values would stand "
        f"beside the wrong tokens; give one value per token{remedy}"
    )


Count = TypeVar("Count", int, Array)


def round_up(count: Count, name: str, multiple: int) -> Count:
    """``count`` as a multiple of ``multiple``, the option ``name``.

    Raises:
        ValueError: ``multiple`` is no positive int.
    """
    if isinstance(multiple, bool) or not isinstance(multiple, (int, np.integer)) or multiple < 1:
        raise ValueError(f"{name} is {multiple!r}; it must be an int of at least 1, and 1 means no padding")
    multiple = int(multiple)
    return -(-count // multiple) * multiple


def concatenate(
    parts: Sequence[torch.Tensor], dim: int, length: int, pad: float, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """``parts`` one after another along ``dim``, filled up with ``pad`` to ``length``, in one new allocation.

    Args:
        parts: At least one tensor; equal shapes but for ``dim``.
        dim: Non-negative dimension to join.
        length: Size of ``dim`` in the result.
        pad: Value behind the parts.
        dtype: Result type; None promotes the types of the parts.
    """
    first = parts[0]
    if dtype is None:
        dtype = reduce(torch.promote_types, (part.dtype for part in parts))
    shape = list(first.shape)
    shape[dim] = length
    out = torch.empty(shape, dtype=dtype, device=first.device)
    used = sum(part.shape[dim] for part in parts)
    torch.cat([part.to(dtype) for part in parts], dim=dim, out=out.narrow(dim, 0, used))
    out.narrow(dim, used, length - used).fill_(pad)
    return out
