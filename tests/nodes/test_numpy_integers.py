"""Numbers that a user has computed with NumPy are numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torchdata.nodes as tn

from evenstep import DataPlane, LoaderConfig, build_loader
from evenstep.datasets import SplitDocuments, TokenArray
from evenstep.nodes import DevicePrefetch, HostPrefetch, StepBuilder
from evenstep.packing import collate_varlen, pack_text
from evenstep.testing import assert_same


def test_nodes_take_them() -> None:
    two: Any = np.int64(2)
    for node in (
        HostPrefetch(tn.IterableWrapper([1, 2, 3]), two),
        DevicePrefetch(tn.IterableWrapper([1, 2, 3]), "cpu", two),
    ):
        assert list(tn.Loader(node)) == [1, 2, 3]
        node.close()


def test_builders_and_packers_take_them() -> None:
    documents = [{"input_ids": torch.arange(n)} for n in (3, 4, 5, 2, 6, 1)]

    def batches(number: Any) -> list[Any]:
        builder = StepBuilder(documents, number(8), number(2), look_ahead=number(4))
        with build_loader(builder, DataPlane.single(), LoaderConfig(seq_len=number(8))) as loader:
            return list(loader)

    assert_same(batches(np.int32), batches(int))
    eight: Any = np.int64(8)
    row = pack_text(documents[:1], eight)
    assert collate_varlen([row], pad_to_multiple_of=eight)["input_ids"].shape == (1, 8)
    pieces = SplitDocuments(TokenArray(np.arange(20), offsets=[0, 20]), eight)
    assert [len(pieces[i]["input_ids"]) for i in range(len(pieces))] == [8, 8, 4]
