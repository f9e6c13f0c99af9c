from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict, UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.comm.batch_spec import BatchSpec, TensorSpec
from evenstep.comm.batch_structure import TensorKind, tensor_kinds
from evenstep.comm.batch_tensors import Layout
from evenstep.comm.broadcast import BatchBroadcast, Message
from evenstep.comm.simulated import SimulatedCommunicator, SimulatedGroup
from evenstep.errors import ConfigMismatch, RemoteRankError, WireFormatError
from evenstep.samples import BatchInfo
from evenstep.tree import flatten

STATE = {"consumed_samples": 5, "order": "é"}


class Vision(NamedTuple):
    pixels: Any
    grid: Any


@dataclass(frozen=True, slots=True)
class Extra:
    name: str
    mask: Any


class Counted:
    """Counts what goes over a communicator."""

    def __init__(self, inner: SimulatedCommunicator) -> None:
        self.inner = inner
        self.ranks, self.position = inner.ranks, inner.position
        self.device, self.launcher = inner.device, inner.launcher
        self.sizes: list[int] = []

    def all_gather(self, _: torch.Tensor) -> torch.Tensor:
        raise AssertionError("no gather is needed")

    def broadcast(self, buffer: torch.Tensor, source: int) -> None:
        assert buffer.dtype is torch.uint8
        assert buffer.dim() == 1
        assert buffer.is_contiguous()
        self.sizes.append(buffer.numel())
        self.inner.broadcast(buffer, source)

    def all_to_all(self, *_: Any) -> None:
        raise AssertionError("no exchange is needed")

    def abandon(self) -> None:
        self.inner.abandon()


def talk(
    say: Callable[[BatchBroadcast], None],
    count: int,
    *,
    spec: BatchSpec | None = None,
    peer_spec: BatchSpec | None = None,
    ranks: tuple[int, ...] = (4, 6, 7),
) -> tuple[list[Message | Exception], list[int]]:
    """What the last peer hears when the constructor says ``count`` messages, and the sizes of all broadcasts."""
    group = SimulatedGroup(ranks, timeout=20)
    heard: dict[int, list[Message | Exception]] = {rank: [] for rank in ranks}

    def peer(rank: int) -> None:
        wire = BatchBroadcast(group.communicator(rank), spec if peer_spec is None else peer_spec)
        for _ in range(count):
            try:
                heard[rank].append(wire.receive())
            except Exception as error:
                heard[rank].append(error)
                group.kill(rank)
                return

    threads = [threading.Thread(target=peer, args=(rank,), daemon=True) for rank in ranks[1:]]
    for thread in threads:
        thread.start()
    counted = Counted(group.communicator(ranks[0]))
    try:
        say(BatchBroadcast(counted, spec))
    except RemoteRankError:
        if peer_spec is None:
            raise
    finally:
        for thread in threads:
            thread.join(20)
    assert [len(heard[rank]) for rank in ranks[1:]] == [count] * (len(ranks) - 1)
    return heard[ranks[-1]], counted.sizes


def send_all(*batches: Any) -> Callable[[BatchBroadcast], None]:
    def say(wire: BatchBroadcast) -> None:
        for number, batch in enumerate(batches):
            wire.send(wire.prepare(batch, {**STATE, "step": number}))

    return say


def received(*batches: Any, spec: BatchSpec | None = None) -> list[Any]:
    heard, _ = talk(send_all(*batches), len(batches), spec=spec)
    got = []
    for number, message in enumerate(heard):
        assert isinstance(message, Message), message
        assert message.state == {**STATE, "step": number}
        got.append(message.batch)
    return got


