"""What the codec does not send, and how it says so: with the path, when the sample is read."""

from __future__ import annotations

import collections
import enum
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from evenstep.comm.codec import PayloadCodec

codec = PayloadCodec()
SUPPORTED = (
    "supported are tensors, NumPy arrays and scalars, bytes, bytearray, str, int, float, bool, None, and dict, "
    "list, tuple, NamedTuple and dataclass of these; convert it in the dataset or pass a codec such as PickleCodec"
)


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Unset:
    late: int = field(init=False)


@dataclass
class ListLike(list[int]):
    a: int = 0


class Colour(enum.IntEnum):
    RED = 1


def make_local() -> Any:
    @dataclass
    class Local:
        a: int

    return Local(1)


def cycle() -> Any:
    sample: list[Any] = []
    sample.append(sample)
    return {"a": sample}


CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "set": (lambda: {"meta": [{1}]}, f"sample['meta'][0]: unsupported type set; {SUPPORTED}"),
    "in a named tuple": (
        lambda: Pair(1, (2, object())),
        f"sample.right[1]: unsupported type object; {SUPPORTED}",
    ),
    "complex": (lambda: 1j, f"sample: unsupported type complex; {SUPPORTED}"),
    "subclass": (
        lambda: {"a": collections.OrderedDict()},
        f"sample['a']: unsupported type collections.OrderedDict; {SUPPORTED}",
    ),
    "enum": (lambda: [Colour.RED], f"sample[0]: unsupported type {__name__}.Colour; {SUPPORTED}"),
    "dataclass on a list": (lambda: ListLike(), f"sample: unsupported type {__name__}.ListLike; {SUPPORTED}"),
    "key": (
        lambda: {"a": {(1, 2): 3}},
        "sample['a']: unsupported key (1, 2) of type tuple; keys are str, int, float, bool, bytes or None",
    ),
    "sparse": (
        lambda: {"a": torch.eye(2).to_sparse_coo()},
        "sample['a']: a tensor of layout torch.sparse_coo cannot be sent; convert it to a strided one",
    ),
    "meta": (
        lambda: {"a": torch.empty(2, device="meta")},
        "sample['a']: a tensor on the meta device has no data to send",
    ),
    "structured": (
        lambda: {"a": np.zeros(1, "i4,i4")},
        "sample['a']: a NumPy value of dtype [('f0', '<i4'), ('f1', '<i4')] cannot be sent; use one array per field, "
        "or a plain dtype",
    ),
    "objects": (
        lambda: {"a": np.array([None])},
        "sample['a']: a NumPy value of dtype object cannot be sent; use one array per field, or a plain dtype",
    ),
    "local class": (
        make_local,
        f"sample: other ranks cannot find {__name__}.make_local.<locals>.Local by its name; define the class at "
        "the top level of a module, or use a dict",
    ),
    "field without a value": (
        Unset,
        "sample.late: the field has no value; set it before the sample is returned",
    ),
    "itself": (
        cycle,
        f"sample['a']{'[0]' * 64}: nested deeper than 64 levels, or it contains itself; flatten the sample",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_refusals_name_the_path(name: str) -> None:
    make, message = CASES[name]
    for sample in (make(), make()):  # also when the type was met before
        with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
            codec.measure(sample)


def test_nested_tensors_are_refused() -> None:
    nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
    with pytest.raises(TypeError, match=r"^sample: unsupported type .*NestedTensor; supported are"):
        codec.measure(nested)


def test_a_sample_that_grew_after_it_was_measured_is_refused_before_anything_is_written() -> None:
    sample = {"a": torch.ones(4)}
    nbytes, structure = codec.measure(sample)
    out = torch.full((codec.segment_bytes([nbytes], [structure]),), 7, dtype=torch.uint8)
    sample["a"] = torch.ones(400)
    with pytest.raises(
        ValueError, match=f"^the segment needs .* bytes but out has {len(out)}: a sample was changed"
    ):
        codec.encode([sample], out)
    assert (out == 7).all()


def test_out_must_be_a_segment() -> None:
    message = (
        "out is a torch.float32 tensor of shape (4,) on cpu; a segment needs contiguous 1-d torch.uint8 on the CPU; "
        "take it from a BufferPool"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        codec.encode([1], torch.zeros(4))


def test_unlike_structures_do_not_fill_memory() -> None:
    own = PayloadCodec()
    for n in range(4200):
        own.measure({f"key{n}": 1})
    assert len(own._structures) < 4200
