"""A trace shows every stage; without a trace, nothing is recorded and nothing changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torchdata.nodes import BaseNode

from evenstep import DataPlane, LoaderConfig, StepSampler, build_loader
from evenstep.nodes import Stage
from evenstep.nodes.spans import Watched, watch
from evenstep.nodes.stage import upstream
from evenstep.testing import SimulatedWorld

ONLINE = {"sampler", "read", "gather", "plan", "exchange", "pack", "pin", "copy", "broadcast"}
KNOWN = ONLINE - {"gather", "exchange"}


def everywhere() -> Any:
    """Have the profiler record all threads, where torch can (2.7)."""
    try:
        return torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    except TypeError:
        return None


def make_loader(corpus: Any, plane: DataPlane | None = None, *, known: bool = False, **options: Any) -> Any:
    return build_loader(
        corpus,
        plane or DataPlane.single(),
        LoaderConfig(seq_len=1024, **options),
        sampler=StepSampler(len(corpus), global_batch_size=8, seed=1),
        metadata=corpus.lengths if known else None,
    )


def spans(recorded: profile, folder: Path) -> list[dict[str, Any]]:
    recorded.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    return [event for event in events if str(event.get("name")).startswith("evenstep.")]


@pytest.mark.parametrize(("known", "stages"), [(False, ONLINE), (True, KNOWN)])
def test_the_trace_of_torch_shows_every_stage(
    corpus: Any, tmp_path: Path, known: bool, stages: set[str]
) -> None:
    with make_loader(corpus, known=known, host_prefetch=0, pin_memory=True) as loader:
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            next(loader)
        next(loader)  # nobody watches any more
    found = spans(recorded, tmp_path)
    assert {event["name"] for event in found} == {f"evenstep.{stage}" for stage in stages}
    # One batch was asked for: whoever pulls holds what it pulls from.
    first, last = (
        next(e for e in found if e["name"] == f"evenstep.{name}") for name in ("broadcast", "read")
    )
    assert first["ts"] <= last["ts"]
    assert last["ts"] + last["dur"] <= first["ts"] + first["dur"]
    assert sum(event["name"] == "evenstep.broadcast" for event in found) == 1


@pytest.mark.skipif(not everywhere(), reason="this torch records one thread only")
def test_the_loader_has_a_thread_of_its_own_in_the_trace(corpus: Any, tmp_path: Path) -> None:
    with (
        make_loader(corpus) as loader,
        profile(activities=[ProfilerActivity.CPU], experimental_config=everywhere()) as recorded,
    ):
        next(loader)
        loader.wait_for_prefetch()
    found = spans(recorded, tmp_path)
    threads = {event["name"]: event["tid"] for event in found}
    assert set(threads) == {f"evenstep.{stage}" for stage in ONLINE | {"wait"}}
    own = {name for name, thread in threads.items() if thread == threads["evenstep.wait"]}
    assert own == {"evenstep.wait", "evenstep.copy", "evenstep.broadcast"}
    assert len(set(threads.values())) == 2


class Numbers(BaseNode[int], Watched):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._next = 0

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        self._next = 0

    def next(self) -> int:
        self._next += 1
        return self._next

    def get_state(self) -> dict[str, Any]:
        return {"next": self._next}


class Halved(Stage[int, int]):
    def produce(self) -> int:
        number: int = next(self.source)
        if number % 2:
            raise ValueError(f"{number} is odd")
        return number // 2


class Told:
    def __init__(self) -> None:
        self.spans: list[tuple[str, bool, Any]] = []

    def record(self, stage: str, begin: int, end: int, node: Watched | None, item: Any) -> None:
        assert node is not None
        self.spans.append((stage, begin <= end, item))


def test_a_stage_without_a_word_is_shown_by_its_class_also_when_it_fails() -> None:
    stage, told = Halved(Numbers()), Told()
    stage.watcher = told
    with pytest.raises(ValueError, match="1 is odd"):
        next(stage)
    stage.watcher = None
    stage.reset()
    stage.source.next()
    next(stage)
    assert told.spans == [("Halved", True, None)]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    made: list[str] = []
    real = torch.autograd.profiler.record_function

    def record(name: str) -> Any:
        made.append(name)
        return real(name)

    monkeypatch.setattr(torch.autograd.profiler, "record_function", record)
    return made


def test_no_span_is_made_unless_somebody_watches(counted: list[str]) -> None:
    node = Watched()
    assert watch(node, lambda: 3, "plan") == 3
    assert counted == []
    with profile(activities=[ProfilerActivity.CPU]):
        assert watch(node, lambda: 3, "plan") == 3
    assert counted == ["evenstep.plan"]


def test_every_stage_of_every_graph_can_be_watched(corpus: Any) -> None:
    def names(plane: DataPlane) -> set[str]:
        with make_loader(corpus, plane) as loader:
            nodes = list(upstream(loader.root))
            assert all(isinstance(node, Watched) and node.shown_as for node in nodes)
            return {node.shown_as for node in nodes if isinstance(node, Watched)}

    assert SimulatedWorld(2).run(names) == [(ONLINE | {"wait"}) - {"sampler"}] * 2
