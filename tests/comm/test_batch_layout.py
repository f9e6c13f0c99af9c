"""Both sides must cut a batch alike, and no tensor may be lost, doubled or laid over another."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from evenstep.comm.batch_layout import DIRECT_BYTES, PACK_BYTES, Layout, Pack
from evenstep.comm.batch_structure import TensorKind

KIB = 1 << 10


def kinds(*devices: str) -> list[TensorKind]:
    return [TensorKind(torch.int64, 1, device) for device in devices]


def test_tensors_travel_by_device_small_ones_together_and_large_ones_alone() -> None:
    layout = Layout(kinds("npu", "cpu", "npu", "cpu", "npu"), [[3], [9], [1 << 20], [0], [5]])
    assert [group.device_type for group in layout.groups] == ["cpu", "npu"]
    assert layout.host.packs == [Pack([(1, 0, 72)], 128)]
    assert layout.groups[1].packs == [Pack([(0, 0, 24), (4, 64, 40)], 128)]
    assert layout.groups[1].direct == [(2, 1 << 23)]


@given(st.lists(st.tuples(st.sampled_from(["cpu", "npu"]), st.integers(0, 2 * DIRECT_BYTES)), max_size=30))
def test_every_tensor_has_a_place_of_its_own(tensors: list[tuple[str, int]]) -> None:
    found = [TensorKind(torch.uint8, 1, device) for device, _ in tensors]
    layout = Layout(found, [[nbytes] for _, nbytes in tensors])
    placed: list[int] = []
    for group in layout.groups:
        for pack in group.packs:
            end = 0
            for leaf, offset, nbytes in pack.leaves:
                assert tensors[leaf] == (group.device_type, nbytes)
                assert offset >= end
                assert offset % 64 == 0
                end = offset + nbytes
            assert end <= pack.nbytes < end + 64
            placed += [leaf for leaf, _, _ in pack.leaves]
        assert all(tensors[leaf] == (group.device_type, nbytes) for leaf, nbytes in group.direct)
        placed += [leaf for leaf, _ in group.direct]
    assert sorted(placed) == [leaf for leaf, (_, nbytes) in enumerate(tensors) if nbytes]


@given(st.lists(st.integers(1, DIRECT_BYTES - 1), min_size=1, max_size=60))
def test_packs_of_the_host_are_of_like_size_and_of_a_device_one(sizes: list[int]) -> None:
    shapes = [[nbytes] for nbytes in sizes]
    host = Layout([TensorKind(torch.uint8, 1, "cpu")] * len(sizes), shapes).host.packs
    whole = sum(pack.nbytes for pack in host)
    assert len(host) <= max(1, round(whole / PACK_BYTES))
    assert max(pack.nbytes for pack in host) < 1.5 * PACK_BYTES + DIRECT_BYTES
    assert len(Layout([TensorKind(torch.uint8, 1, "npu")] * len(sizes), shapes).groups[1].packs) == 1


def test_twelve_tensors_just_too_small_to_travel_alone_make_six_packs_of_two() -> None:
    layout = Layout(kinds(*["cpu"] * 12), [[DIRECT_BYTES // 8 - 1]] * 12)
    packs = [[leaf for leaf, _, _ in pack.leaves] for pack in layout.host.packs]
    assert packs == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
    assert layout.host.direct == []


def test_twelve_tensors_share_two_buffers_at_16_mib_and_travel_alone_from_48_mib_on() -> None:
    layout = Layout(kinds(*["cpu"] * 12), [[16384 * KIB // 12 // 8]] * 12)
    assert [len(pack.leaves) for pack in layout.host.packs] == [6, 6]
    assert layout.host.direct == []
    layout = Layout(kinds(*["cpu"] * 12), [[49152 * KIB // 12 // 8]] * 12)
    assert layout.host.packs == []
    assert [leaf for leaf, _ in layout.host.direct] == list(range(12))
