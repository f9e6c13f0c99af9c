"""Nothing that arrives is trusted: bad frames give `WireFormatError`, and nothing is read or run beyond them."""

from __future__ import annotations

import json
import re
import struct
import sys
import tracemalloc
import types
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.overrides import TorchFunctionMode

from evenstep.comm.codec import PayloadCodec
from evenstep.comm.codec.frame import MAGIC
from evenstep.comm.codec.layout import ENTRY, PREAMBLE, align, entry_bytes
from evenstep.errors import WireFormatError

codec = PayloadCodec()


class Pair(NamedTuple):
    a: int
    b: str


@dataclass
class Record:
    a: int


class Plain:
    a = 1


SAMPLES: list[Any] = [
    {
        "ids": torch.arange(n),
        "image": torch.ones(2, n),
        "rows": torch.ones(n, 4),
        "text": "é" * n,
        "more": [n, None, 2.5, True, b"x", 1 << 70],
    }
    for n in range(3)
] + [Pair(1, "b"), [np.arange(3), np.float32(2), [{"k": Record(3)}] * 2, {}]]


def encode(samples: Sequence[Any]) -> Tensor:
    measures = np.array([codec.measure(sample) for sample in samples])
    out = torch.empty(codec.segment_bytes(measures[:, 0], measures[:, 1]), dtype=torch.uint8)
    codec.encode(samples, out)
    return out


def seal(frame: bytearray) -> Tensor:
    """The frame with the checksum that it should have had: what a hostile or broken sender would send."""
    ints_at, ints = struct.unpack_from("<QQ", frame, 32)
    end = ints_at + 8 * ints
    if end <= len(frame):
        frame[48:52] = bytes(4)
        frame[48:52] = struct.pack("<I", zlib.crc32(frame[:end]))
    return torch.frombuffer(frame, dtype=torch.uint8).clone()


def craft(spec: Any, ints: Sequence[int], raw: bytes, count: int = 1) -> Tensor:
    """A well-formed frame of one structure, with any integers and field bytes in it."""
    text = json.dumps(spec).encode()
    index = bytes(align(4 * count))
    ints_at = PREAMBLE.size + len(index) + entry_bytes(len(text))
    entry = (ENTRY.pack(count, len(text)) + text).ljust(entry_bytes(len(text)), b"\0")
    body = index + entry + np.array(ints, np.int64).tobytes()
    body = body.ljust(align(len(body)), b"\0") + raw
    preamble = PREAMBLE.pack(MAGIC, PREAMBLE.size + len(body), count, 1, ints_at, len(ints), 0)
    return seal(bytearray(preamble + body))


class Allocations(TorchFunctionMode):
    """Counts the bytes of tensors that do not share ``memory``."""

    def __init__(self, memory: Tensor) -> None:
        super().__init__()
        self._known = {memory.untyped_storage().data_ptr()}
        self.nbytes = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (list, tuple)) else [out]:
            if isinstance(tensor, Tensor):
                memory = tensor.untyped_storage()
                if memory.data_ptr() not in self._known:
                    self._known.add(memory.data_ptr())
                    self.nbytes += memory.nbytes()
        return out


# A value that takes one byte of a frame becomes an object of up to 200 bytes; with it, what a call takes anyway.
BYTES_PER_BYTE, BYTES_ANYWAY = 256, 200_000


def decode_or_refuse(frame: Tensor, count: int) -> list[Any] | None:
    """Decode; None if refused. Any other error, any view outside the frame, and more memory than it, fail the test."""
    guarded = torch.full((len(frame) + 128,), 0x5A, dtype=torch.uint8)
    counted = Allocations(guarded)
    was_tracing = tracemalloc.is_tracing()
    tracemalloc.start()
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    try:
        with counted:
            return _decode_or_refuse(guarded, frame, count)
    finally:
        peak = tracemalloc.get_traced_memory()[1] - before
        if not was_tracing:
            tracemalloc.stop()
        assert counted.nbytes <= 2 * len(frame) + 4096, "tensors beyond the frame"
        assert peak < BYTES_PER_BYTE * len(frame) + BYTES_ANYWAY, "objects beyond the frame"


def _decode_or_refuse(guarded: Tensor, frame: Tensor, count: int) -> list[Any] | None:
    inside = guarded[64 : 64 + len(frame)]
    inside.copy_(frame)
    message = ""
    samples: list[Any] = []
    try:
        samples = codec.decode(inside, count)
    except WireFormatError as error:
        message = str(error)
    if message:
        assert len(message) < 1000  # a message, not a dump of the frame
        return None
    assert len(samples) == count
    assert repr(samples)
    pending: list[Any] = list(samples)
    while pending:
        value = pending.pop()
        if isinstance(value, Tensor) and value.numel():
            assert inside.data_ptr() <= value.data_ptr()
            assert value.data_ptr() + value.nbytes <= inside.data_ptr() + len(inside)
        elif isinstance(value, dict):
            pending.extend(value.values())
        elif isinstance(value, (list, tuple)):
            pending.extend(value)
    return samples


