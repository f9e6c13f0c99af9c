"""Every batch arrives as it was sent: types, dtypes, shapes, bytes."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.comm.batch_form import collect
from evenstep.comm.batch_structure import Leaves, describe
from evenstep.testing import assert_same


class Vision(NamedTuple):
    pixels: Any
    grid: Any


@dataclass(frozen=True, slots=True)
class Extra:
    name: str
    mask: Any


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
@given(batches=st.lists(BATCHES, min_size=1, max_size=3))
def test_every_batch_arrives_as_it_was_sent(conversation: Any, batches: list[Any]) -> None:
    for sent, got in zip(batches, conversation.received(*batches), strict=True):
        assert_same(got, sent)


@given(first=BATCHES, second=BATCHES)
def test_a_batch_is_recognised_by_no_structure_but_its_own(first: Any, second: Any) -> None:
    node = describe(first, Leaves())
    for batch in (first, second):
        leaves, found = Leaves(), Leaves()
        own = describe(batch, leaves)
        if collect(node, batch, found):
            assert own == node
            assert_same(
                [leaves.tensors, leaves.scalars, leaves.others], [found.tensors, found.scalars, found.others]
            )


def test_the_usual_batch_is_recognised() -> None:
    batch = {
        "ids": torch.arange(3),
        "info": Extra("x", None),
        "sizes": [1, 2],
        "vision": Vision(torch.ones(2, 2, requires_grad=True), ("a",)),
        "more": OrderedDict(a=[torch.zeros(1), 3.5], b=({},)),
    }
    leaves = Leaves()
    assert collect(describe(batch, Leaves()), batch, leaves)
    assert not leaves.tensors[1].requires_grad
