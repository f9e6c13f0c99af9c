"""What a constructor tells its peers with each batch, and in how many broadcasts."""

from __future__ import annotations

import json
import re
import struct
import threading
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.comm.batch_spec import BatchSpec, TensorSpec
from evenstep.comm.broadcast import BatchBroadcast, Message
from evenstep.comm.communicator import SoloCommunicator
from evenstep.comm.simulated import SimulatedGroup
from evenstep.errors import ConfigMismatch, RemoteRankError, WireFormatError
from evenstep.samples import BatchInfo
from evenstep.testing import assert_same


def info(step: int, loss: int | None = None) -> BatchInfo:
    return BatchInfo(step, 0, 1, True, 3, 10, 2, loss, None)


def text_batch(step: int, tokens: int = 64, documents: int = 3) -> dict[str, Any]:
    return {
        "input_ids": torch.arange(tokens).view(1, -1) + step,
        "labels": torch.arange(tokens, dtype=torch.int32).view(1, -1),
        "cu_seqlens": torch.arange(documents + 1, dtype=torch.int32),
        "max_seqlen": 7 + step,
        "info": info(step),
    }


SPEC = {
    "input_ids": TensorSpec(torch.int64, (1, None)),
    "labels": TensorSpec(torch.int32, (1, None)),
    "cu_seqlens": TensorSpec(torch.int32, (None,)),
    "max_seqlen": int,
    "info": BatchInfo,
}


def test_batch_info_and_tensors_arrive_with_their_types(conversation: Any) -> None:
    (got,) = conversation.received(text_batch(3))
    assert_same(text_batch(3), got)
    assert type(got["info"]) is BatchInfo


def test_the_structure_is_told_once_however_sizes_and_values_change(conversation: Any) -> None:
    batches = [text_batch(step, 32 + step, step + 1) for step in range(4)]
    _, alike = conversation.talk(conversation.send_all(*batches), 4)
    documents: list[bytes] = []

    def spy(wire: BatchBroadcast) -> None:
        for number, batch in enumerate([*batches, {"other": 1}, {"other": 2}]):
            prepared = wire.prepare(batch, {"step": number})
            documents.append(prepared.document)
            wire.send(prepared)

    conversation.talk(spy, 6)
    assert [b'"structure"' in document for document in documents] == [True, False, False, False, True, False]
    assert alike == [2048] * 4


def test_a_declared_structure_is_never_told(conversation: Any) -> None:
    spec = BatchSpec(SPEC)
    documents: list[bytes] = []

    def say(wire: BatchBroadcast) -> None:
        for step in range(3):
            prepared = wire.prepare(text_batch(step, 8 + step), {})
            documents.append(prepared.document)
            wire.send(prepared)

    heard, sizes = conversation.talk(say, 3, spec=spec)
    assert sizes == [2048] * 3
    assert not any(b"structure" in d or b"int64" in d or b"input_ids" in d for d in documents)
    for step, message in enumerate(heard):
        assert isinstance(message, Message)
        assert_same(text_batch(step, 8 + step), message.batch)


def test_received_tensors_are_writable_and_survive_the_next_batches(conversation: Any) -> None:
    batches = [text_batch(step) for step in range(6)]
    got = conversation.received(*batches)
    for sent, batch in zip(batches, got, strict=True):
        assert_same(sent, batch)
        batch["input_ids"] += 1


def test_large_tensors_travel_alone_and_small_ones_together(conversation: Any) -> None:
    batch = {
        "large": torch.arange(1 << 20),
        "strided": torch.arange(1 << 21).view(-1, 2)[:, 0],
        **{str(i): torch.full((100,), i) for i in range(12)},
    }
    heard, sizes = conversation.talk(conversation.send_all(batch, batch, batch), 3)
    for message in heard:
        assert isinstance(message, Message)
        assert_same(batch, message.batch)
    message = 768 + 12 * 832
    large = [1 << 23, 1 << 23]
    assert sizes == [2048, message - 2048, *large, 12288, *large, 12288, *large]


def test_a_large_message_travels_in_two_pieces_once_its_size_is_known(conversation: Any) -> None:
    batches = [{str(i): torch.arange(1 << 17) + 12 * n + i for i in range(3)} for n in range(5)]
    heard, sizes = conversation.talk(conversation.send_all(*batches), 5)
    for sent, message in zip(batches, heard, strict=True):
        assert isinstance(message, Message)
        assert_same(sent, message.batch)
    message = 512 + (3 << 20)
    assert sizes == [2048, message - 2048, *[1 << 20, (2 << 20) + (1 << 14)] * 4]


