"""How samples become bytes: `PayloadCodec` for ordinary values, `PickleCodec` for trusted peers.

A codec keeps nothing between ranks. The sender and the receiver derive the size of a segment from two int64
columns, so that no sizes and no structures are exchanged before it:

    columns = [codec.measure(sample) for sample in samples]      # when the sample is read
    size = codec.segment_bytes(nbytes, structures)               # on both sides, from the gathered columns
    codec.encode(samples, out)                                   # one copy into the send buffer
    samples = codec.decode(buffer, count)                        # views into the receive buffer
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy.typing as npt
from torch import Tensor

from evenstep.comm.codec.layout import segment_bytes
from evenstep.comm.codec.payload import PayloadCodec
from evenstep.comm.codec.pickled import PickleCodec

__all__ = ["Codec", "PayloadCodec", "PickleCodec", "segment_bytes"]


@runtime_checkable
class Codec(Protocol):
    """What the exchange needs of a codec. Methods are called from several threads."""

    def measure(self, sample: Any) -> tuple[int, int]:
        """``(nbytes, structure)`` of a sample; both >= 0 and below 2**63; TypeError if it cannot be sent."""

    def segment_bytes(self, nbytes: npt.ArrayLike, structures: npt.ArrayLike) -> int:
        """Bytes of the segment of samples whose measures are int64 ``[n]`` and int64 ``[n]``; 0 if ``n`` is 0."""

    def encode(self, samples: Sequence[Any], out: Tensor) -> None:
        """Write the samples into all of ``out``, uint8 ``[segment_bytes]``."""

    def decode(self, buffer: Tensor, count: int) -> list[Any]:
        """Read the samples of a segment, uint8 ``[segment_bytes]``; `WireFormatError` if it is malformed."""
