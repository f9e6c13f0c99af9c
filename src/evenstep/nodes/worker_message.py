"""What a worker process sends: one buffer for many samples.

Torch shares every tensor by itself and keeps a file descriptor for as long as it lives; a window of some thousand
samples would run out of them.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np
import torch

__all__ = ["WorkerMessage", "pack_message", "rebuilt", "unpack_message"]

WorkerMessage = tuple[bytes, list[int], torch.Tensor]
_ALIGNMENT = 64  # bytes, as the widest vector registers like it


class _Pickler(pickle.Pickler):
    """Dense CPU tensors travel as buffers outside the pickle, as NumPy arrays do by themselves."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or value.layout != torch.strided or value.device.type != "cpu":
            return NotImplemented
        if value.requires_grad or value.is_conj() or value.is_neg() or value.is_quantized:
            return NotImplemented
        raw = value.contiguous().reshape(-1).view(torch.uint8).numpy()
        return _rebuild, (raw, value.dtype, tuple(value.shape))


def _rebuild(
    raw: np.ndarray[Any, np.dtype[np.uint8]], dtype: torch.dtype, shape: tuple[int, ...]
) -> torch.Tensor:
    if not raw.size:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(raw).view(dtype).reshape(shape)


def pack_message(values: list[Any]) -> WorkerMessage:
    """``values`` as a pickle, and the sizes and bytes of what lies outside it."""
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(values)
    parts = [np.frombuffer(buffer.raw(), dtype=np.uint8) for buffer in buffers]
    sizes = [len(part) for part in parts]
    flat = torch.empty(sum(map(_padded, sizes)), dtype=torch.uint8)
    begin = 0
    for part in parts:
        flat.numpy()[begin : begin + len(part)] = part
        begin += _padded(len(part))
    return stream.getvalue(), sizes, flat


def unpack_message(message: WorkerMessage) -> list[Any]:
    """The values, writable, in memory of this process."""
    data, sizes, shared = message
    flat: Any = memoryview(shared.clone().numpy())  # type: ignore[arg-type]  # NumPy's stubs leave the buffer out
    buffers, begin = [], 0
    for size in sizes:
        buffers.append(flat[begin : begin + size])
        begin += _padded(size)
    values: list[Any] = pickle.loads(data, buffers=buffers)
    return values


def rebuilt(error: Exception) -> Exception | None:
    """``error`` as the other side of a message would see it; None if it cannot be sent or rebuilt."""
    try:
        again: Exception = pickle.loads(pickle.dumps(error))
    except Exception:
        return None
    return again


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
