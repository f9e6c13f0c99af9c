"""What user code raises never costs data: no error passes for an end, and none is skipped by going on."""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from evenstep import Loader, LoaderConfig, StepSampler, build_loader
from evenstep.comm.plane import DataPlane
from evenstep.nodes import StepBuilder
from evenstep.nodes.stage import call
from evenstep.packing import collate_rows, pack_text
from evenstep.samples import MetadataTable
from evenstep.testing import SimulatedWorld

SAMPLES = 12


class Samples:
    """Numbered documents; something happens when one of them is read for the first time."""

    def __init__(self, at: int = -1, happens: Callable[[], object] = lambda: None) -> None:
        self.at, self.happens = at, happens

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == self.at:
            self.at = -1
            self.happens()
        return {"input_ids": torch.full((3,), index)}


class Fourth:
    """Raises ``error`` when it is called for the fourth time."""

    def __init__(self, error: BaseException) -> None:
        self.error, self.calls = error, 0

    def __call__(self, *_: object) -> None:
        self.calls += 1
        if self.calls == 4:
            raise self.error


def build(dataset: Any = None, plane: DataPlane | None = None, **options: Any) -> Loader[Any]:
    ahead = options.pop("host_prefetch", 0)
    order = options.pop("order", "sequential")
    return build_loader(
        Samples() if dataset is None else dataset,
        plane,
        LoaderConfig(seq_len=8, host_prefetch=ahead, resume="micro_batch"),
        sampler=StepSampler(SAMPLES, global_batch_size=2, order=order),
        **options,
    )


def numbers(batches: Any) -> list[int]:
    return sorted({int(n) for batch in batches for n in batch["input_ids"].flatten()} - {0})


def told(failure: str) -> str:
    return f"{failure} (every rank stops here; the traceback is on rank 0)"