@given(st.binary(max_size=600), st.integers(0, 5))
def test_random_bytes_are_refused(data: bytes, count: int) -> None:
    frame = torch.tensor(list(data), dtype=torch.uint8)
    if not (count == 0 and not data):
        assert decode_or_refuse(frame, count) is None
    if count:
        assert decode_or_refuse(seal(bytearray(MAGIC + data.ljust(64, b"\0"))), count) is None


def test_every_changed_byte_of_the_control_part_is_refused() -> None:
    frame = encode(SAMPLES)
    ints_at, ints = struct.unpack_from("<QQ", bytes(frame.tolist()), 32)
    for at in range(ints_at + 8 * ints):
        changed = frame.clone()
        changed[at] ^= 1 << at % 8
        assert decode_or_refuse(changed, len(SAMPLES)) is None, at


@given(st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), min_size=1, max_size=6))
def test_changed_frames_with_a_right_checksum_never_crash(changes: list[tuple[int, int]]) -> None:
    frame = bytearray(encode(SAMPLES).tolist())
    for at, value in changes:
        frame[at % len(frame)] = value
    decode_or_refuse(seal(frame), len(SAMPLES))


@given(
    st.integers(0, 100),
    st.sampled_from([0, 1, -1, 255, 1 << 31, (1 << 62) + 1, (1 << 63) - 1, -(1 << 63)]),
)
def test_changed_integers_with_a_right_checksum_never_crash(at: int, value: int) -> None:
    frame = bytearray(encode(SAMPLES).tolist())
    ints_at, ints = struct.unpack_from("<QQ", frame, 32)
    struct.pack_into("<q", frame, ints_at + 8 * (at % ints), value)
    decode_or_refuse(seal(frame), len(SAMPLES))


@given(st.integers(0, 2000), st.integers(0, 5))
def test_truncated_frames_and_other_counts_are_refused(size: int, count: int) -> None:
    frame = encode(SAMPLES)
    cut = frame[: size % len(frame)]
    if len(cut) or count:
        assert decode_or_refuse(cut, count) is None
    if count != len(SAMPLES):
        assert decode_or_refuse(frame, count) is None
    assert decode_or_refuse(torch.cat([frame, frame[:64]]), len(SAMPLES)) is None


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 70) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=6,
)
specs = st.recursive(
    st.one_of(
        st.sampled_from(
            [
                "n",
                "[",
                "(",
                "{",
                "i",
                "f",
                "b",
                "s",
                "ns",
                "y",
                "ny",
                "ya",
                "I",
                "li",
                "lf",
                "lb",
                "ti",
                "tf",
                "tb",
                "x",
            ]
        ).map(lambda tag: [tag]),
        st.tuples(st.just("T"), st.sampled_from(["int64", "bool", "uint16", "float9"]), st.integers(-1, 66)),
        st.tuples(
            st.just("N"),
            st.sampled_from(["<i8", "|S3", "<U2", "|O", "<i9", "a3", "i4,i4"]),
            st.integers(0, 3),
        ),
        st.tuples(st.just("G"), st.sampled_from(["<f4", "|b1", "|V8", "<M8[ns]", "<M8[x]"])),
        json_values,
    ),
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(["l", "t"]), st.lists(inner, max_size=3)),
        st.tuples(st.sampled_from(["lr", "tr"]), inner),
        st.tuples(st.just("d"), st.lists(json_values, max_size=2), st.lists(inner, max_size=2)),
        st.tuples(
            st.just("r"),
            st.just(__name__),
            st.sampled_from(["Pair", "Record"]),
            st.just(["a", "b"]),
            st.lists(inner),
        ),
    ),
    max_leaves=5,
)


@given(
    specs,
    st.lists(st.integers(-1, 9) | st.sampled_from([1 << 40, (1 << 63) - 1]), max_size=9),
    st.binary(max_size=64),
    st.integers(1, 3),
)
def test_made_up_structures_never_crash(spec: Any, ints: list[int], raw: bytes, count: int) -> None:
    decode_or_refuse(craft(spec, ints, raw, count), count)


