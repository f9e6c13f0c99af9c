"""One batch from a constructor to its model-parallel peers: a message, then its tensors.

The message holds the source's state, the scalars and the sizes; the structure only where it changed, or never where a
`BatchSpec` declares it. What is neither tensor nor scalar goes through the payload codec: nothing is pickled.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch

from evenstep.comm.batch_layout import Layout
from evenstep.comm.batch_message import BATCH, CONSTRUCTOR, END, ERROR, Heard, MessageChannel
from evenstep.comm.batch_spec import BatchSpec
from evenstep.comm.batch_structure import (
    SCALAR_TYPES,
    Leaves,
    TensorKind,
    describe,
    digest_of,
    dump,
    parse,
    rebuild,
    tensor_kinds,
)
from evenstep.comm.batch_tensors import TensorBroadcast
from evenstep.comm.buffers import BufferPool
from evenstep.comm.codec import PayloadCodec
from evenstep.comm.communicator import Communicator
from evenstep.comm.remote_errors import describe_error, remote_error
from evenstep.errors import ConfigMismatch, RemoteRankError, SampleError, WireFormatError

__all__ = ["BatchBroadcast", "Message", "Prepared"]

_POOL_BYTES = 1 << 28


@dataclass(slots=True)
class Message:
    """What the constructor told: a batch, an error, or (neither) the end.

    Attributes:
        state: The source's state at this batch or end; None with an error.
        batch: The batch.
        is_end: Whether the stream has ended.
        error: What every peer raises.
    """

    state: dict[str, Any] | None = None
    batch: Any = None
    is_end: bool = False
    error: RemoteRankError | None = None


@dataclass(slots=True)
class Prepared:
    """A batch that is known to be fit for sending; nobody has been told anything yet."""

    document: bytes
    extra: bytes
    tensors: list[torch.Tensor]
    kinds: list[TensorKind]
    layout: Layout
    structure: bytes


class BatchBroadcast:
    """One rank's end of the broadcasts of a data-parallel replica; position 0 sends, all others receive.

    Args:
        communicator: The ranks of the replica.
        spec: What every batch looks like; None to tell the structure whenever it changes.
        aside: The context in which messages travel, which the host waits for: on an accelerator, a stream that does
            not wait for the training step. Tensors on the device travel in the caller's.
    """

    def __init__(
        self,
        communicator: Communicator,
        spec: BatchSpec | None = None,
        aside: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._communicator = communicator
        self._ranks = communicator.ranks
        self._rank = communicator.ranks[communicator.position]
        self._spec = spec
        self._aside = aside
        pool = BufferPool(_POOL_BYTES)
        self._channel = MessageChannel(communicator, pool)
        self._tensors = TensorBroadcast(communicator, pool)
        self._codec = PayloadCodec()
        self._structure = b""  # what the peers were told last
        self._node: list[Any] = []
        self._kinds: list[TensorKind] = []
        self._last: tuple[list[TensorKind], list[list[int]], Layout] | None = None

    def restart(self) -> None:
        """The next message is the first of another stream (an epoch, a loaded state)."""
        self._channel.restart()

    def prepare(self, batch: Any, state: dict[str, Any]) -> Prepared:
        """Look at a batch without sending anything, so that whatever is wrong with it can still be told.

        Raises:
            TypeError: The batch or the state holds what cannot be sent.
            ValueError: The batch is not what the specification says.
        """
        leaves = Leaves()
        node = describe(batch, leaves)
        extra = self._encode(leaves, state)
        told: dict[str, Any] = {"scalars": leaves.scalars, "others": len(leaves.others)}
        if _is_json(state):
            told["state"] = state
        structure = b""
        if self._spec is not None:
            told["device"] = self._spec.check(node, leaves.tensors)
            told["dims"] = self._spec.dims_to_tell(leaves.tensors)
            told["spec"] = self._spec.digest
        else:
            structure = dump(node)
            told["digest"] = digest_of(structure)
            told["shapes"] = [list(tensor.shape) for tensor in leaves.tensors]
            if structure != self._structure:
                told["structure"] = node
        known = bool(structure) and structure == self._structure
        kinds = self._kinds if known else tensor_kinds(node)
        layout = self._layout(kinds, [list(tensor.shape) for tensor in leaves.tensors])
        return Prepared(_to_json(told), extra, leaves.tensors, kinds, layout, structure)

    def send(self, prepared: Prepared) -> None:
        """Broadcast a batch."""
        layout, tensors = prepared.layout, prepared.tensors
        tail: tuple[int, Callable[[torch.Tensor], object] | None] = (0, None)
        if layout.host.packs:
            first = layout.host.packs[0]
            tail = (first.nbytes, partial(first.fill, tensors))
        message = self._channel.compose(BATCH, prepared.document, prepared.extra, *tail)
        self._post(chain(message, self._tensors.host_buffers(tensors, layout)))
        self._structure, self._kinds = prepared.structure, prepared.kinds
        self._tensors.send_from_device(tensors, layout)

    def send_end(self, state: dict[str, Any]) -> None:
        """Tell the peers that the stream has ended."""
        extra = self._encode(Leaves(), state)
        told = {"state": state} if _is_json(state) else {}
        self._post(self._channel.compose(END, _to_json(told), extra))

    def send_error(self, error: BaseException) -> None:
        """Tell the peers why there is no next batch: where it first happened, in its own words."""
        told: dict[str, Any] = {"error": describe_error(error, self._rank).decode()}
        if isinstance(error, RemoteRankError) and not isinstance(error, SampleError):
            # The peers repeat what every other rank says.
            told["origin"] = [str(error), error.rank, error.error_type, error.error_message, error.sample]
        self._post(self._channel.compose(ERROR, _to_json(told)))

    def _post(self, buffers: Iterator[torch.Tensor]) -> None:
        with self._aside():
            self._communicator.broadcast_all(buffers, CONSTRUCTOR)

    def receive(self) -> Message:
        """Wait for the constructor's next message.

        Raises:
            RemoteRankError: The constructor is in another stream, or is gone.
            ConfigMismatch: It has another specification.
            WireFormatError: It sent something else.
        """
        with self._aside():
            heard = self._channel.listen()
        try:
            return self._read(heard)
        except (ConfigMismatch, WireFormatError):
            raise
        except (IndexError, KeyError, TypeError, ValueError) as error:
            sender = self._ranks[CONSTRUCTOR]
            raise WireFormatError(f"a message of rank {sender} cannot be read: {error!r}") from error

    def _read(self, heard: Heard) -> Message:
        told = heard.told
        if heard.kind == ERROR:
            return Message(error=_told_error(told))
        beside = "state" not in told
        others: list[Any] = []
        if heard.extra:
            buffer = torch.from_numpy(np.frombuffer(heard.extra, np.uint8).copy())
            others = self._codec.decode(buffer, told.get("others", 0) + beside)
        state = others.pop() if beside else told["state"]
        if heard.kind == END:
            return Message(state=state, is_end=True)
        shapes = self._shapes(told)
        leaves = Leaves()
        leaves.scalars, leaves.others = told["scalars"], others
        layout = self._layout(self._kinds, shapes)
        first = layout.host.packs[0].nbytes if layout.host.packs else 0
        if first != heard.tail_bytes:
            raise WireFormatError(
                f"rank {self._ranks[CONSTRUCTOR]} sent {heard.tail_bytes} bytes of small tensors, its own table of sizes says "
                f"{first}"
            )
        with self._aside():
            tensors = self._tensors.receive_on_host(self._kinds, shapes, layout, heard.tail)
        tensors.update(self._tensors.receive_on_device(self._kinds, shapes, layout))
        leaves.tensors = [
            tensors[leaf]
            if leaf in tensors
            else torch.empty(shape, dtype=kind.dtype, device=self._tensors.device_of(kind.device_type))
            for leaf, (kind, shape) in enumerate(zip(self._kinds, shapes, strict=True))
        ]
        return Message(state=state, batch=rebuild(self._node, leaves))

    def _layout(self, kinds: list[TensorKind], shapes: list[list[int]]) -> Layout:
        """Batches mostly look like the one before."""
        if self._last is None or self._last[0] is not kinds or self._last[1] != shapes:
            self._last = (kinds, shapes, Layout(kinds, shapes))
        return self._last[2]

    def _shapes(self, told: dict[str, Any]) -> list[list[int]]:
        """The shapes of the batch's tensors; takes note of its structure."""
        if self._spec is not None:
            if told.get("spec") != self._spec.digest:
                raise ConfigMismatch(
                    f"rank {self._ranks[CONSTRUCTOR]} sends batches by another batch specification than this rank's: its "
                    "bytes would be misread; give every rank of a data-parallel replica the same batch_spec"
                )
            self._node = self._spec.structure(told["device"])
            self._kinds = tensor_kinds(self._node)
            return self._spec.shapes(told["dims"])
        if "structure" in told:
            self._structure = dump(told["structure"])
            self._node = parse(self._structure)
            self._kinds = tensor_kinds(self._node)
        if told.get("digest") != digest_of(self._structure):
            raise WireFormatError(
                f"rank {self._ranks[CONSTRUCTOR]} sent a batch of a structure that this rank was never told; give every "
                "rank of a data-parallel replica the same batch_spec"
            )
        shapes: list[list[int]] = told["shapes"]
        if [len(shape) for shape in shapes] != [kind.ndim for kind in self._kinds] or any(
            type(n) is not int or n < 0 for shape in shapes for n in shape
        ):
            raise WireFormatError(f"sizes {shapes} do not fit the structure of the batch")
        return shapes

    def _encode(self, leaves: Leaves, state: dict[str, Any]) -> bytes:
        """What the codec takes: such leaves, and last the state where JSON would change it (a tensor, an integer key)."""
        values, measures = list(leaves.others), []
        for path, value in zip(leaves.paths, leaves.others, strict=True):
            try:
                measures.append(self._codec.measure(value))
            except TypeError as error:
                raise TypeError(f"batch{path} cannot be told to model-parallel peers: {error}") from None
        if not _is_json(state):
            values.append(state)
            try:
                measures.append(self._codec.measure(state))
            except TypeError as error:
                what = str(error).removeprefix("sample").partition(";")[0]
                raise TypeError(
                    f"the state at this batch cannot be told to model-parallel peers: state{what}; a state is made of "
                    "dicts, lists, tuples, numbers, strings, bytes, arrays and tensors"
                ) from None
        if not values:
            return b""
        nbytes, structures = zip(*measures, strict=True)
        out = torch.empty(self._codec.segment_bytes(nbytes, structures), dtype=torch.uint8)
        self._codec.encode(values, out)
        return out.numpy().tobytes()


def _is_json(value: Any) -> bool:
    """Whether ``value`` comes back from JSON as it is."""
    kind = type(value)
    if kind is dict:
        return all(type(key) is str and _is_json(item) for key, item in value.items())
    return all(map(_is_json, value)) if kind is list else kind in SCALAR_TYPES


def _to_json(told: dict[str, Any]) -> bytes:
    return json.dumps(told, separators=(",", ":")).encode()


def _told_error(told: dict[str, Any]) -> RemoteRankError:
    if "origin" not in told:
        return remote_error(told["error"].encode())
    text, rank, error_type, message, sample = told["origin"]
    return RemoteRankError(text, rank=rank, error_type=error_type, error_message=message, sample=sample)
