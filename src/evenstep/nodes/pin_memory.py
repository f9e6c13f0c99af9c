"""Put batches into page-locked memory, from which a device copies without the host waiting."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torchdata.nodes import BaseNode

from evenstep.device import DeviceLike, Streams, is_accelerator, pin_batch, streams_of
from evenstep.nodes.stage import Stage

__all__ = ["PinMemory"]


class PinMemory(Stage[Any, Any]):
    """Batches of ``source`` in pinned memory; on the CPU they pass through untouched, at no cost.

    Stands before `HostPrefetch`, whose thread then pays for the copy.

    Args:
        source: Makes batches.
        device: The accelerator they will go to; without an index, the one that is current where this node is
            made. It is made current only while pinning.
        cpu_fields: Paths of fields that stay on the host (``"labels"``, ``"vision.grid"``): not pinned.
    """

    shown_as = "pin"

    def __init__(
        self, source: BaseNode[Any], device: DeviceLike, *, cpu_fields: Collection[str] = ()
    ) -> None:
        super().__init__(source)
        self._cpu_fields = frozenset(cpu_fields)
        # Here, not in the thread that pins, where another device may be current.
        self._streams: Streams | None = streams_of(device) if is_accelerator(device) else None

    def produce(self) -> Any:
        """The next batch, pinned."""
        batch = next(self.source)
        if self._streams is None:
            return batch
        with self._streams.bind():
            return pin_batch(batch, self._cpu_fields)