def raw(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


def assert_same(a: Any, b: Any) -> None:
    left, right = flatten(a), flatten(b)
    assert [path for path, _ in left] == [path for path, _ in right]
    for (path, x), (_, y) in zip(left, right, strict=True):
        assert type(x) is type(y), path
        if isinstance(x, torch.Tensor):
            assert (x.dtype, x.shape) == (y.dtype, y.shape), path
            assert torch.equal(raw(x), raw(y)), path
        elif isinstance(x, (np.ndarray, np.generic)):
            assert x.dtype == y.dtype
            assert np.array_equal(x, y), path
        else:
            assert repr(x) == repr(y), path  # nan equals nan


DTYPES = [
    dtype
    for name in [
        "bool",
        "uint8",
        "int8",
        "uint16",
        "int16",
        "uint32",
        "int32",
        "uint64",
        "int64",
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "complex64",
        "complex128",
        "float8_e4m3fn",
        "float8_e5m2",
    ]
    if isinstance(dtype := getattr(torch, name, None), torch.dtype)
]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    seed = draw(st.integers(0, 2**31))
    numel = int(np.prod([2 * n for n in shape], initial=1))
    raw = np.random.default_rng(seed).integers(
        0, 2 if dtype is torch.bool else 256, numel * dtype.itemsize, np.uint8
    )
    flat = torch.from_numpy(raw).view(dtype) if numel else torch.empty(0, dtype=dtype)
    tensor = flat.view([2 * n for n in shape])
    if draw(st.booleans()):  # strided
        return tensor[tuple(slice(None, None, 2) for _ in shape)]
    if draw(st.booleans()) and dtype.is_complex:
        return tensor.conj()
    return tensor.transpose(0, -1) if shape else tensor


SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.binary(max_size=4)
)
LEAVES = tensors() | SCALARS | st.sampled_from([np.arange(3), np.float32(1.5), np.zeros((0, 2), "<i2")])
KEYS = st.text(max_size=3) | st.integers(-3, 3) | st.none()


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keyed = st.dictionaries(KEYS, inner, max_size=4)
    return (
        keyed
        | keyed.map(OrderedDict)
        | st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.builds(Vision, inner, inner)
        | st.builds(Extra, st.text(max_size=3), inner)
    )


BATCHES = st.recursive(LEAVES, containers, max_leaves=10)


@settings(deadline=None)
@given(st.lists(BATCHES, min_size=1, max_size=3))
def test_every_batch_arrives_as_it_was_sent(batches: list[Any]) -> None:
    for sent, got in zip(batches, received(*batches), strict=True):
        assert_same(sent, got)


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


def test_batch_info_and_tensors_arrive_with_their_types() -> None:
    (got,) = received(text_batch(3))
    assert_same(text_batch(3), got)
    assert type(got["info"]) is BatchInfo


def test_the_structure_is_told_once_however_sizes_and_values_change() -> None:
    batches = [text_batch(step, 32 + step, step + 1) for step in range(4)]
    _, alike = talk(send_all(*batches), 4)
    documents: list[bytes] = []

    def spy(wire: BatchBroadcast) -> None:
        for number, batch in enumerate([*batches, {"other": 1}, {"other": 2}]):
            prepared = wire.prepare(batch, {"step": number})
            documents.append(prepared.document)
            wire.send(prepared)

    talk(spy, 6)
    assert [b'"structure"' in document for document in documents] == [True, False, False, False, True, False]
    assert alike == [2048] * 4


def test_a_declared_structure_is_never_told() -> None:
    spec = BatchSpec(SPEC)
    documents: list[bytes] = []

    def say(wire: BatchBroadcast) -> None:
        for step in range(3):
            prepared = wire.prepare(text_batch(step, 8 + step), {})
            documents.append(prepared.document)
            wire.send(prepared)

    heard, sizes = talk(say, 3, spec=spec)
    assert sizes == [2048] * 3
    assert not any(b"structure" in d or b"int64" in d or b"input_ids" in d for d in documents)
    for step, message in enumerate(heard):
        assert isinstance(message, Message)
        assert_same(text_batch(step, 8 + step), message.batch)


def test_received_tensors_are_writable_and_survive_the_next_batches() -> None:
    batches = [text_batch(step) for step in range(6)]
    got = received(*batches)
    for sent, batch in zip(batches, got, strict=True):
        assert_same(sent, batch)
        batch["input_ids"] += 1


def test_large_tensors_travel_alone_and_small_ones_together() -> None:
    batch = {
        "large": torch.arange(1 << 18),
        "strided": torch.arange(1 << 19).view(-1, 2)[:, 0],
        **{str(i): torch.full((100,), i) for i in range(12)},
    }
    heard, sizes = talk(send_all(batch, batch, batch), 3)
    for message in heard:
        assert isinstance(message, Message)
        assert_same(batch, message.batch)
    first = [2048, 12 * 832, 1 << 21, 1 << 21]
    assert sizes == [*first, 12288, 1 << 21, 1 << 21, 10240, 1 << 21, 1 << 21]


