"""What one process writes another reads in the same place, and memory that was freed is the system's again."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.comm import host_memory
from evenstep.comm.host_memory import HostMemory, PeerMemory

PAGE = os.sysconf("SC_PAGE_SIZE")
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux only")


def held_bytes(memory: HostMemory) -> int:
    return os.fstat(memory.descriptor).st_blocks * 512


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@settings(max_examples=30)
@given(sizes=st.lists(st.integers(1, 5 * PAGE), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_a_peer_sees_what_is_written_and_the_owner_what_the_peer_writes(sizes: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    own = HostMemory()
    peer = PeerMemory(os.getpid(), own.descriptor)
    extents = [own.allocate(size) for size in sizes]
    for extent in extents:
        assert not extent.any()
        extent[:] = rng.integers(0, 256, len(extent), dtype=np.uint8)
    for extent in extents:
        found = own.find(torch.from_numpy(extent))
        assert found is not None
        (start, size), at = found
        assert (start % PAGE, size % PAGE, at) == (0, 0, 0)
        view = peer.view((start, size))
        assert (view[: len(extent)] == extent).all()
        view[0] ^= 255
        assert extent[0] == view[0]


def test_a_part_of_an_extent_is_found_where_it_lies_and_nothing_else_is() -> None:
    own = HostMemory()
    first, second = own.allocate(3 * PAGE), own.allocate(10)
    assert own.find(torch.from_numpy(first[100:200])) == ((0, 3 * PAGE), 100)
    assert own.find(torch.from_numpy(second).view(torch.int16)) == ((3 * PAGE, PAGE), 0)
    assert own.find(torch.empty(8)) is None
    assert HostMemory().find(torch.from_numpy(first)) is None


def test_an_extent_is_freed_with_its_last_view_and_its_place_is_not_used_again() -> None:
    own = HostMemory()
    peer = PeerMemory(os.getpid(), own.descriptor)
    view = torch.from_numpy(own.allocate(4 * PAGE))[5:6]
    view.fill_(7)
    gc.collect()
    assert held_bytes(own) == 4 * PAGE
    assert peer.view((0, 4 * PAGE))[5] == 7
    del view
    gc.collect()
    assert held_bytes(own) == 0
    later = own.allocate(PAGE)
    later[:] = 9
    assert own.find(torch.from_numpy(later)) == ((4 * PAGE, PAGE), 0)
    assert not peer.view((0, 4 * PAGE)).any()


def test_an_extent_takes_no_descriptor_and_all_are_closed_in_the_end() -> None:
    before = open_descriptors()
    own = HostMemory()
    peer = PeerMemory(os.getpid(), own.descriptor)
    extents = [own.allocate(PAGE) for _ in range(50)]
    for k in range(50):
        peer.view((k * PAGE, PAGE))
    assert open_descriptors() == before + 2
    del own, peer
    extents[-1][:] = 1
    del extents
    gc.collect()
    assert open_descriptors() == before


def test_only_so_many_extents_of_a_peer_stay_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    mapped: list[int] = []
    monkeypatch.setattr(host_memory, "_map", _counting(mapped))
    own = HostMemory()
    peer = PeerMemory(os.getpid(), own.descriptor)
    extents = [own.allocate(PAGE) for _ in range(40)]
    mapped.clear()
    for _ in range(2):
        for k in range(32):
            peer.view((k * PAGE, PAGE))
    assert len(mapped) == 32
    peer.view((39 * PAGE, PAGE))  # the one used longest ago is forgotten
    peer.view((31 * PAGE, PAGE))
    assert len(mapped) == 33
    peer.view((0, PAGE))
    assert len(mapped) == 34
    assert len(extents) == 40


def _counting(mapped: list[int]) -> object:
    inner = host_memory._map

    def counted(descriptor: int, start: int, size: int) -> object:
        mapped.append(start)
        return inner(descriptor, start, size)

    return counted


@pytest.mark.parametrize("extent", [(0, 2 * PAGE), (PAGE, PAGE), (-PAGE, PAGE), (0, 0), (0, 1 << 60)])
def test_bytes_that_a_peer_has_not_are_refused(extent: tuple[int, int]) -> None:
    own = HostMemory()
    extents = own.allocate(PAGE)
    peer = PeerMemory(os.getpid(), own.descriptor)
    with pytest.raises(OSError, match="lie outside a peer's memory"):
        peer.view(extent)
    assert peer.first(len(extents)).shape == (PAGE,)


def test_a_process_that_is_not_there_cannot_be_opened() -> None:
    with pytest.raises(OSError, match="No such file"):
        PeerMemory(1 << 30, 3)


def test_other_systems_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(OSError, match="exist on Linux only"):
        HostMemory()


def test_memory_that_is_retired_keeps_what_peers_still_read() -> None:
    own = HostMemory()
    peer = PeerMemory(os.getpid(), own.descriptor)
    own.allocate(PAGE)[:] = 5
    gc.collect()
    assert not peer.view((0, PAGE)).any()
    last = own.allocate(PAGE)
    last[:] = 5
    own.retire()
    del last, own
    gc.collect()
    assert (peer.view((PAGE, PAGE)) == 5).all()


def test_memory_that_cannot_be_mapped_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise OSError(12, "no room for a mapping")

    own = HostMemory()
    monkeypatch.setattr(host_memory, "_map", refuse)
    with pytest.raises(OSError, match="no room"):
        own.allocate(PAGE)
    assert held_bytes(own) == 0


def test_the_collector_may_free_an_extent_while_another_is_looked_for() -> None:
    own = HostMemory()
    kept = torch.from_numpy(own.allocate(10))
    for _ in range(60):
        cycle: list[object] = [own.allocate(10) for _ in range(30)]
        cycle.append(cycle)
        del cycle
        assert own.find(kept) == ((0, PAGE), 0)


FORKED = """
import gc, os
from evenstep.comm.host_memory import HostMemory, PeerMemory
own = HostMemory()
mine = own.allocate(100)
mine[:] = 3
child = os.fork()
if not child:
    del mine
    gc.collect()
    os._exit(0)
os.waitpid(child, 0)
assert mine[99] == 3, "a forked child emptied the memory of its parent"
"""


def test_a_forked_child_takes_nothing_away() -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORKED], check=True, timeout=60)