@settings(deadline=None, max_examples=20)
@given(st.lists(st.sampled_from([10, 5000, 70000, 400000]), min_size=1, max_size=8))
def test_sizes_that_go_up_and_down_cost_few_bytes(conversation: Any, lengths: list[int]) -> None:
    batches = [{"t": torch.arange(length)} for length in lengths]
    heard, sizes = conversation.talk(conversation.send_all(*batches), len(batches))
    for sent, message in zip(batches, heard, strict=True):
        assert isinstance(message, Message)
        assert_same(sent, message.batch)
    said = sum(8 * length + 1024 for length in lengths)
    # More than 512 KiB for nothing come only with a message smaller than the three before.
    falls = sum(lengths[i] < min(lengths[max(0, i - 3) : i]) for i in range(1, len(lengths)))
    assert sum(sizes) <= said + (len(lengths) << 19) + falls * max(8 * max(lengths), 1 << 19)


def test_what_is_under_way_when_a_broadcast_is_given_up_is_written_no_more() -> None:
    class Interrupted(SoloCommunicator):
        under_way: torch.Tensor | None = None

        def broadcast_all(self, buffers: Iterable[torch.Tensor | None], source: int) -> None:
            super().broadcast_all((), source)
            for buffer in buffers:
                if self.under_way is None:
                    self.under_way = buffer
                    raise KeyboardInterrupt

    communicator = Interrupted()
    wire = BatchBroadcast(communicator)
    with pytest.raises(KeyboardInterrupt):
        wire.send(wire.prepare({"x": torch.arange(9)}, {}))
    assert communicator.under_way is not None
    before = communicator.under_way.clone()
    wire.send(wire.prepare({"x": -torch.arange(9)}, {"step": 1}))
    assert torch.equal(communicator.under_way, before)


def test_sizes_are_told_where_they_changed(conversation: Any) -> None:
    def told(spec: BatchSpec | None) -> list[bool]:
        documents = []

        def spy(wire: BatchBroadcast) -> None:
            for number, tokens in enumerate([8, 8, 9, 9, 8]):
                prepared = wire.prepare(text_batch(number, tokens), {})
                documents.append(prepared.document)
                wire.send(prepared)

        heard, _ = conversation.talk(spy, 5, spec=spec)
        for number, (message, tokens) in enumerate(zip(heard, [8, 8, 9, 9, 8], strict=True)):
            assert isinstance(message, Message)
            assert_same(text_batch(number, tokens), message.batch)
        return [b'"shapes"' in document for document in documents]

    assert told(None) == [True, False, True, False, True]
    assert told(BatchSpec(SPEC)) == [False] * 5


def test_a_message_that_does_not_fit_makes_room_for_the_next_for_a_while(conversation: Any) -> None:
    texts = [{"text": "x" * 5000}, {"text": "y" * 5000}, {"text": "z"}, {"text": "z"}]
    heard, sizes = conversation.talk(conversation.send_all(*texts), 4)
    assert [m.batch for m in heard if isinstance(m, Message)] == texts
    assert (sizes[0], sizes[2:]) == (2048, [6144, 6144, 4096])
    _, sizes = conversation.talk(conversation.send_all(*texts, *[{}] * 30), 34)
    assert sizes[-1] == 2048


@settings(deadline=None, max_examples=40)
@given(lengths=st.lists(st.tuples(st.integers(0, 9000), st.integers(0, 9000)), max_size=6))
def test_messages_of_any_sizes_follow_each_other(conversation: Any, lengths: list[tuple[int, int]]) -> None:
    batches = [{"s": "x" * text, "t": torch.arange(size)} for text, size in lengths]
    for sent, got in zip(batches, conversation.received(*batches), strict=True):
        assert_same(sent, got)


def test_an_end_brings_its_state(conversation: Any) -> None:
    heard, _ = conversation.talk(lambda wire: wire.send_end({"step": 9}), 1)
    assert heard == [Message(state={"step": 9}, is_end=True)]


def test_a_state_arrives_as_it_is_whatever_it_is_made_of(conversation: Any) -> None:
    states: list[dict[str, Any]] = [
        {"step": 1, "source": {"0": [1, 2.5, None, "x", {"done": False}]}},
        {"indices": {0: 1, 2: (3, "x")}},
        {"tensor": torch.arange(3), "bytes": b"\xff", "integer": np.int64(3), "array": np.arange(2)},
        {"nested": [{"tuple": ()}], "large": 2**80},
    ]
    batch = {**text_batch(1), "opaque": b"other"}

    def tell(wire: BatchBroadcast) -> None:
        for state in states:
            wire.send(wire.prepare(batch, state))
        for state in states:
            wire.send_end(state)

    heard, _ = conversation.talk(tell, 2 * len(states))
    for message, state in zip(heard, [*states, *states], strict=True):
        assert isinstance(message, Message)
        assert_same(state, message.state)
        if not message.is_end:
            assert_same(batch, message.batch)


def test_an_error_arrives_with_its_type_and_words(conversation: Any) -> None:
    heard, _ = conversation.talk(lambda wire: wire.send_error(OSError("disk gone")), 1)
    assert isinstance(heard[0], Message)
    error = heard[0].error
    assert error is not None
    assert str(error) == (
        "rank 4 failed: OSError: disk gone (every rank stops here; the traceback is on rank 4)"
    )
    assert (error.rank, error.error_type, error.error_message, error.sample) == (
        4,
        "OSError",
        "disk gone",
        None,
    )