def test_a_message_that_does_not_fit_makes_room_for_the_next_for_a_while() -> None:
    texts = [{"text": "x" * 5000}, {"text": "y" * 5000}, {"text": "z"}, {"text": "z"}]
    heard, sizes = talk(send_all(*texts), 4)
    assert [m.batch for m in heard if isinstance(m, Message)] == texts
    assert (sizes[0], sizes[2:]) == (2048, [6144, 6144, 4096])
    _, sizes = talk(send_all(*texts, *[{}] * 30), 34)
    assert sizes[-1] == 2048


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 9000), st.integers(0, 9000)), max_size=6))
def test_messages_of_any_sizes_follow_each_other(lengths: list[tuple[int, int]]) -> None:
    batches = [{"s": "x" * text, "t": torch.arange(size)} for text, size in lengths]
    for sent, got in zip(batches, received(*batches), strict=True):
        assert_same(sent, got)


def test_an_end_brings_its_state() -> None:
    heard, _ = talk(lambda wire: wire.send_end({"step": 9}), 1)
    assert heard == [Message(state={"step": 9}, is_end=True)]


def test_an_error_arrives_with_its_type_and_words() -> None:
    heard, _ = talk(lambda wire: wire.send_error(OSError("disk gone")), 1)
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


def test_a_remote_error_is_passed_on_as_it_came() -> None:
    first = RemoteRankError("rank 2 failed", rank=2, error_type="OSError", error_message="disk", sample=17)
    heard, _ = talk(lambda wire: wire.send_error(first), 1)
    assert isinstance(heard[0], Message)
    error = heard[0].error
    assert error is not None
    assert str(error) == "rank 2 failed"
    assert (error.rank, error.error_type, error.error_message, error.sample) == (2, "OSError", "disk", 17)


def refused(batch: Any, spec: BatchSpec | None = None, state: Any = None) -> Exception:
    group = SimulatedGroup((0, 1))
    wire = BatchBroadcast(group.communicator(0), spec)
    with pytest.raises((TypeError, ValueError)) as caught:
        wire.prepare(batch, {} if state is None else state)
    assert group.collectives == 0
    return caught.value


@dataclass
class Opaque:
    value: Any


class Nobody:
    pass


def test_what_cannot_be_told_is_refused_by_name_before_anything_is_sent() -> None:
    assert str(refused({"a": [UserDict(x=1)]})) == (
        "batch['a'][0] is a collections.UserDict: model-parallel peers cannot rebuild it. Return a dict, OrderedDict, "
        "list, tuple, NamedTuple or dataclass from collate, for example dict(batch)."
    )
    assert str(refused({(1, 2): 1})) == (
        "batch has the key (1, 2) (tuple): peers can be told only str, int, float, bool and None keys; rename it in "
        "collate"
    )
    sparse = torch.eye(2).to_sparse()
    assert str(refused({"a": sparse})) == (
        "batch['a'] is a Tensor of torch.float32, torch.sparse_coo on cpu: its bytes cannot be told to model-parallel "
        "peers; make it a dense torch.Tensor in collate"
    )
    assert str(refused({"a": Nobody()})).startswith("batch['a'] cannot be told to model-parallel peers: ")

    @dataclass
    class Local:
        x: int

    assert "which other ranks cannot find by that name" in str(refused(Local(1)))
    assert str(refused({}, state={"rng": {1, 2}})) == (
        "the state at this batch cannot be told to model-parallel peers (Object of type set is not JSON serializable); a "
        "state is made of dicts, lists, numbers and strings: {'rng': {1, 2}}"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"labels": torch.zeros(1, 4)},
            "batch['labels'] is a 2-d float32 tensor on cpu, the batch specification says a 2-d int32 tensor on cpu: peers "
            "would read other bytes; make collate and batch_spec agree",
        ),
        (
            {"labels": torch.zeros(2, 4, dtype=torch.int32)},
            "batch field 'labels' has shape (2, 4), the batch specification says (1, None): peers would read other bytes; "
            "declare the dimension that changes as None",
        ),
        (
            {"more": 1},
            "batch is a mapping with keys ['input_ids', 'labels', 'cu_seqlens', 'max_seqlen', 'info', 'more'], the batch "
            "specification says a mapping with keys ['input_ids', 'labels', 'cu_seqlens', 'max_seqlen', 'info']: peers "
            "would read other bytes; make collate and batch_spec agree",
        ),
        (
            {"max_seqlen": [1]},
            "batch['max_seqlen'] is a list of scalars, the batch specification says a scalar: peers would read other "
            "bytes; make collate and batch_spec agree",
        ),
    ],
)
def test_a_batch_unlike_its_specification_is_refused_by_field(change: dict[str, Any], message: str) -> None:
    assert str(refused({**text_batch(0), **change}, BatchSpec(SPEC))) == message


