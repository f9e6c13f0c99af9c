"""The packing benchmark tells what it measured, and one pass allocates each output once."""

from __future__ import annotations

import argparse
import functools
import json
import re
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from evenstep.bench import pack as benchmark
from evenstep.packing import collate_rows, collate_varlen, fused, pack_text


def arguments(*options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    benchmark.add_arguments(parser)
    return parser.parse_args(
        ["--seq-len", "512", "--rows", "2", "--document", "64", "--repeats", "3", *options]
    )


def test_figures_come_with_their_setting(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    assert benchmark.run(arguments("--labels", "--shifted", "--json")) == 0
    result = json.loads(capsys.readouterr().out)
    assert (
        set(result["gb_per_s"])
        == set(result["ratio_to_memcpy"])
        == {
            "padded, one pass",
            "padded, composed",
            "varlen, one pass",
            "varlen, composed",
        }
    )
    assert all(value > 0 for value in result["gb_per_s"].values())
    assert result["setting"]["labels"] is result["setting"]["shifted"] is True
    assert result["machine"]["torch"] == version("torch")  # torch itself may add its build
    assert result["setting"]["threads"] == 1
    assert torch.get_num_threads() == threads


def test_a_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark.run(arguments()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.match(
        r"2 rows of 512 int64 tokens in \d+ documents, labels from tokens, unshifted, seed 0", lines[0]
    )
    assert [line.split("  ")[0] for line in lines[3:]] == [
        "padded, one pass",
        "padded, composed",
        "varlen, one pass",
        "varlen, composed",
        "memcpy",
    ]


def test_nothing_to_measure_is_told() -> None:
    with pytest.raises(ValueError, match=r"^rows is 0; there would be nothing to measure; give at least 1$"):
        benchmark.run(arguments("--rows", "0"))


class Allocations(TorchDispatchMode):
    """Counts the storages of at least ``least`` bytes that torch makes."""

    def __init__(self, least: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.least = least
        self.seen: dict[int, Any] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.untyped_storage().nbytes() >= self.least:
            self.seen[out.untyped_storage().data_ptr()] = out
        return out


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("collate", [collate_rows, collate_varlen])
def test_one_pass_allocates_each_field_once(collate: Callable[..., Any], shifted: bool) -> None:
    rows = [[{"input_ids": torch.arange(300)}, {"input_ids": torch.arange(212)}] for _ in range(4)]
    one_pass = fused(functools.partial(pack_text, shifted=shifted), collate)
    assert one_pass is not None
    with Allocations(512 * 8) as allocations:
        one_pass(rows, 512)
    assert len(allocations.seen) == 3
