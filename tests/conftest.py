"""What holds for every test: reproducible examples and one torch thread."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from hypothesis import HealthCheck, settings

# How long an example takes says more about the machine's other work than about the test.
_UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

settings.register_profile("dev", _UNTIMED)
settings.register_profile("ci", _UNTIMED, max_examples=100, derandomize=True, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev"))

# Tests that run side by side, and ranks that are threads, would only fight for the cores.
torch.set_num_threads(1)

# A shell has jobs in the background ignore Ctrl-C, and their children inherit that: tests of interrupts would wait.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def pins_without_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinning as torch does it (the same strides in new memory, see ATen's PinnedMemoryAllocator.cpp), in ordinary memory."""
    pinned: dict[int, torch.UntypedStorage] = {}  # held, so that no other tensor gets their place

    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        nbytes = (reach + 1) * tensor.element_size() if tensor.numel() else 0
        storage = torch.UntypedStorage(nbytes)
        twin = torch.empty(0, dtype=tensor.dtype).set_(storage, 0, tensor.shape, tensor.stride())
        twin.copy_(tensor)
        pinned[storage.data_ptr()] = storage
        return twin

    def is_pinned(tensor: torch.Tensor) -> bool:
        return tensor.numel() > 0 and tensor.untyped_storage().data_ptr() in pinned

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(torch.Tensor, "is_pinned", is_pinned)
