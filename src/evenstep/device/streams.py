"""Streams and events of any accelerator, through one code path.

One for every accelerator that `torch.get_device_module` knows (cuda, npu, xpu, ...). Whatever has the methods of
`Streams` can stand in for one, as `evenstep.testing.simulated_device` does.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias

import torch

__all__ = [
    "DeviceLike",
    "Event",
    "Stream",
    "Streams",
    "TorchStreams",
    "bind_thread",
    "is_accelerator",
    "streams_of",
]


class Event(Protocol):
    """A mark in a stream."""

    def record(self, stream: Any) -> None:
        """Put the mark behind everything ``stream`` was given so far."""

    def query(self) -> bool:
        """Whether the device has passed the mark; does not wait."""

    def synchronize(self) -> None:
        """Wait until the device has passed the mark."""


class Stream(Protocol):
    """A queue of work on a device."""

    def wait_event(self, event: Any) -> None:
        """Work given to this stream from now on starts after ``event``; the caller does not wait."""


class Streams(Protocol):
    """An accelerator, as far as moving batches needs one.

    Attributes:
        device: What ``.to(...)`` of a batch's leaves takes.
    """

    device: Any

    def new_stream(self) -> Stream:
        """A stream of its own."""

    def new_event(self) -> Event:
        """An event that nobody has recorded."""

    def current_stream(self) -> Stream:
        """The stream on which the calling thread launches work for the device."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Make ``stream`` (and its device) current in the calling thread."""

    def bind(self) -> AbstractContextManager[Any]:
        """Make the device current in the calling thread."""


DeviceLike: TypeAlias = torch.device | str | Streams


class TorchStreams:
    """An accelerator of this process, through `torch.get_device_module`.

    Args:
        device: An accelerator; without an index, the one that is current in the calling thread.

    Raises:
        ValueError: This build of torch has no streams for the device.
    """

    def __init__(self, device: torch.device | str) -> None:
        wanted = torch.device(device)
        try:
            module = torch.get_device_module(wanted)
            self._stream, self._event = module.Stream, module.Event
            self._on, self._current, self._bind = module.stream, module.current_stream, module.device
        except (AttributeError, RuntimeError) as error:
            raise ValueError(
                f"device {str(wanted)!r} has no streams in this build of torch ({error}): batches cannot be copied "
                "ahead. Install the build (or extension, such as torch-npu) for it, or pass device='cpu' and "
                "move the batches in the training loop."
            ) from None
        index = module.current_device() if wanted.index is None else wanted.index
        self.device: torch.device = torch.device(wanted.type, index)

    def new_stream(self) -> Stream:
        """A stream on this device."""
        stream: Stream = self._stream(device=self.device)
        return stream

    def new_event(self) -> Event:
        """An event without timing, which is cheaper."""
        event: Event = self._event()
        return event

    def current_stream(self) -> Stream:
        """The calling thread's current stream of this device."""
        stream: Stream = self._current(self.device)
        return stream

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """The device module's own stream context."""
        context: AbstractContextManager[Any] = self._on(stream)
        return context

    def bind(self) -> AbstractContextManager[Any]:
        """The device module's own device context."""
        context: AbstractContextManager[Any] = self._bind(self.device)
        return context


def is_accelerator(device: DeviceLike) -> bool:
    """Whether batches must be copied to get there (anything but ``"cpu"``)."""
    return not isinstance(device, (str, torch.device)) or torch.device(device).type != "cpu"


def streams_of(device: DeviceLike) -> Streams:
    """The streams of an accelerator; an object that already has the methods of `Streams` is returned itself."""
    return TorchStreams(device) if isinstance(device, (str, torch.device)) else device


def bind_thread(device: DeviceLike) -> None:
    """Make ``device`` current in the calling thread, for its life; nothing to do on the CPU."""
    if isinstance(device, (str, torch.device)) and is_accelerator(device):
        torch.get_device_module(torch.device(device)).set_device(TorchStreams(device).device)
