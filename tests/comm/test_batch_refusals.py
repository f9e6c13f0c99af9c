"""Whatever is wrong with a batch is found before any rank is told anything, and said by field."""

from __future__ import annotations

import re
from collections import UserDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from evenstep.comm.batch_spec import BatchSpec, TensorSpec
from evenstep.comm.batch_structure import tensor_kinds
from evenstep.comm.broadcast import BatchBroadcast
from evenstep.comm.simulated import SimulatedGroup
from evenstep.samples import BatchInfo

SPEC = {
    "input_ids": TensorSpec(torch.int64, (1, None)),
    "labels": TensorSpec(torch.int32, (1, None)),
    "cu_seqlens": TensorSpec(torch.int32, (None,)),
    "max_seqlen": int,
    "info": BatchInfo,
}


def text_batch(tokens: int = 64, documents: int = 3) -> dict[str, Any]:
    return {
        "input_ids": torch.arange(tokens).view(1, -1),
        "labels": torch.arange(tokens, dtype=torch.int32).view(1, -1),
        "cu_seqlens": torch.arange(documents + 1, dtype=torch.int32),
        "max_seqlen": 7,
        "info": BatchInfo(0, 0, 1, True, 3, 10, 2, None, None),
    }


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
        "the state at this batch cannot be told to model-parallel peers: state['rng']: unsupported type set; a state is "
        "made of dicts, lists, tuples, numbers, strings, bytes, arrays and tensors"
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
    assert str(refused({**text_batch(), **change}, BatchSpec(SPEC))) == message


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


def test_ranks_compare_specifications_by_what_they_say() -> None:
    fields = {"a": TensorSpec(torch.int64, (1, None)), "b": int}
    assert repr(BatchSpec(fields)) == repr(BatchSpec(dict(fields)))
    others = [
        {**fields, "b": TensorSpec(torch.int32)},
        {**fields, "a": TensorSpec(torch.int64, (1, 4))},
        {"a": fields["a"]},
    ]
    told = {repr(BatchSpec(other)) for other in [fields, *others]} | {
        repr(BatchSpec(fields, cpu_fields=("a",)))
    }
    assert len(told) == 5
    assert repr(BatchSpec(fields)).startswith("BatchSpec(a: int64[1, None]; 0x")


def test_only_a_mapping_without_info_gets_one() -> None:
    without, named = BatchSpec({"a": int}), BatchSpec({"a": int, "info": BatchInfo})
    assert repr(without.with_info()) == repr(named) != repr(without)
    assert named.with_info() is named
    flat = BatchSpec([TensorSpec(torch.int64)])
    assert flat.with_info() is flat
