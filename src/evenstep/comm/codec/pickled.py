"""A codec for objects that only pickle knows, for trusted peers and by explicit choice only."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from evenstep.errors import WireFormatError

__all__ = ["PickleCodec"]

_STRUCTURE = 1
_HEADER = struct.Struct("<8sQ")
_MAGIC = b"evnpickl"


class PickleCodec:
    """Encodes any sample by pickling it. Slow, and **unsafe**.

    Decoding runs whatever code the sender put into the pickle: use it only if every process that can join the
    process group is trusted. Samples are pickled twice: when measured and, if they move, when encoded.
    """

    def measure(self, sample: Any) -> tuple[int, int]:
        """Bytes of the pickled sample and a constant."""
        return len(pickle.dumps(sample, pickle.HIGHEST_PROTOCOL)), _STRUCTURE

    def segment_bytes(self, nbytes: npt.ArrayLike, structures: npt.ArrayLike) -> int:  # noqa: ARG002 - the protocol
        """Bytes of the segment that holds samples of these measures (int64 ``[n]`` each)."""
        sizes = np.asarray(nbytes, dtype=np.int64)
        return int(sizes.sum()) + 8 * len(sizes) + _HEADER.size if len(sizes) else 0

    def encode(self, samples: Sequence[Any], out: Tensor) -> None:
        """Write ``samples`` into ``out`` (uint8 ``[segment_bytes]``).

        Raises:
            ValueError: If they do not fill ``out``: a sample was changed after it was measured.
        """
        if not samples and not out.numel():
            return
        parts = [pickle.dumps(sample, pickle.HIGHEST_PROTOCOL) for sample in samples]
        sizes = np.array([len(part) for part in parts], dtype="<i8")
        frame = b"".join([_HEADER.pack(_MAGIC, len(parts)), sizes.tobytes(), *parts])
        if len(frame) != out.numel():
            raise ValueError(
                f"the pickled samples take {len(frame)} bytes but out has {out.numel()}: a sample was changed after "
                "it was measured, or does not pickle to the same size twice"
            )
        out.numpy()[:] = np.frombuffer(frame, np.uint8)

    def decode(self, buffer: Tensor, count: int) -> list[Any]:
        """The ``count`` samples of a segment; runs the pickles.

        Raises:
            WireFormatError: If the frame is not of ``count`` pickles, or one of them cannot be read.
        """
        if not count and not buffer.numel():
            return []
        data = buffer.contiguous().numpy().data
        start = _HEADER.size + 8 * count
        if len(data) < start or _HEADER.unpack_from(data) != (_MAGIC, count):
            raise WireFormatError(f"segment of {len(data)} bytes is no frame of {count} pickled samples")
        sizes = np.frombuffer(data[_HEADER.size : start], "<i8")
        if (sizes < 0).any() or float(sizes.sum(dtype=np.float64)) != len(data) - start:
            raise WireFormatError(
                f"sizes of pickled samples do not add up to the segment's {len(data)} bytes"
            )
        ends = (start + np.cumsum(sizes)).tolist()
        try:
            return [pickle.loads(data[a:b]) for a, b in zip([start, *ends[:-1]], ends, strict=True)]
        except Exception as error:
            raise WireFormatError(f"a pickled sample cannot be read: {error!r}") from error
