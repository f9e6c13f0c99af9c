"""Every stage of a loader is on its timeline, with what it made; closing it leaves no trace on the loader."""

from __future__ import annotations

import json
import re
import threading
import time
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from evenstep import DataPlane, LoaderConfig, StepSampler, Timeline, build_loader
from evenstep.nodes.spans import Watched
from evenstep.nodes.stage import upstream
from evenstep.testing import SimulatedWorld

DOCUMENTS = [{"input_ids": torch.arange(1, 2 + 37 * i % 500)} for i in range(32)]


def make_loader(plane: DataPlane | None = None, **options: Any) -> Any:
    return build_loader(
        DOCUMENTS,
        plane or DataPlane.single(),
        LoaderConfig(seq_len=512, **options),
        sampler=StepSampler(len(DOCUMENTS), global_batch_size=8, seed=1),
    )


def spans(timeline: Timeline) -> list[dict[str, Any]]:
    return [event for event in timeline.to_dict()["traceEvents"] if event["ph"] == "X"]


def test_stages_nest_on_their_threads_and_say_what_they_made() -> None:
    before = time.time()
    with make_loader() as loader, Timeline(loader) as timeline:
        batch = next(loader)
        loader.wait_for_prefetch()
    events = spans(timeline)
    first = {event["name"]: event for event in reversed(events)}
    threads = {name: event["tid"] for name, event in first.items()}
    assert threads["broadcast"] == threads["wait"] == threading.get_native_id() != threads["pack"]
    for outer, inner in [("broadcast", "wait"), ("pack", "exchange"), ("plan", "gather"), ("gather", "read")]:
        a, b = first[outer], first[inner]
        assert a["ts"] <= b["ts"]
        assert b["ts"] + b["dur"] <= a["ts"] + a["dur"]
    info = batch["info"]
    made = {"step": 0, "micro_batch": 0, "samples": info.num_samples, "tokens": info.num_tokens}
    assert first["pack"]["args"] == first["exchange"]["args"] == first["broadcast"]["args"] == made
    window = {
        "step": 0,
        "first_micro_batch": 0,
        "samples": 8,
        "tokens": first["read"]["args"]["tokens"],
    }
    assert first["read"]["args"] == first["gather"]["args"] == window
    assert before * 1e6 <= first["read"]["ts"] <= time.time() * 1e6


def test_the_plan_of_a_window_says_what_it_moves_where_it_was_made() -> None:
    def run(plane: DataPlane) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
        with make_loader(plane, balance_window=2) as loader, Timeline(loader) as timeline:
            next(loader)
            balance = loader.last_balance
            next(loader)  # else how much was planned meanwhile would depend on the machine
        plans = [event["args"] for event in spans(timeline) if event["name"] == "plan"]
        return plans[:2], None if balance is None else balance.to_dict()

    (planner, told), (other, nothing) = SimulatedWorld(2).run(run)
    assert told is not None
    assert nothing is None
    brought = {name: told[name] for name in ("algorithm", "efficiency", "reference_efficiency")}
    moved = {name: told[name] for name in ("moved_samples", "moved_tokens", "moved_bytes")}
    batches = [{"step": 0, "micro_batch": 0}, {"step": 0, "micro_batch": 1}]
    assert planner == [{**batches[0], **brought, **moved}, batches[1]]
    assert other == batches
    assert told["moved_bytes"] > 0


def test_ranks_write_files_of_their_own(tmp_path: Path) -> None:
    def run(plane: DataPlane) -> int:
        with make_loader(plane) as loader:
            with Timeline(loader, tmp_path / "traces") as timeline:
                for _ in islice(loader, 2):
                    with timeline.span("train"):
                        pass
            next(loader)  # is not on it
            assert all(node.watcher is None for node in upstream(loader.root) if isinstance(node, Watched))
        timeline.close()  # changes nothing
        return timeline.rank

    assert SimulatedWorld(2).run(run) == [0, 1]
    assert sorted(path.name for path in (tmp_path / "traces").iterdir()) == ["rank-0.json", "rank-1.json"]
    for rank in range(2):
        trace = json.loads((tmp_path / "traces" / f"rank-{rank}.json").read_text())
        assert {event["pid"] for event in trace["traceEvents"]} == {rank}
        meta = [(event["name"], event["args"]) for event in trace["traceEvents"] if event["ph"] == "M"]
        assert meta[:2] == [
            ("process_name", {"name": f"rank {rank}"}),
            ("process_sort_index", {"sort_index": rank}),
        ]
        assert ("thread_name", {"name": f"evenstep-prefetch-rank{rank}"}) in meta
        names = [event["name"] for event in trace["traceEvents"] if event["ph"] == "X"]
        assert names.count("train") == names.count("broadcast") == 2


def test_a_failing_stage_is_on_it_too() -> None:
    def broken(samples: list[Any], seq_len: int) -> Any:
        raise OSError("no room")

    loader = build_loader(
        DOCUMENTS,
        None,
        LoaderConfig(seq_len=512, host_prefetch=0),
        sampler=StepSampler(len(DOCUMENTS), global_batch_size=8),
        pack=broken,
    )
    with loader, Timeline(loader) as timeline, pytest.raises(OSError, match="no room"):
        next(loader)
    by_name = {event["name"]: event["args"] for event in spans(timeline)}
    assert by_name["pack"] == by_name["broadcast"] == {}
    assert by_name["exchange"]["micro_batch"] == 0


def test_only_the_last_spans_are_kept() -> None:
    with make_loader(host_prefetch=0) as loader, Timeline(loader, limit=3) as timeline:
        list(loader)
        assert [event["name"] for event in spans(timeline)] == ["broadcast", "copy", "pin"]


def test_one_timeline_at_a_time() -> None:
    with make_loader() as loader, Timeline(loader):
        with pytest.raises(
            RuntimeError, match=f"^{re.escape('another Timeline watches this loader: close that one first')}$"
        ):
            Timeline(loader)
        next(loader)


@pytest.mark.parametrize("limit", [0, -1, 1.5, True])
def test_a_limit_is_a_number_of_spans(limit: Any) -> None:
    message = f"limit={limit!r}, expected a number of spans >= 1: nothing would be recorded"
    with make_loader() as loader, pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Timeline(loader, limit=limit)
