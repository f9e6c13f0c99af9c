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

    def syncs_in(self, run: Callable[[], object]) -> list[str]:
        """The host's waits for the device while ``run`` runs, by the name of the call."""
        from torch.profiler import ProfilerActivity, profile

        # Calls of the device's runtime are recorded with its own activity only.
        own = getattr(ProfilerActivity, self.device.type.upper(), ProfilerActivity.CPU)
        with profile(activities=list({ProfilerActivity.CPU: None, own: None})) as profiler:
            run()
        names = {event.key for event in profiler.key_averages()}
        # The profiler itself synchronizes the device when it stops.
        return sorted(name for name in names if "ynchronize" in name and "DeviceSync" not in name)

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