def test_a_remote_error_is_passed_on_as_it_came(conversation: Any) -> None:
    first = RemoteRankError("rank 2 failed", rank=2, error_type="OSError", error_message="disk", sample=17)
    heard, _ = conversation.talk(lambda wire: wire.send_error(first), 1)
    assert isinstance(heard[0], Message)
    error = heard[0].error
    assert error is not None
    assert str(error) == "rank 2 failed"
    assert (error.rank, error.error_type, error.error_message, error.sample) == (2, "OSError", "disk", 17)


def test_ranks_with_different_specifications_are_told_so(conversation: Any) -> None:
    other = BatchSpec({**SPEC, "input_ids": TensorSpec(torch.int64, (2, None))})
    heard, _ = conversation.talk(
        conversation.send_all(text_batch(0)), 1, spec=BatchSpec(SPEC), peer_spec=other, ranks=(0, 1)
    )
    assert isinstance(heard[0], ConfigMismatch)
    assert str(heard[0]) == (
        "rank 0 sends batches by another batch specification than this rank's: its bytes would be misread; give every "
        "rank of a data-parallel replica the same batch_spec"
    )


def test_a_peer_in_another_stream_is_told_so(conversation: Any) -> None:
    def say(wire: BatchBroadcast) -> None:
        wire.restart()
        wire.send_end({})

    heard, _ = conversation.talk(say, 1, ranks=(0, 1))
    assert isinstance(heard[0], RemoteRankError)
    assert str(heard[0]) == (
        "rank 0 is in stream 1 of its loader and this rank in stream 0: one of them began an epoch or loaded a state that "
        "the other did not, so they would train on different batches. Call iter(), load_state_dict() and set_epoch() on "
        "every rank."
    )


def test_foreign_traffic_in_the_group_is_noticed() -> None:
    group = SimulatedGroup((0, 1), timeout=20)
    thread = threading.Thread(
        target=lambda: group.communicator(0).broadcast(torch.zeros(2048, dtype=torch.uint8), 0), daemon=True
    )
    thread.start()
    with pytest.raises(WireFormatError, match=re.escape("rank 0 sent no header of message 0")):
        BatchBroadcast(group.communicator(1)).receive()
    thread.join(20)


def test_a_header_that_promises_too_much_is_refused() -> None:
    group = SimulatedGroup((0, 1), timeout=20)
    header = struct.pack("<4sB3xIIIQQ", b"evmb", 1, 0, 2, 0, 0, 1 << 40)
    message = torch.zeros(2048, dtype=torch.uint8)
    message[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    thread = threading.Thread(target=lambda: group.communicator(0).broadcast(message, 0), daemon=True)
    thread.start()
    with pytest.raises(WireFormatError, match=re.escape("rank 0 sent no header of message 0")):
        BatchBroadcast(group.communicator(1)).receive()
    thread.join(20)


def test_a_message_that_makes_no_sense_is_refused(conversation: Any) -> None:
    def say(**changes: Any) -> Callable[[BatchBroadcast], None]:
        def post(wire: BatchBroadcast) -> None:
            prepared = wire.prepare({"x": torch.arange(3)}, {})
            told = {**json.loads(prepared.document), **changes}
            prepared.document = json.dumps({k: v for k, v in told.items() if v is not None}).encode()
            wire.send(prepared)

        return post

    def heard(**changes: Any) -> str:
        (error,), _ = conversation.talk(say(**changes), 1, ranks=(0, 1))
        assert isinstance(error, WireFormatError)
        return str(error)

    assert heard(shapes=[[-3]]) == "sizes [[-3]] do not fit the structure of the batch"
    assert heard(shapes=[[3, 1]]) == "sizes [[3, 1]] do not fit the structure of the batch"
    assert heard(shapes=[[40]]) == "rank 0 sent 64 bytes of small tensors, its own table of sizes says 320"
    assert heard(structure=["T", "object", 1, "cpu"]) == (
        "a tensor of dtype 'object' and 1 dimensions is unknown here"
    )
    assert heard(structure=["c", "pathlib", "Path", ["x"], [["S"]]]).startswith(
        "a sample names pathlib.Path, which is no "
    )
    assert heard(structure=["?"]) == "a batch has a node of kind '?', which is unknown here"
    never = (
        "rank 0 sent a batch of a structure that this rank was never told; give every rank of a data-parallel replica the "
        "same batch_spec"
    )
    assert heard(digest=1) == never
    assert heard(structure=None, shapes=None) == never
    assert heard(structure=None) == never
    assert heard(shapes=None) == "a message of rank 0 cannot be read: KeyError('shapes')"
    assert heard(scalars=[1]) == "a batch has more leaves than its structure"
    assert heard(scalars=None) == "a message of rank 0 cannot be read: KeyError('scalars')"
