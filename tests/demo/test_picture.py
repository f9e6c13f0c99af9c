from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from evenstep.demo.records import StepRecord

pytest.importorskip("matplotlib")


@pytest.mark.parametrize("ranks", [1, 2, 20])
def test_the_slow_rank_is_drawn(make_record: Callable[..., StepRecord], tmp_path: Path, ranks: int) -> None:
    from matplotlib import image
    from matplotlib import pyplot as plt

    from evenstep.demo.picture import draw

    before = make_record([[3.0, *[1.0] * (ranks - 1)]] * 4, step=2)
    after = make_record([[2.0] * ranks] * 4, step=2)
    draw(tmp_path / "balance.png", before, after, "1.45x measured")
    pixels = image.imread(tmp_path / "balance.png")[..., :3]
    height = len(pixels)
    waiting = (abs(pixels - (0xE0 / 255, 0x76 / 255, 0x4A / 255)).max(axis=-1) < 0.02).sum(axis=1)
    legend = int(0.3 * 160)
    upper, lower = waiting[legend : height // 2].sum(), waiting[height // 2 :].sum()
    assert lower == 0
    assert (upper > 500) == (ranks > 1)
    assert not plt.get_fignums()
