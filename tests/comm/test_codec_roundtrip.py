"""Law 9: what is decoded equals what was encoded, in type, dtype, shape and bytes."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from evenstep.comm.codec import Codec, PayloadCodec, segment_bytes
from evenstep.comm.codec.leaves import TENSOR_DTYPES

codec = PayloadCodec()


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass(frozen=True)
class Frozen:
    x: Any
    y: Any = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if isinstance(self.x, str) and self.x == "never":
            raise AssertionError("constructors of received classes must not run")


@dataclass(slots=True)
class Slotted:
    x: Any


@dataclass
class NoFields: ...


def columns(samples: Sequence[Any], by: Codec = codec) -> tuple[list[int], list[int]]:
    measures = [by.measure(sample) for sample in samples]
    return [nbytes for nbytes, _ in measures], [structure for _, structure in measures]


def encode(samples: Sequence[Any], by: Codec = codec, fill: int = 0xA5) -> Tensor:
    out = torch.full((by.segment_bytes(*columns(samples, by)),), fill, dtype=torch.uint8)
    by.encode(samples, out)
    return out


def same(sent: Any, got: Any) -> bool:
    """Equal as law 9 means it; written without the codec's own comparisons."""
    if isinstance(sent, Tensor):
        plain = torch.zeros(sent.numel() * sent.dtype.itemsize, dtype=torch.uint8).view(sent.dtype)
        plain.view(sent.shape).copy_(sent.detach())
        return (
            type(got) is Tensor
            and not got.requires_grad
            and got.dtype == sent.dtype
            and got.shape == sent.shape
            and got.is_contiguous()
            and (not plain.numel() or got.reshape(-1).view(torch.uint8).equal(plain.view(torch.uint8)))
        )
    if isinstance(sent, np.ndarray):
        return (
            type(got) is np.ndarray
            and got.dtype == sent.dtype
            and got.dtype.str == sent.dtype.str
            and got.shape == sent.shape
            and got.tobytes() == sent.tobytes()
        )
    if type(sent) is not type(got):
        return False
    if isinstance(sent, np.generic) and not isinstance(sent, (str, bytes)):
        return bool(sent.dtype == got.dtype and sent.tobytes() == got.tobytes())
    if isinstance(sent, float):
        return struct.pack("<d", sent) == struct.pack("<d", got)
    if isinstance(sent, dict):
        return len(sent) == len(got) and all(
            same(a, b) and same(x, y) for (a, x), (b, y) in zip(sent.items(), got.items(), strict=True)
        )
    if isinstance(sent, (list, tuple)):
        return len(sent) == len(got) and all(same(a, b) for a, b in zip(sent, got, strict=True))
    if isinstance(sent, (Frozen, Slotted)):
        return all(same(getattr(sent, n), getattr(got, n)) for n in type(sent).__dataclass_fields__)
    return isinstance(sent, NoFields) or bool(sent == got)


def random_tensor(dtype: torch.dtype, shape: list[int], seed: int) -> Tensor:
    numel = int(np.prod(shape))
    data = np.random.default_rng(seed).integers(0, 2 if dtype is torch.bool else 256, numel * dtype.itemsize)
    return torch.tensor(data.tolist(), dtype=torch.uint8).view(dtype).reshape(shape)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(list(TENSOR_DTYPES)))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    tensor = random_tensor(dtype, shape, draw(st.integers(0, 99)))
    form = draw(st.sampled_from(["plain", "strided", "transposed", "expanded", "grad", "conj", "neg"]))
    if form == "strided" and shape:
        return random_tensor(dtype, [*shape[:-1], 2 * shape[-1]], 0)[..., ::2]
    if form == "transposed":
        return tensor.permute(tuple(reversed(range(tensor.dim()))))
    if form == "expanded":
        return tensor[None].expand(2, *shape)
    if form == "grad" and (dtype.is_floating_point or dtype.is_complex) and dtype.itemsize > 1:
        return tensor.requires_grad_()
    if form == "conj" and dtype in (torch.complex64, torch.complex128):
        return tensor.conj()
    if form == "neg" and dtype in (torch.complex64, torch.complex128):
        return tensor.conj().imag
    return tensor


ARRAY_DTYPES = [
    "|b1",
    "|u1",
    "|i1",
    "<u2",
    ">i2",
    "<i4",
    ">u4",
    "<i8",
    ">i8",
    "<f2",
    "<f4",
    ">f8",
    "<c8",
    ">c16",
    "<M8[ns]",
    ">M8[D]",
    "<m8[s]",
    "|S3",
    "<U2",
    ">U1",
]
SCALARS = [
    np.int8(-3),
    np.uint64(2**64 - 1),
    np.float16("nan"),
    np.float32(-0.0),
    np.float64(1.5),
    np.longdouble(1) / 3,
    np.complex64(1 - 2j),
    np.bool_(True),
    np.datetime64("2024-02-29"),
    np.datetime64("NaT", "s"),
    np.timedelta64(5, "ms"),
    np.str_("a\ud800é"),
    np.bytes_(b"a\0b"),
]


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    dtype = np.dtype(draw(st.sampled_from(ARRAY_DTYPES)))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    numbers = np.arange(int(np.prod(shape))) % (2 if dtype.kind == "b" else 100)
    array = numbers.astype(dtype).reshape(shape)
    form = draw(st.sampled_from(["plain", "fortran", "strided"]))
    if form == "fortran":
        return np.asfortranarray(array)
    return np.repeat(array, 2, axis=0)[::2] if form == "strided" and shape else array