def test_ranks_with_different_specifications_are_told_so() -> None:
    other = BatchSpec({**SPEC, "input_ids": TensorSpec(torch.int64, (2, None))})
    heard, _ = talk(send_all(text_batch(0)), 1, spec=BatchSpec(SPEC), peer_spec=other, ranks=(0, 1))
    assert isinstance(heard[0], ConfigMismatch)
    assert str(heard[0]) == (
        "rank 0 sends batches by another batch specification than this rank's: its bytes would be misread; give every "
        "rank of a data-parallel replica the same batch_spec"
    )


def test_a_peer_in_another_stream_is_told_so() -> None:
    def say(wire: BatchBroadcast) -> None:
        wire.restart()
        wire.send_end({})

    heard, _ = talk(say, 1, ranks=(0, 1))
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


def test_a_message_that_makes_no_sense_is_refused() -> None:
    def say(**changes: Any) -> Callable[[BatchBroadcast], None]:
        def post(wire: BatchBroadcast) -> None:
            prepared = wire.prepare({"x": torch.arange(3)}, {})
            told = {**json.loads(prepared.document), **changes}
            prepared.document = json.dumps({k: v for k, v in told.items() if v is not None}).encode()
            wire.send(prepared)

        return post

    def heard(**changes: Any) -> str:
        (error,), _ = talk(say(**changes), 1, ranks=(0, 1))
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
    assert heard(scalars=[1]) == "a batch has more leaves than its structure"
    assert heard(scalars=None) == "a message of rank 0 cannot be read: KeyError('scalars')"


def test_a_specification_puts_its_cpu_fields_on_the_host_and_the_rest_on_one_device() -> None:
    fields = {
        "x": TensorSpec(torch.int64, (2,)),
        "deep": {"a": TensorSpec(torch.int8), "b": TensorSpec(torch.int8)},
    }
    spec = BatchSpec(fields, cpu_fields=("deep.b",))
    assert [kind.device_type for kind in tensor_kinds(spec.structure("npu"))] == ["npu", "npu", "cpu"]
    spec = BatchSpec(fields, cpu_fields=("deep",))
    assert [kind.device_type for kind in tensor_kinds(spec.structure("npu"))] == ["npu", "cpu", "cpu"]
    assert spec.shapes(spec.dims_to_tell([torch.empty(2), torch.empty(5), torch.empty(0)])) == [[2], [5], [0]]


def test_tensors_travel_by_device_small_ones_together_and_large_ones_alone() -> None:
    kinds = [TensorKind(torch.int64, 1, device) for device in ("npu", "cpu", "npu", "cpu", "npu")]
    layout = Layout(kinds, [[3], [9], [1 << 18], [0], [5]])
    assert [group.device_type for group in layout.groups] == ["cpu", "npu"]
    assert layout.host.packed == [(1, 0, 72)]
    assert layout.host.nbytes == 128
    assert layout.groups[1].packed == [(0, 0, 24), (4, 64, 40)]
    assert layout.groups[1].direct == [(2, 1 << 21)]


def test_specification_errors() -> None:
    with pytest.raises(
        ValueError, match=re.escape("cpu_fields names ['cu'], which the batch specification does not")
    ):
        BatchSpec(SPEC, cpu_fields=("cu",))
    with pytest.raises(TypeError, match=re.escape("the batch specification has 3 at 'a.0'")):
        BatchSpec({"a": [3]})
    with pytest.raises(ValueError, match=re.escape("shape is (-1,): each dimension is an int >= 0, or None")):
        TensorSpec(torch.int64, (-1,))
    with pytest.raises(TypeError, match=re.escape("dtype is 'int64': its bytes cannot be sent")):
        TensorSpec("int64")  # type: ignore[arg-type]
