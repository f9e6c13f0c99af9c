"""Brings small host tensors to a device in the midst of a step, without waiting for what the device has yet to do."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import torch

from evenstep.device.batches import pin_batch, to_device
from evenstep.device.streams import Event, Streams, is_accelerator, streams_of

__all__ = ["Uploads"]

_Held = deque[tuple[Event, Any]]


class Uploads:
    """Copies on the caller's current stream, from pinned memory that is held until the device has read it.

    A copy from ordinary memory would have the host wait until the stream has come so far: for the training step. To
    pin may take its time for the first tensors of a size, whose memory is then used again.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, Streams] = {}
        self._held: _Held = deque()
        weakref.finalize(self, _leave, self._held).atexit = False  # the device may be gone by then

    def __call__(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """``tensor`` on ``device``; only what comes to the host is waited for."""
        if not is_accelerator(device):
            return tensor.to(device)
        while self._held and self._held[0][0].query():
            self._held.popleft()
        streams = self._streams.get(device)
        if streams is None:
            streams = self._streams[device] = streams_of(device)
        with streams.bind():
            pinned = pin_batch(tensor)
        copied = streams.new_event()
        moved: torch.Tensor = to_device(pinned, streams.device)
        copied.record(streams.current_stream())
        self._held.append((copied, pinned))
        return moved


def _leave(held: _Held) -> None:
    for copied, _ in held:
        copied.synchronize()
    held.clear()
