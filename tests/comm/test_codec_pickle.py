"""Pickle only where it was asked for by name."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import evenstep.comm
from evenstep.comm.codec import Codec, PayloadCodec, PickleCodec
from evenstep.errors import WireFormatError

codec = PickleCodec()


class Bomb:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (self.path,)


def encode(samples: list[Any]) -> Tensor:
    measures = np.array([codec.measure(sample) for sample in samples])
    out = torch.empty(codec.segment_bytes(measures[:, 0], measures[:, 1]), dtype=torch.uint8)
    codec.encode(samples, out)
    return out


def test_only_the_pickle_codec_knows_pickle() -> None:
    (root,) = evenstep.comm.__path__
    users = {
        path.name
        for path in Path(root).rglob("*.py")
        if re.search(
            r"^\s*(import|from)\s+(pickle|cloudpickle|dill)|torch\.load\(|(gather|broadcast|scatter|send|recv)_object",
            path.read_text(),
            re.M,
        )
    }
    assert users == {"pickled.py"}


def test_a_pickle_bomb_is_not_run_by_the_default_codec(tmp_path: Path) -> None:
    target = tmp_path / "exploded"
    frame = encode([Bomb(str(target))])
    with pytest.raises(WireFormatError, match=r"^segment starts with"):
        PayloadCodec().decode(frame, 1)
    assert not target.exists()
    codec.decode(frame, 1)  # the bomb is live: the test above would fail if it were unpickled
    assert target.exists()


def test_anything_that_pickles_arrives() -> None:
    samples = [{1, 2}, {"a": torch.arange(3)}, "text"]
    got = codec.decode(encode(samples), 3)
    assert got[0] == samples[0]
    assert got[1]["a"].tolist() == [0, 1, 2]
    assert got[2] == "text"
    assert codec.segment_bytes([], []) == 0
    assert codec.decode(torch.empty(0, dtype=torch.uint8), 0) == []
    assert isinstance(codec, Codec)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_frames_of_other_counts_are_refused(count: int) -> None:
    with pytest.raises(WireFormatError, match=r"^segment of \d+ bytes is no frame of \d pickled samples$"):
        codec.decode(encode(["a", "b"]), count)


def test_sizes_and_pickles_are_checked() -> None:
    frame = encode(["a"])
    for at, value, message in [
        (16, 255, "sizes of pickled samples do not add up to the segment's"),
        (24, 255, "a pickled sample cannot be read: UnpicklingError"),
    ]:
        bad = frame.clone()
        bad[at] = value
        with pytest.raises(WireFormatError, match=f"^{re.escape(message)}"):
            codec.decode(bad, 1)


def test_a_sample_that_changed_after_it_was_measured_is_refused() -> None:
    out = torch.empty(
        codec.segment_bytes(*map(list, zip(codec.measure("a"), strict=True))), dtype=torch.uint8
    )
    with pytest.raises(ValueError, match="a sample was changed after it was measured"):
        codec.encode(["abc"], out)
