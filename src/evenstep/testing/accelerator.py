"""An accelerator under test: kept busy for a known time, and watched for what makes the host wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from evenstep.device import streams_of

__all__ = ["Accelerator"]

SIZE = 2048  # of the matrices that keep the device busy
_RUN = "evenstep.syncs_in"  # the span of what is watched


class Accelerator:
    """The current device of a type.

    Attributes:
        module: What `torch.get_device_module` returns for it.
        device: The device, with its index.

    Args:
        name: Its type (``"cuda"``, ``"npu"``, ``"xpu"``).

    Raises:
        ValueError: This build of torch has no streams for it.
    """

    def __init__(self, name: str) -> None:
        self.module: Any = torch.get_device_module(name)
        self.device: torch.device = torch.device(name, self.module.current_device())
        self.module.set_device(self.device)
        streams_of(self.device)

    def sync(self) -> None:
        """Wait until the device has done everything it was given."""
        self.module.synchronize()

    @contextmanager
    def refuse_syncs(self) -> Iterator[None]:
        """Have torch raise where one of its operations makes the host wait, as far as it can tell."""
        switch = getattr(self.module, "set_sync_debug_mode", lambda _: None)
        switch("error")
        try:
            yield
        finally:
            switch("default")

    @property
    def sees_syncs(self) -> bool:
        """Whether `syncs_in` can see anything: torch's profiler records the calls of this type's runtime."""
        return _activity(self.device.type) is not None

    def syncs_in(self, run: Callable[[], object]) -> list[str]:
        """The host's waits for the device (also for all of it) in any thread while ``run`` runs, by the name of the call.

        Raises:
            ValueError: The profiler knows no such device; see `sees_syncs`.
        """
        from torch.profiler import ProfilerActivity, profile, record_function

        own = _activity(self.device.type)
        if own is None:
            raise ValueError(
                f"torch.profiler records nothing of {self.device.type} devices: look at sees_syncs first"
            )
        activities = list({ProfilerActivity.CPU: None, own: None})
        with profile(activities=activities) as profiler, record_function(_RUN):
            run()
        events = profiler.events() or ()
        # Some devices show the span on their own timeline, too.
        spans = [event for event in events if event.name == _RUN and event.device_type.name == "CPU"]
        span = spans[0].time_range
        # The profiler itself synchronizes the device, before the run and behind it.
        inside = [event for event in events if span.start <= event.time_range.start <= span.end]
        return sorted({event.name for event in inside if "ynchronize" in event.name})

    def busy(self, seconds: float) -> Callable[[], None]:
        """A launch of kernels that keep the device busy for about ``seconds``."""
        a = torch.randn(SIZE, SIZE, device=self.device)
        out = torch.empty_like(a)

        def launch(times: int) -> float:
            self.sync()
            begin = time.perf_counter()
            for _ in range(times):
                torch.mm(a, a, out=out)
            self.sync()
            return time.perf_counter() - begin

        launch(10)
        times = max(1, round(seconds * 50 / launch(50)))

        def run() -> None:
            for _ in range(times):
                torch.mm(a, a, out=out)

        return run


def _activity(name: str) -> Any:
    """What the calls of a device's runtime are recorded with; None if torch itself has nothing for it (npu)."""
    from torch.profiler import ProfilerActivity

    return getattr(ProfilerActivity, name.upper(), None)
