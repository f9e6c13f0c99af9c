"""Move batches to an accelerator behind the training stream's back: the only room that knows streams."""

from __future__ import annotations

from evenstep.device.batches import pin_batch, to_device
from evenstep.device.memory import DeviceMemory
from evenstep.device.streams import (
    DeviceLike,
    Event,
    Stream,
    Streams,
    TorchStreams,
    bind_thread,
    is_accelerator,
    streams_of,
)

__all__ = [
    "DeviceLike",
    "DeviceMemory",
    "Event",
    "Stream",
    "Streams",
    "TorchStreams",
    "bind_thread",
    "is_accelerator",
    "pin_batch",
    "streams_of",
    "to_device",
]
