"""One batch from a constructor to its model-parallel peers: a message, then its tensors.

The message holds the source's state, the scalars and the sizes; the structure only where it changed, or never where a
`BatchSpec` declares it. What is neither tensor nor scalar goes through the payload codec: nothing is pickled.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch

from evenstep.comm.batch_form import Form, FormReader, FormWriter
from evenstep.comm.batch_layout import LARGEST_PACK
from evenstep.comm.batch_message import BATCH, CONSTRUCTOR, END, ERROR, Heard, MessageChannel
from evenstep.comm.batch_spec import BatchSpec
from evenstep.comm.batch_structure import SCALAR_TYPES, Leaves, rebuild
from evenstep.comm.batch_tensors import TensorBroadcast
from evenstep.comm.buffers import BufferPool, Pool
from evenstep.comm.codec import PayloadCodec
from evenstep.comm.communicator import Communicator
from evenstep.comm.remote_errors import describe_error, remote_error
from evenstep.errors import ConfigMismatch, RemoteRankError, SampleError, WireFormatError

__all__ = ["BatchBroadcast", "Message", "Prepared"]

_POOL_BYTES = 1 << 28
_ENCODER = json.JSONEncoder(separators=(",", ":"))


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
    form: Form


@dataclass(slots=True)
class _Read:
    """A message that was read; a batch's tensors may still be on their way."""

    message: Message
    form: Form | None = None
    leaves: Leaves = field(default_factory=Leaves)
    tensors: dict[int, torch.Tensor] = field(default_factory=dict)


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
        self._rank = communicator.ranks[communicator.position]
        self._sender = communicator.ranks[CONSTRUCTOR]
        self._aside = aside
        memory = getattr(communicator, "memory", None)
        sends = communicator.position == CONSTRUCTOR
        pool: Pool = memory if sends and memory is not None else BufferPool(_POOL_BYTES)
        self._channel = MessageChannel(communicator, pool, LARGEST_PACK)
        self._tensors = TensorBroadcast(communicator, pool)
        self._codec = PayloadCodec()
        self._writer = FormWriter(spec)
        self._reader = FormReader(spec, self._sender)

    def restart(self) -> None:
        """The next message is the first of another stream (an epoch, a loaded state)."""
        self._channel.restart()

    def prepare(self, batch: Any, state: dict[str, Any]) -> Prepared:
        """Look at a batch without sending anything, so that whatever is wrong with it can still be told.

        Raises:
            TypeError: The batch or the state holds what cannot be sent.
            ValueError: The batch is not what the specification says.
        """
        told: dict[str, Any] = {}
        form, leaves = self._writer.write(batch, told)
        extra = self._encode(leaves, state)
        told["scalars"], told["others"] = leaves.scalars, len(leaves.others)
        if _is_json(state):
            told["state"] = state
        return Prepared(_to_json(told), extra, leaves.tensors, form)

    def send(self, prepared: Prepared) -> None:
        """Broadcast a batch."""
        form, tensors = prepared.form, prepared.tensors
        tail: tuple[int, Callable[[torch.Tensor], Iterator[int]] | None] = (0, None)
        if form.layout.host.packs:
            first = form.layout.host.packs[0]
            tail = (first.nbytes, partial(first.filling, tensors))
        message = self._channel.compose(BATCH, prepared.document, prepared.extra, *tail)
        self._post(chain(message, self._tensors.host_buffers(form, tensors)))
        self._writer.last = form
        self._tensors.send_from_device(form, tensors)

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

    def _post(self, buffers: Iterator[torch.Tensor | None]) -> None:
        with self._aside():
            self._communicator.broadcast_all(buffers, CONSTRUCTOR)

    def receive(self) -> Message:
        """Wait for the constructor's next message.

        Raises:
            RemoteRankError: The constructor is in another stream, or is gone.
            ConfigMismatch: It has another specification.
            WireFormatError: It sent something else.
        """
        read: list[_Read | Exception] = []
        self._post(self._incoming(read))
        (found,) = read
        if isinstance(found, Exception):
            raise found
        if found.form is not None and found.message.batch is None:
            found.tensors.update(self._tensors.receive_on_device(found.form))
            self._build(found)
        return found.message

    def _incoming(self, read: list[_Read | Exception]) -> Iterator[torch.Tensor | None]:
        """What the next message is to be received into, while it is being read."""
        last = self._reader.last
        views: dict[int, torch.Tensor] = {}

        def guess(tail: torch.Tensor) -> None:
            if last is not None:
                views.update(self._tensors.in_message(last, tail))

        heard = yield from self._channel.listen(guess)
        try:
            found = self._read(heard)
            form = found.form
            if form is not None:
                found.tensors = views
                if form is not last or not heard.guessed:
                    found.tensors = self._tensors.in_message(form, heard.tail)
                yield from self._tensors.receive_on_host(form, found.tensors)
                if len(form.layout.groups) == 1:
                    self._build(found)
            read.append(found)
        except (ConfigMismatch, WireFormatError) as error:  # raised once what is on its way has arrived
            read.append(error)
        except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
            refused = WireFormatError(f"a message of rank {self._sender} cannot be read: {error!r}")
            refused.__cause__ = error
            read.append(refused)

    def _read(self, heard: Heard) -> _Read:
        told: dict[str, Any] = dict(json.loads(heard.document))
        if heard.kind == ERROR:
            return _Read(Message(error=_told_error(told)))
        beside = "state" not in told
        others: list[Any] = []
        if heard.extra:
            buffer = torch.from_numpy(np.frombuffer(heard.extra, np.uint8).copy())
            others = self._codec.decode(buffer, told.get("others", 0) + beside)
        state = others.pop() if beside else told["state"]
        if heard.kind == END:
            return _Read(Message(state=state, is_end=True))
        leaves = Leaves()
        leaves.scalars, leaves.others = told["scalars"], others
        return _Read(Message(state=state), self._reader.read(told, heard.tail.numel()), leaves)

    def _build(self, found: _Read) -> None:
        form, leaves, tensors = found.form, found.leaves, found.tensors
        assert form is not None
        leaves.tensors = [
            tensors[leaf]
            if leaf in tensors
            else torch.empty(shape, dtype=kind.dtype, device=self._tensors.device_of(kind.device_type))
            for leaf, (kind, shape) in enumerate(zip(form.kinds, form.shapes, strict=True))
        ]
        found.message.batch = rebuild(form.node, leaves)

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
    return _ENCODER.encode(told).encode()


def _told_error(told: dict[str, Any]) -> RemoteRankError:
    if "origin" not in told:
        return remote_error(told["error"].encode())
    text, rank, error_type, message, sample = told["origin"]
    return RemoteRankError(text, rank=rank, error_type=error_type, error_message=message, sample=sample)
