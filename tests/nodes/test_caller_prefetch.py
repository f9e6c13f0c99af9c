"""Collectives that the training thread starts, at whatever places of its loop, give what the producer gives."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep import Cursor, DataPlane, Loader, LoaderConfig, StepSampler, build_loader
from evenstep.nodes import CallerPrefetch, HostPrefetch
from evenstep.nodes.stage import upstream
from evenstep.testing import SimulatedWorld
from evenstep.testing.hooks import Hooks, train
from evenstep.testing.jobs import Layout, Seen, Stream, layouts, streams

STREAM = Stream(kind="step", lengths=tuple(1 + (7 * i) % 20 for i in range(48)), rows=8, seed=3)
OPTIONS = {"micro_batch_size": 1, "balance_window": 2, "collectives": "caller"}


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Stream, Layout, list[int]]:
    """A job whose collectives the training threads start, and a seed for the hooks of each rank."""
    stream = draw(streams())
    ahead = draw(st.sampled_from([None, None, 1, 3]))
    layout = draw(
        layouts(
            stream, dp_sizes=(1, 2, 3, 4), tp_sizes=(1, 1, 2), collectives="caller", host_prefetch=[ahead]
        )
    )
    size = layout.dp * layout.tp
    return stream, layout, draw(st.lists(st.integers(0, 2**32), min_size=size, max_size=size))


def by_producer(layout: Layout) -> Layout:
    return replace(layout, options={**layout.options, "collectives": "producer"})


@settings(max_examples=20)
@given(jobs())
def test_batches_and_states_are_those_of_the_producer_wherever_the_hooks_are(
    job: tuple[Stream, Layout, list[int]],
) -> None:
    stream, layout, seeds = job

    def epochs(plane: DataPlane, layout: Layout, meet: Callable[[], Any]) -> list[list[Seen]]:
        with layout.loader(stream, plane) as loader:
            seed = seeds[plane.topology.rank]
            return [train(loader, seed, meet), train(loader, seed + 1, meet)]

    world = layout.world()
    expected = world.run(epochs, by_producer(layout), lambda: None)
    assert world.run(epochs, layout, threading.Barrier(world.size, timeout=20).wait) == expected


@settings(max_examples=20)
@given(jobs(), st.integers(1, 6), st.integers(1, 6))
def test_a_state_loaded_in_the_middle_gives_the_same_rest(
    job: tuple[Stream, Layout, list[int]], first: int, second: int
) -> None:
    """Some ranks have posted more than others when they leave one stream for another."""
    stream, layout, seeds = job
    if stream.kind != "auto":
        layout.options["resume"] = "micro_batch"  # type: ignore[index]  # a dict

    def back_and_forth(plane: DataPlane, layout: Layout, meet: Callable[[], Any]) -> list[list[Seen]]:
        with layout.loader(stream, plane) as loader:
            seed = seeds[plane.topology.rank]
            runs = [train(loader, seed, meet, first)]
            state = loader.state_dict()
            runs.append(train(loader, seed + 1, meet, second))
            loader.load_state_dict(state)
            runs.append(train(loader, seed + 2, meet, second))
            return runs

    world = layout.world()
    expected = world.run(back_and_forth, by_producer(layout), lambda: None)
    assert world.run(back_and_forth, layout, threading.Barrier(world.size, timeout=20).wait) == expected
    if stream.kind != "auto":
        last = Cursor.from_dict(expected[0][0][-1].state)
        if (
            last.micro_batch or stream.sampler().step_at(last) is not None
        ):  # else the loop has gone on to an epoch
            assert all(runs[1] == runs[2] for runs in expected)


def fail_at(stream: Stream, index: int) -> Any:
    class Failing:
        def __len__(self) -> int:
            return len(stream)

        def __getitem__(self, at: int) -> Any:
            if at == index:
                raise OSError(f"disk of {at}")
            return stream[at]

    return Failing()


@settings(max_examples=15)
@given(jobs(), st.data())
def test_an_error_is_raised_by_next_after_the_same_batch_as_by_the_producer(
    job: tuple[Stream, Layout, list[int]], data: st.DataObject
) -> None:
    stream, layout, seeds = job
    index = data.draw(st.sampled_from([index for _, members in stream.steps() for index in members]))

    def until_the_error(plane: DataPlane, layout: Layout) -> tuple[list[Seen], str, str]:
        loader, seen = layout.loader(stream, plane, dataset=fail_at(stream, index)), []
        hooks = Hooks(loader, seeds[plane.topology.rank])
        with loader:
            try:
                for batch in loader:
                    seen.append(Seen.of(batch, loader))
                    hooks.maybe()
            except Exception as error:
                hooks.maybe()
                with pytest.raises(type(error), match=re.escape(str(error))):
                    next(loader)
                return seen, type(error).__name__, str(error)
        raise AssertionError("the epoch ended without the sample")

    world = layout.world()
    expected = world.run(until_the_error, by_producer(layout))
    outcomes = world.run(until_the_error, layout)
    assert [told for _, *told in outcomes] == [told for _, *told in expected]
    if not layout.known:  # else the other ranks hear of it at their next header
        assert outcomes == expected


def test_a_world_of_one_has_nothing_to_start() -> None:
    world = SimulatedWorld(1)
    layout = Layout(options=OPTIONS)
    (seen,) = world.run(lambda plane: train(layout.loader(STREAM, plane), 5, lambda: None))
    (expected,) = world.run(lambda plane: train(by_producer(layout).loader(STREAM, plane), 5, lambda: None))
    assert seen == expected


DOCUMENTS = [{"input_ids": [1] * (1 + i % 5)} for i in range(16)]


def build(**options: Any) -> Loader[Any]:
    return build_loader(
        DOCUMENTS, None, LoaderConfig(seq_len=8, **options), sampler=StepSampler(16, global_batch_size=4)
    )


def nodes_of(loader: Loader[Any], kind: type[Any]) -> list[Any]:
    return [node for node in upstream(loader.root) if isinstance(node, kind)]


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, HostPrefetch),
        ({"collectives": "producer"}, HostPrefetch),
        ({"collectives": "caller"}, CallerPrefetch),
        ({"backend": "nccl"}, CallerPrefetch),
        ({"payload_backend": "hccl"}, CallerPrefetch),
        ({"backend": "nccl", "collectives": "caller"}, CallerPrefetch),
    ],
)
def test_the_backend_decides_who_starts_collectives(options: dict[str, Any], kind: type[Any]) -> None:
    with build(**options) as loader:
        (node,) = nodes_of(loader, HostPrefetch)
        assert type(node) is kind
        assert len(list(loader)) == len(loader)


def test_nothing_is_started_ahead_without_host_prefetch() -> None:
    with build(collectives="caller", host_prefetch=0) as loader:
        assert not nodes_of(loader, HostPrefetch)
        next(loader)
        loader.prefetch_plan()
        loader.prefetch()
        assert len(list(loader)) == len(loader) - 1


@pytest.mark.parametrize("field", ["backend", "payload_backend"])
def test_a_producer_of_accelerator_collectives_is_refused(field: str) -> None:
    message = (
        f"collectives='producer' with {field}='nccl': its collectives run in the order in which one thread starts them, "
        "and with the training step's beside them the ranks would hang. Choose collectives='auto' (or 'caller'), or "
        "the backend 'gloo'."
    )
    with pytest.raises(ValueError, match="^" + re.escape(message) + "$"):
        build(**{field: "nccl", "collectives": "producer"})
