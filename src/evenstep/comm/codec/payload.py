"""The default codec: any ordinary sample as raw columns and a little JSON, without pickle on either side."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from evenstep.comm.codec import frame, layout
from evenstep.comm.codec.containers import DictNode, parse_structure, structure_json
from evenstep.comm.codec.describe import describe
from evenstep.comm.codec.nodes import Node
from evenstep.comm.codec.scan import Unsupported, alike_columns, scan
from evenstep.errors import WireFormatError

__all__ = ["PayloadCodec"]

_CACHED_SIGNATURES = 4096


class _Structure(NamedTuple):
    node: Node
    json: bytes
    key: int


class PayloadCodec:
    """Encodes samples of nested dict, list, tuple, NamedTuple and dataclass of tensors and plain values.

    Tensors arrive on the CPU, contiguous and detached; everything else arrives with its type, dtype, shape and
    bytes unchanged. What is decoded shares memory with the received buffer.
    """

    def __init__(self) -> None:
        self._structures: dict[tuple[Any, ...], _Structure] = {}

    def measure(self, sample: Any) -> tuple[int, int]:
        """Bytes of the variable part of ``sample`` in a segment, and the key of its structure.

        Returns:
            ``(nbytes, structure)``, both positive int63: what `segment_bytes` needs.

        Raises:
            TypeError: If the sample holds something that cannot be sent; names the path.
        """
        nbytes, structure = self._scan(sample)
        return nbytes, structure.key

    def segment_bytes(self, nbytes: npt.ArrayLike, structures: npt.ArrayLike) -> int:
        """Bytes of the segment that holds samples; see `layout.segment_bytes`."""
        return layout.segment_bytes(nbytes, structures)

    def encode(self, samples: Sequence[Any], out: Tensor) -> None:
        """Write ``samples`` into ``out`` (uint8 ``[segment_bytes]``, contiguous, CPU).

        Raises:
            TypeError: If a sample holds something that cannot be sent.
            ValueError: If ``out`` is not of the size that the samples' measures give.
        """
        if not samples and not out.numel():
            return
        writer = frame.Writer()
        columns = alike_columns(samples) if len(samples) > 1 else None
        if columns is not None:
            structure = self._scan(samples[0])[1]
            assert isinstance(structure.node, DictNode), "alike samples are dictionaries"
            structure.node.encode_columns(columns, writer)
            writer.write(out, bytes(layout.INDEX.itemsize * len(samples)), [(len(samples), structure.json)])
            return
        groups, members, index = self._group(samples)
        for structure, values in zip(groups, members, strict=True):
            structure.node.encode(values, writer)
        counts = map(len, members)
        writer.write(out, index.tobytes(), [(n, group.json) for n, group in zip(counts, groups, strict=True)])

    def decode(self, buffer: Tensor, count: int) -> list[Any]:
        """The ``count`` samples of a segment, as writable views into ``buffer`` (uint8 ``[segment_bytes]``).

        Raises:
            WireFormatError: If the bytes are not a segment of ``count`` samples.
        """
        if not count and not buffer.numel():
            return []
        reader = frame.Reader(buffer, count)
        index, structures = reader.structures()
        try:
            columns = [parse_structure(text).decode(n, reader) for text, n in structures]
        except WireFormatError:
            raise
        except (ValueError, RuntimeError, OverflowError, TypeError, AttributeError) as error:
            raise WireFormatError(f"segment cannot be decoded: {error}") from error
        reader.close()
        if len(columns) == 1:
            return columns[0]
        following = [iter(column) for column in columns]
        return [next(following[number]) for number in index.tolist()]

    def _group(
        self, samples: Sequence[Any]
    ) -> tuple[list[_Structure], list[list[Any]], npt.NDArray[np.uint32]]:
        """The different structures of ``samples``, the samples of each, and the structure number of each sample."""
        numbers: dict[int, int] = {}
        groups: list[_Structure] = []
        members: list[list[Any]] = []
        index: list[int] = []
        last: _Structure | None = None
        number = 0
        for sample in samples:
            structure = self._scan(sample)[1]
            if structure is not last:
                number = numbers.setdefault(structure.key, len(groups))
                if number == len(groups):
                    groups.append(structure)
                    members.append([])
                elif groups[number].json != structure.json:
                    raise ValueError(
                        f"two structures of samples have the same key {structure.key}; rename a field of one"
                    )
                last = structure
            members[number].append(sample)
            index.append(number)
        return groups, members, np.array(index, layout.INDEX)

    def _scan(self, sample: Any) -> tuple[int, _Structure]:
        signature: list[Any] = []
        try:
            nbytes = scan(sample, signature)
        except (Unsupported, RecursionError):
            nbytes = -1
        if nbytes < 0:
            describe(sample)  # names what cannot be sent and where it is
            raise AssertionError(f"a sample of type {type(sample)} can be described but not sized")
        key = tuple(signature)
        structure = self._structures.get(key)
        if structure is None:
            structure = self._add(key, sample)
        return nbytes, structure

    def _add(self, key: tuple[Any, ...], sample: Any) -> _Structure:
        node = describe(sample)
        text = structure_json(node)
        digest = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
        structure = _Structure(node, text, layout.structure_key(digest, len(text), node.columns))
        if len(self._structures) >= _CACHED_SIGNATURES:
            self._structures.clear()  # samples hardly share structures; do not grow without bound
        self._structures[key] = structure
        return structure