BIG = 1 << 50
HOSTILE: dict[str, Tensor] = {
    "list of nothing": craft(["lr", ["n"]], [BIG], b""),
    "list of empty dicts": craft(["lr", ["{"]], [BIG], b""),
    "list of lists": craft(["lr", ["lr", ["i"]]], [8, BIG], b""),
    "list of scalars": craft(["lr", ["T", "uint8", 0]], [BIG], b""),
    "long tensor": craft(["T", "int64", 1], [BIG], b""),
    "wide tensor": craft(["T", "int64", 2], [1 << 31, 1 << 31], b""),
    "wrapping shape": craft(["T", "int64", 4], [1 << 32, 1 << 32, 1 << 32, 1 << 32], b""),
    "many dimensions": craft(["T", "int64", 64], [(1 << 63) - 1] * 64, b""),
    "long array": craft(["N", "<i8", 1], [BIG], b""),
    "wide array": craft(["N", "|S999999999", 1], [BIG], b""),
    "wide scalar": craft(["G", "|S999999999"], [], b""),
    "long text": craft(["s"], [BIG], b""),
    "negative text": craft(["s"], [-8], b""),
    "long integers": craft(["li"], [7], b"1234567"),
    "negative shape": craft(["T", "int64", 2], [-1, -1], b"12345678"),
    "half a letter": craft(["s"], [1], b"\xc3"),
    "half a bool": craft(["b"], [2], b""),
    "half a bool in a list": craft(["lb"], [1], b"\2"),
    "unused integers": craft(["i"], [1, 2], b""),
    "unused bytes": craft(["i"], [1], b"x"),
    "deep structure": craft(json.loads("[" * 900 + "]" * 900), [], b""),
    "deep lists": craft(json.loads('["lr",' * 70 + '["i"]' + "]" * 70), [1] * 71, b""),
    "doubled key": craft(["d", ["a", "a"], [["i"], ["i"]]], [1, 2], b""),
    "not JSON": seal(bytearray(craft("x" * 40, [], b"").tolist()).replace(b"x", b"\xff")),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_frames_are_refused_without_allocating(name: str) -> None:
    frame = HOSTILE[name]
    tracemalloc.start()
    try:
        assert decode_or_refuse(frame, 1) is None
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            ["r", "antigravity", "Pair", ["a"], [["i"]]],
            "a sample holds antigravity.Pair, which this rank has not imported; import it on every rank before the "
            "loader is built",
        ),
        (
            ["r", "os", "system", ["a"], [["i"]]],
            "a sample holds os.system, which this rank has not imported; import it on every rank before the "
            "loader is built",
        ),
        (
            ["r", __name__, "Plain", ["a"], [["i"]]],
            f"a sample names {__name__}.Plain, which is no named tuple or dataclass here",
        ),
        (
            ["r", __name__, "Pair", ["a"], [["i"]]],
            f"a sample holds {__name__}.Pair with fields ['a']; on this rank it has ['a', 'b']; run the same code on "
            "every rank",
        ),
    ],
    ids=["not imported", "a function", "another class", "other fields"],
)
def test_classes_that_are_not_here_are_refused_by_name(spec: Any, message: str) -> None:
    with pytest.raises(WireFormatError, match=f"^{re.escape(message)}$"):
        codec.decode(craft(spec, [1], b""), 1)
    assert "antigravity" not in sys.modules


def test_looking_a_class_up_runs_no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    module = types.ModuleType("lazy_module")
    module.__getattr__ = calls.append  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "lazy_module", module)
    with pytest.raises(WireFormatError, match=r"lazy_module\.Anything"):
        codec.decode(craft(["r", "lazy_module", "Anything", ["a"], [["i"]]], [1], b""), 1)
    assert calls == []


def test_messages_name_what_is_wrong() -> None:
    frame = encode([1, 2])
    for bad, count, message in [
        (frame[:10], 2, "segment of 10 bytes is shorter than its preamble (64)"),
        (
            frame,
            3,
            f"segment says 2 samples in {len(frame)} bytes; the plan says 3 samples in {len(frame)} bytes",
        ),
        (torch.zeros(64, dtype=torch.uint8), 1, f"segment starts with {bytes(8)!r} instead of b'evnstep1'"),
        (HOSTILE["unused integers"], 1, "1 integers of the segment belong to no field"),
        (HOSTILE["half a bool"], 1, "a bool is neither 0 nor 1"),
    ]:
        with pytest.raises(WireFormatError, match=f"^{re.escape(message)}$"):
            codec.decode(bad, count)


@pytest.mark.parametrize(
    ("nbytes", "structures"), [([-1], [65]), ([8], [0]), ([1 << 62], [65]), ([8], [-65])]
)
def test_corrupt_columns_are_refused(nbytes: list[int], structures: list[int]) -> None:
    with pytest.raises(WireFormatError, match="cannot be: the gathered columns are corrupt"):
        codec.segment_bytes(nbytes, structures)