def raising(name: str) -> dict[str, Any]:
    """Options of a loader, one of whose functions raises StopIteration in the middle of an epoch."""
    meet = Fourth(StopIteration())

    class Cost:
        stages = ("cost",)

        def cost(self, table: MetadataTable) -> npt.NDArray[np.float64]:
            meet()
            return table.tokens.astype(np.float64)

    class Order:
        def index_at(self, epoch: int, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:  # noqa: ARG002
            meet()
            return positions

    def pack(samples: list[Any], seq_len: int) -> Any:
        meet()
        return pack_text(samples, seq_len)

    def collate(rows: list[Any]) -> Any:
        meet()
        return collate_rows(rows)

    options: dict[str, dict[str, Any]] = {
        "pack": {"pack": pack},
        "collate": {"collate": collate},
        "the cost model": {"cost": Cost()},
        "sampler.step_at": {"order": Order()},
        "on_balance": {"on_balance": meet},
    }
    return options[name]


@pytest.mark.parametrize("ahead", [0, None])
@pytest.mark.parametrize("name", ["pack", "collate", "the cost model", "sampler.step_at", "on_balance"])
def test_a_stop_iteration_of_user_code_is_an_error_and_no_end(name: str, ahead: int | None) -> None:
    with build(host_prefetch=ahead, **raising(name)) as loader:
        for _ in range(2):  # again and again
            with pytest.raises(RuntimeError) as caught:
                for _ in loader:
                    pass
            text = (
                f"{name} raised StopIteration, which would end the epoch here and lose the rest of its data; only the "
                "source of the data may. Look for a next() without a default."
            )
            error: BaseException | None = caught.value
            if name in ("the cost model", "sampler.step_at"):  # as every failure of reading, it is told first
                assert str(error) == told(f"rank 0 failed: RuntimeError: {text}")
                error = caught.value.__cause__
            assert error is not None
            assert str(error) == text
            assert isinstance(error.__cause__, StopIteration)


@pytest.mark.parametrize("where", ["dataset", "metadata_fn"])
def test_a_stop_iteration_of_a_sample_names_it(where: str) -> None:
    def end() -> None:
        raise StopIteration

    def measure(sample: dict[str, Any]) -> int:
        if int(sample["input_ids"][0]) == 5:
            end()
        return 3

    options: dict[str, Any] = {"metadata_fn": measure} if where == "metadata_fn" else {}
    with (
        build(Samples(5, end) if where == "dataset" else None, **options) as loader,
        pytest.raises(RuntimeError) as caught,
    ):
        list(loader)
    assert str(caught.value) == told("rank 0 failed at sample 5: StopIteration: ")


def test_every_rank_hears_of_a_stop_iteration_of_one() -> None:
    def body(plane: DataPlane) -> int:
        def pack(samples: list[Any], seq_len: int) -> Any:
            if plane.topology.rank == 1:
                meet()
            return pack_text(samples, seq_len)

        meet = Fourth(StopIteration())
        with build(plane=plane, pack=pack) as loader:
            return len(list(loader))

    first, second = SimulatedWorld(2).outcomes(body)
    assert str(second).startswith("pack raised StopIteration, which would end the epoch here")
    assert str(first).startswith("rank 1 failed: RuntimeError: pack raised StopIteration")


def test_a_stop_iteration_of_a_step_builders_metadata_is_an_error() -> None:
    builder = StepBuilder([{"x": 1}] * 9, 4, rows=1, metadata_fn=lambda _: next(iter(())))
    with pytest.raises(
        RuntimeError, match=r"^sample 0 since the stream was begun or loaded: StopIteration: $"
    ):
        list(builder)


def test_the_end_of_a_stream_is_still_its_source_s() -> None:
    steps = [[[{"input_ids": torch.full((3,), n)}]] for n in range(4)]
    with build_loader(steps, None, LoaderConfig(seq_len=8)) as loader:
        assert [len(list(loader)) for _ in range(2)] == [4, 4]


def test_call_passes_everything_else_on() -> None:
    assert call("f", divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        call("f", divmod, 7, 0)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
@pytest.mark.parametrize("where", ["dataset", "pack", "on_balance"])
@pytest.mark.parametrize("ahead", [0, None])
def test_going_on_after_an_interrupt_inside_a_batch_never_skips(
    kind: type[BaseException], where: str, ahead: int | None
) -> None:
    def interrupt() -> None:
        raise kind

    meet = Fourth(kind())

    def pack(samples: list[Any], seq_len: int) -> Any:
        meet()
        return pack_text(samples, seq_len)

    options: dict[str, Any] = {
        "dataset": {"dataset": Samples(5, interrupt)},
        "pack": {"pack": pack},
        "on_balance": {"on_balance": meet},
    }
    taken: list[Any] = []
    with build(host_prefetch=ahead, **options[where]) as loader:
        with pytest.raises(kind):
            taken.extend(_each(loader))
        for _ in range(2):
            with pytest.raises(RuntimeError) as caught:
                next(loader)
            assert str(caught.value) == (
                f"the loader was interrupted inside a batch ({kind.__name__}), and going on would skip data; load the "
                "last state to go on: loader.load_state_dict(loader.state_dict())"
            )
            assert isinstance(caught.value.__cause__, kind)
        loader.load_state_dict(loader.state_dict())
        rest = list(loader)
    assert numbers(taken + rest) == list(range(1, SAMPLES))
    assert len(taken) + len(rest) == SAMPLES


def _each(loader: Loader[Any]) -> Iterator[Any]:
    """One at a time, so that those before an error are kept."""
    yield from loader


def test_an_interrupt_while_the_prefetcher_is_waited_for_loses_nothing() -> None:
    waiting, go_on, main = threading.Event(), threading.Event(), threading.get_ident()

    def wait() -> None:
        waiting.set()
        assert go_on.wait(20)

    def interrupt() -> None:
        assert waiting.wait(20)
        time.sleep(0.3)  # until the main thread waits, too
        signal.pthread_kill(main, signal.SIGINT)

    taken: list[Any] = []
    with build(Samples(5, wait), host_prefetch=1) as loader:
        threading.Thread(target=interrupt, daemon=True).start()
        try:
            with pytest.raises(KeyboardInterrupt):
                taken.extend(_each(loader))
        finally:
            go_on.set()
        taken += list(loader)
    assert numbers(taken) == list(range(1, SAMPLES))
    assert len(taken) == SAMPLES


@pytest.mark.parametrize("ahead", [0, None])
def test_a_batch_whose_on_balance_failed_is_not_lost(ahead: int | None) -> None:
    meet = Fourth(OSError("tracker is down"))
    taken: list[Any] = []
    with build(host_prefetch=ahead, on_balance=meet) as loader:
        for _ in range(2):
            with pytest.raises(OSError, match=re.escape("tracker is down")):
                taken.extend(_each(loader))
        state = loader.state_dict()
        assert state["consumed_samples"] == len(taken)
        loader.load_state_dict(state)
        rest = list(loader)
    assert numbers(taken + rest) == list(range(1, SAMPLES))
    assert len(taken) + len(rest) == SAMPLES


def test_the_state_after_an_error_is_that_of_the_last_batch_handed_out() -> None:
    meet = Fourth(OSError("no space"))

    def pack(samples: list[Any], seq_len: int) -> Any:
        meet()
        return pack_text(samples, seq_len)

    taken: list[Any] = []
    with build(pack=pack) as loader:
        with pytest.raises(OSError, match=re.escape("no space")):
            taken.extend(_each(loader))
        with build() as other:
            other.load_state_dict(loader.state_dict())
            taken += list(other)
    assert numbers(taken) == list(range(1, SAMPLES))