def leaves() -> st.SearchStrategy[Any]:
    return st.one_of(
        tensors(),
        arrays(),
        st.sampled_from(SCALARS),
        st.none(),
        st.booleans(),
        st.integers(),
        st.integers(-(1 << 63), (1 << 63) - 1),
        st.sampled_from([1 << 63, -(1 << 63) - 1, 1 << 2000, -1]),
        st.floats(),
        st.text(st.characters(), max_size=5),
        st.binary(max_size=5),
        st.binary(max_size=5).map(bytearray),
        st.lists(st.integers(-5, 1 << 64), max_size=5),
        st.lists(st.floats(), max_size=5),
        st.lists(st.booleans(), max_size=3).map(tuple),
    )


KEYS = st.one_of(
    st.text(max_size=3), st.integers(), st.booleans(), st.none(), st.floats(), st.binary(max_size=2)
)


def nodes(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.dictionaries(KEYS, children, max_size=3),
        st.lists(children, max_size=3),
        st.lists(children, max_size=3).map(tuple),
        st.builds(Point, children, children),
        st.builds(lambda x, y: Frozen(x, y=y), children, children),
        st.builds(Slotted, children),
        st.builds(NoFields),
        st.builds(lambda value, n: [value] * n, children, st.integers(1, 3)),
    )


anything = st.recursive(leaves(), nodes, max_leaves=8)


@given(st.lists(anything, max_size=5), st.integers(1, 3))
def test_what_is_decoded_equals_what_was_encoded(samples: list[Any], times: int) -> None:
    samples = samples * times  # like and unlike structures beside each other
    segment = encode(samples)
    got = codec.decode(segment, len(samples))
    assert len(got) == len(samples)
    for sent, received in zip(samples, got, strict=True):
        assert same(sent, received), (sent, received)


@given(st.lists(anything, min_size=1, max_size=3))
def test_a_segment_holds_nothing_of_what_was_in_its_memory_before(samples: list[Any]) -> None:
    assert torch.equal(encode(samples, fill=0), encode(samples, fill=0xFF))


@given(st.lists(anything, min_size=1, max_size=3))
def test_two_codecs_agree_without_having_talked(samples: list[Any]) -> None:
    other = PayloadCodec()
    assert columns(samples) == columns(samples, other)
    got = other.decode(encode(samples), len(samples))
    assert all(same(sent, received) for sent, received in zip(samples, got, strict=True))


@pytest.mark.parametrize("dtype", TENSOR_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [[], [0], [5], [2, 0], [2, 3]], ids=str)
def test_every_tensor_dtype(dtype: torch.dtype, shape: list[int]) -> None:
    samples = [{"a": random_tensor(dtype, shape, seed)} for seed in range(3)]
    for sent, got in zip(samples, codec.decode(encode(samples), 3), strict=True):
        assert same(sent, got)


SAME_TAILS = {
    "rows": [torch.randn(n, 3) for n in (2, 0, 5)],
    "transposed": [torch.randn(3, n).T for n in (2, 0, 5)],
    "expanded": [torch.randn(3).expand(n, 3) for n in (2, 1, 5)],
    "channels last": [torch.randn(3, 4, 5), torch.randn(3, 5, 4).permute(0, 2, 1)],
    "conjugated": [torch.randn(n, 3, dtype=torch.complex64).conj() for n in (2, 4)],
    "negated": [torch.randn(n, 3, dtype=torch.complex64).conj().imag for n in (2, 4)],
    "with gradients": [torch.randn(n, 3, requires_grad=True) for n in (2, 4)],
    "nothing in them": [torch.randn(n, 0, 3) for n in (2, 4)],
    "of a rare dtype": [torch.ones(n, 3).to(torch.uint16) for n in (2, 4)],
    "one like no other": [torch.randn(2, 3), torch.randn(3, 2)],
}


@pytest.mark.parametrize("name", SAME_TAILS)
def test_tensors_that_differ_in_their_first_dimension_at_most(name: str) -> None:
    sent = SAME_TAILS[name]
    for tensor, got in zip(sent, codec.decode(encode(sent), len(sent)), strict=True):
        assert same(tensor, got)
        assert got.is_contiguous()
        assert not got.requires_grad


def test_keys_keep_their_type_and_order() -> None:
    key = float("nan")
    sample = {"b": 1, "a": 2, 1: 3, None: 4, 2.5: 5, b"k": 6, -0.0: 7, 1 << 80: 8, key: 9}
    (got,) = codec.decode(encode([sample]), 1)
    assert [(type(k), repr(k), v) for k, v in got.items()] == [
        (type(k), repr(k), v) for k, v in sample.items()
    ]


def test_keys_that_are_equal_but_of_other_types_are_other_structures() -> None:
    samples: list[Any] = [{1: "a"}, {True: "a"}, {1.0: "a"}, {0.0: "a"}, {-0.0: "a"}]
    assert len(set(columns(samples)[1])) == len(samples)
    got = codec.decode(encode(samples), len(samples))
    assert list(map(repr, got)) == list(map(repr, samples))


def test_classes_arrive_without_running_their_constructors() -> None:
    sample = object.__new__(Frozen)
    object.__setattr__(sample, "x", "never")
    object.__setattr__(sample, "y", Point(torch.ones(2), [1]))
    (got,) = codec.decode(encode([sample]), 1)
    assert same(sample, got)


def test_what_has_no_storage_of_its_own_arrives_plain(tmp_path: Any) -> None:
    mapped = np.memmap(tmp_path / "tokens", np.int32, "w+", shape=(8,))
    mapped[:] = np.arange(8)
    parameter = torch.nn.Parameter(torch.ones(3))
    weights, tokens = codec.decode(encode([parameter, mapped[2:5]]), 2)
    assert type(weights) is Tensor
    assert not weights.requires_grad
    assert weights.tolist() == [1.0, 1.0, 1.0]
    assert type(tokens) is np.ndarray
    assert tokens.tolist() == [2, 3, 4]


def test_decoded_values_are_writable_views_of_the_buffer() -> None:
    samples = [{"t": torch.arange(n), "a": np.arange(n), "m": torch.ones(2, n)} for n in range(1, 4)]
    segment = encode(samples)
    first, last = segment.data_ptr(), segment.data_ptr() + len(segment)
    for sample in codec.decode(segment, 3):
        for value in (sample["t"], torch.from_numpy(sample["a"]), sample["m"]):
            assert first <= value.data_ptr() < last
            value += 1
    again = codec.decode(segment, 3)
    assert [s["t"].tolist() for s in again] == [[1], [1, 2], [1, 2, 3]]
    assert [s["a"].tolist() for s in again] == [[1], [1, 2], [1, 2, 3]]


def test_changing_one_decoded_tensor_with_gradients_leaves_the_others_alone() -> None:
    a, b = codec.decode(encode([torch.ones(2, 2), torch.ones(2, 2)]), 2)
    a.mul_(torch.full((2, 2), 3.0, requires_grad=True))
    assert a.requires_grad
    assert not b.requires_grad
    assert b.tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_a_segment_inside_a_larger_buffer_decodes_in_place() -> None:
    samples = [torch.arange(5, dtype=torch.int64), torch.arange(3, dtype=torch.int64)]
    size = segment_bytes(*columns(samples))
    buffer = torch.zeros(size + 128, dtype=torch.uint8)
    for offset in (64, 7):  # where the exchange puts it, and where nobody should
        codec.encode(samples, buffer[offset : offset + size])
        got = codec.decode(buffer[offset : offset + size], 2)
        assert [t.tolist() for t in got] == [[0, 1, 2, 3, 4], [0, 1, 2]]


def test_thousands_of_alike_samples_cost_bytes_not_dictionaries() -> None:
    samples = [{"input_ids": torch.arange(n % 7), "labels": torch.arange(n % 5)} for n in range(3000)]
    payload = sum(t.numel() * 8 for sample in samples for t in sample.values())
    # Two lengths and a structure number a sample; the structure, preamble and alignment once.
    assert segment_bytes(*columns(samples)) <= payload + 3000 * (8 + 8 + 4) + 1024


def test_lists_of_other_lengths_share_one_structure() -> None:
    samples = [{"images": [torch.ones(2, n)] * n, "turns": [{"role": "user"}] * n} for n in range(1, 9)]
    assert len(set(columns(samples)[1])) == 1


def test_no_samples_need_no_segment() -> None:
    assert segment_bytes([], []) == 0
    empty = torch.empty(0, dtype=torch.uint8)
    codec.encode([], empty)
    assert codec.decode(empty, 0) == []


def test_a_structure_of_thousands_of_fields() -> None:
    sample = [torch.ones(1) if n % 2 else n for n in range(4000)]  # more fields than a byte counts
    (got,) = codec.decode(encode([sample]), 1)
    assert same(sample, got)


def test_payload_codec_is_a_codec() -> None:
    assert isinstance(codec, Codec)


def test_large_and_small_runs_of_bytes() -> None:
    samples = [
        {"jpeg": bytes([n]) * (5000 + n), "name": "n" * n, "raw": bytearray(b"r" * 3000)} for n in range(4)
    ]
    for sent, got in zip(samples, codec.decode(encode(samples), 4), strict=True):
        assert same(sent, got)
