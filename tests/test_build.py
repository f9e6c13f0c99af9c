"""The composed graph is the one that anybody can compose."""

from __future__ import annotations

import gc
import re
import threading
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torchdata.nodes as tn
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from evenstep import (
    ConfigMismatch,
    Cursor,
    DataPlane,
    LoaderConfig,
    RemoteRankError,
    StateMismatch,
    StepSampler,
    TokenBudgetSampler,
    build_loader,
)
from evenstep.nodes import HostPrefetch, MetadataGather, Packer, PayloadAllToAll, Planner, SamplerReader
from evenstep.packing import collate_rows, pack_text
from evenstep.sampling import TorchSamplerAdapter
from evenstep.testing import SimulatedWorld, assert_same

LENGTHS = [(7 * i) % 61 for i in range(200)]
DATA = [{"input_ids": torch.arange(i, i + n)} for i, n in enumerate(LENGTHS)]
CONFIG = LoaderConfig(seq_len=64, micro_batch_size=1, balance_window=2)


def sampler() -> TokenBudgetSampler:
    return TokenBudgetSampler(LENGTHS, rows_per_step=8, seq_len=64, seed=5)


def by_hand(plane: DataPlane) -> tn.BaseNode[Any]:
    node: tn.BaseNode[Any] = SamplerReader(sampler(), DATA, plane, CONFIG)
    node = PayloadAllToAll(Planner(MetadataGather(node, plane), plane, CONFIG), plane, CONFIG)
    return HostPrefetch(Packer(node, pack_text, collate_rows), 3)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_graph_composed_by_hand_under_the_stock_loader_gives_the_same_batches(ranks: int) -> None:
    world = SimulatedWorld(ranks)

    def stock(plane: DataPlane) -> list[Any]:
        loader = tn.Loader(by_hand(plane))
        return [list(loader), list(loader)]

    def built(plane: DataPlane) -> list[Any]:
        with build_loader(DATA, plane, CONFIG, sampler=sampler()) as loader:
            return [list(loader), list(loader)]

    expected = world.run(stock)
    assert len(expected[0][0]) > 4
    assert_same(world.run(built), expected)


def test_a_global_batch_that_the_mesh_does_not_divide_is_refused_on_every_rank() -> None:
    def build(plane: DataPlane) -> None:
        build_loader(
            DATA,
            plane,
            LoaderConfig(seq_len=64, micro_batch_size=2),
            sampler=StepSampler(200, global_batch_size=9),
        )

    message = (
        "the sampler makes steps of 9 rows, which micro_batch_size=2 x 2 data-parallel ranks = 4 does not divide: "
        "ranks would take different numbers of micro-batches. Choose a global batch that is a multiple of 4."
    )
    for outcome in SimulatedWorld(2).outcomes(build):
        assert isinstance(outcome, ValueError)
        assert str(outcome) == message


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"config": {"seq_len": 4}}, TypeError, "config is dict {'seq_len': 4}, expected a LoaderConfig"),
        (
            {"dataset": DATA[:-1]},
            ValueError,
            "the sampler was made for 200 samples, the dataset has 199: samples would be missing or out of range. Build the sampler with 199 samples.",
        ),
        ({"dataset": []}, ValueError, "the dataset is empty: there is nothing to train on"),
        ({"dataset": None}, ValueError, "dataset=None, but rank 0 reads samples; pass the dataset here"),
        ({"pack": 3}, TypeError, "pack is 3, expected a function"),
        ({"metadata_fn": 3}, TypeError, "metadata_fn is 3, expected a function of a sample"),
        ({"on_balance": "log"}, TypeError, "on_balance is 'log', expected a function of a Balance"),
        ({"batch_spec": {}}, TypeError, "batch_spec is {}, expected a BatchSpec"),
        ({"allow_changed_dataset": 1}, TypeError, "allow_changed_dataset is 1, expected a bool"),
        (
            {"explode": list, "metadata": [8] * 200},
            ValueError,
            "explode with repack=True needs the documents of each sample before planning, which metadata does not give: "
            "pass them as the columns 'documents' and 'document_offsets', choose repack=False to keep the rows whole, or "
            "leave metadata out",
        ),
        (
            {"sampler": None, "metadata": [8] * 200},
            ValueError,
            "metadata describes the samples of a dataset by index, which a rank-local stream of steps does not tell the "
            "other ranks: pass a sampler over the whole dataset, or leave metadata out",
        ),
        (
            {"metadata": [1.5] * 200},
            TypeError,
            "metadata column 'tokens' has shape (200,) and dtype float64, expected one integer per sample",
        ),
        ({"start": {"epoch": 1}}, TypeError, "start is {'epoch': 1}, expected an evenstep.Cursor"),
        (
            {"mesh": 2},
            TypeError,
            "mesh must be a DeviceMesh over the whole world, a ready DataPlane, or None for one process, but is 2 (int). "
            "Make one with init_device_mesh('cpu', (world_size,), mesh_dim_names=('dp',)).",
        ),
        (
            {"dataset": sampler},
            TypeError,
            "dataset must have dataset[index], because the sampler names samples by their index, but is the function "
            "sampler. Pass the dataset that it makes, or leave sampler out for a dataset that makes its own "
            "steps.",
        ),
        (
            {"dataset": list},
            TypeError,
            "dataset must have dataset[index], because the sampler names samples by their index, but is the class "
            "list. Pass the dataset that it makes, or leave sampler out for a dataset that makes its own steps.",
        ),
        (
            {"sampler": DATA[:1] * 200},
            TypeError,
            "sampler must be a StepSampler, TokenBudgetSampler or another object with step_at(cursor), start() and "
            "rows_per_step, or None for a dataset that makes its own steps, but is [{'input_ids': tensor([], "
            "dtype=torch.int64)}, {'input_ids': tensor([], dtype... (list)",
        ),
        (
            {"config": LoaderConfig(seq_len=32)},
            ValueError,
            "the sampler fills rows of seq_len=64 tokens, the rows of the loader hold seq_len=32: its steps would not "
            "fit. Give TokenBudgetSampler and LoaderConfig the same seq_len.",
        ),
    ],
)
def test_bad_input_is_refused_when_the_loader_is_built(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    arguments: dict[str, Any] = {
        "dataset": DATA,
        "mesh": None,
        "config": CONFIG,
        "sampler": sampler(),
        **change,
    }
    with pytest.raises(error) as caught:
        build_loader(**arguments)
    assert str(caught.value) == message


def test_looser_rows_than_the_samplers_and_free_rows_are_fine() -> None:
    for change in ({"seq_len": 65}, {"seq_len": 61, "accumulation_steps": "auto"}):
        config = LoaderConfig(**{"host_prefetch": 0, **change})  # type: ignore[arg-type]
        with build_loader(DATA, None, config, sampler=sampler()) as loader:
            assert next(loader)["info"].num_tokens > 0


def test_accumulation_steps_that_are_no_number_name_what_else_there_is() -> None:
    message = "accumulation_steps='Auto' (str), expected an integer, 'auto' or None"
    with pytest.raises(TypeError, match="^" + re.escape(message) + "$"):
        LoaderConfig(seq_len=64, accumulation_steps="Auto")


def test_without_an_accelerator_batches_stay_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def current_accelerator() -> None:
        raise RuntimeError("Cannot access accelerator device when none is available.")  # as torch 2.6 does

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", current_accelerator)
    with build_loader(DATA, None, replace(CONFIG, backend="nccl"), sampler=sampler()) as loader:
        assert next(loader)["input_ids"].device.type == "cpu"


def test_an_accelerator_that_is_not_there_is_refused_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)

    def build(plane: DataPlane) -> None:
        build_loader(DATA, plane, CONFIG, sampler=sampler(), device="cuda:1")

    for outcome in SimulatedWorld(2).outcomes(build):
        assert isinstance(outcome, ValueError)
        assert str(outcome) == (
            "device='cuda:1', but torch finds 1 'cuda' devices in this process: no batch could be put there. Check the "
            "driver, the build of torch and the devices that are visible, or pass device='cpu'."
        )


@pytest.mark.parametrize(
    ("other", "field", "values"),
    [
        ({"seed": 6}, "sampler.seed", (5, 6)),
        ({"rows_per_step": 4}, "sampler.global_batch_size", (8, 4)),
        ({"order": "sequential"}, "sampler.order", ("'shuffled'", "'sequential'")),
    ],
)
def test_samplers_that_differ_between_ranks_are_told_by_the_field(
    other: dict[str, Any], field: str, values: tuple[Any, Any]
) -> None:
    def build(plane: DataPlane) -> None:
        arguments: dict[str, Any] = {"rows_per_step": 8, "seq_len": 64, "seed": 5}
        chosen = TokenBudgetSampler(LENGTHS, **arguments | (other if plane.topology.rank else {}))
        build_loader(DATA, plane, CONFIG, sampler=chosen)

    for outcome in SimulatedWorld(2).outcomes(build):
        assert isinstance(outcome, ConfigMismatch)
        assert str(outcome) == (
            f"{field} differs between ranks: rank 0 has {values[0]}, ranks [1] have {values[1]}: their plans and "
            f"collectives would not fit together. Give every rank the same {field}."
        )


def test_an_argument_that_is_wrong_on_one_rank_is_told_on_all() -> None:
    def build(plane: DataPlane) -> None:
        build_loader(DATA if plane.topology.rank else None, plane, CONFIG, sampler=sampler())

    first, second = SimulatedWorld(2).outcomes(build)
    assert str(first) == "dataset=None, but rank 0 reads samples; pass the dataset here"
    assert isinstance(second, RemoteRankError)
    assert str(second) == f"rank 0 could not build its loader: ValueError: {first}"


def test_a_loop_that_counts_batches_and_never_meets_the_end_gets_the_next_epoch() -> None:
    with (
        build_loader(DATA, None, CONFIG, sampler=sampler()) as loader,
        build_loader(DATA, None, CONFIG, sampler=sampler()) as met,
    ):
        for epoch in range(3):
            expected = list(met)
            batches = iter(loader)
            counted = [next(batches) for _ in range(len(expected))]
            assert_same(counted, expected, f"epoch {epoch}")


def test_a_state_of_an_epochs_end_restores_to_that_end() -> None:
    with build_loader(DATA, None, CONFIG, sampler=sampler()) as loader:
        list(loader)
        end, second = loader.state_dict(), list(loader)
    with build_loader(DATA, None, CONFIG, sampler=sampler()) as restored:
        restored.load_state_dict(end)
        assert list(restored) == []
        assert_same(list(restored), second)
    for how in ("set_epoch", "restart_on_stop_iteration"):
        with build_loader(DATA, None, CONFIG, sampler=sampler()) as restored:
            restored.load_state_dict(end)
            if how == "set_epoch":
                restored.set_epoch(1)
            else:
                restored.restart_on_stop_iteration = True
            assert_same(list(restored), second, how)


def test_a_closed_loader_has_ended_for_good() -> None:
    loader = build_loader(DATA, None, CONFIG, sampler=sampler())
    next(loader)
    loader.close()
    assert next(iter(loader), "end") == "end"
    assert list(loader) == []


class Failing:
    """A dataset that cannot be read to its end."""

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> Any:
        if index == 7:
            raise OSError("no such sample")
        return DATA[index]


@pytest.mark.parametrize("dataset", [DATA, Failing()], ids=["end", "error"])
def test_a_loader_that_is_dropped_after_its_end_or_an_error_leaves_no_thread(dataset: Any) -> None:
    before = set(threading.enumerate())

    def loop() -> None:
        loader = build_loader(dataset, None, CONFIG, sampler=sampler())
        with pytest.raises(RemoteRankError) if isinstance(dataset, Failing) else nullcontext():
            for _ in loader:
                pass

    loop()
    gc.collect()
    for thread in set(threading.enumerate()) - before:
        thread.join(5)
        assert not thread.is_alive(), f"{thread.name} is still alive"


class Doubled:
    """Every second sample."""

    def index_at(self, epoch: int, positions: Any) -> Any:
        return 2 * positions + epoch


@pytest.mark.parametrize("metadata", [None, LENGTHS], ids=["read", "known"])
@pytest.mark.parametrize(
    ("order", "count"),
    [
        (SubsetRandomSampler(range(50, 90)), 40),
        (WeightedRandomSampler([1.0] * 200, 400), 400),
        (RandomSampler(range(200), num_samples=40), 40),
        (Doubled(), 80),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_part_of_the_dataset_or_more_than_all_of_it_may_be_named(
    order: Any, count: int, metadata: list[int] | None
) -> None:
    steps: StepSampler
    if isinstance(order, Doubled):
        steps = StepSampler(count, global_batch_size=8, order=order)
    else:
        steps = TorchSamplerAdapter(order, global_batch_size=8)
    config = LoaderConfig(seq_len=64, empty="drop")
    with build_loader(DATA, None, config, sampler=steps, metadata=metadata) as loader:
        assert sum(1 for _ in loader) == count


@pytest.mark.parametrize(
    ("dataset", "metadata", "message"),
    [
        (
            DATA[:90],
            None,
            "the sampler names sample 90, the dataset has 90: it would be out of range. Build the sampler over the "
            "dataset that is passed here.",
        ),
        (
            None,
            LENGTHS[:90],
            "the sampler names sample 90, metadata has 90: it would be out of range. Build the sampler over the dataset "
            "that is passed here.",
        ),
        (
            DATA,
            LENGTHS[:95],
            "metadata has 95 samples, the dataset has 200: rows would be planned with the lengths of other samples. "
            "Compute the metadata from the dataset as it is now.",
        ),
    ],
)
def test_a_part_that_the_dataset_or_its_metadata_does_not_have_is_refused(
    dataset: Any, metadata: list[int] | None, message: str
) -> None:
    class Sizeless:
        def __getitem__(self, index: int) -> Any:
            return DATA[index]

    steps = TorchSamplerAdapter(SubsetRandomSampler(range(50, 91)), global_batch_size=8)
    with pytest.raises(ValueError, match="^" + re.escape(message) + "$"):
        build_loader(
            Sizeless() if dataset is None else dataset, None, CONFIG, sampler=steps, metadata=metadata
        )


def test_an_order_that_leaves_the_metadata_is_refused_where_it_does() -> None:
    steps = StepSampler(100, global_batch_size=100, order=Doubled())
    config = LoaderConfig(seq_len=64, empty="drop", host_prefetch=0)
    with build_loader(DATA, None, config, sampler=steps, metadata=LENGTHS) as loader:
        loader.set_epoch(2)
        message = (
            "the sampler names sample 200, metadata has 200: its length is not known. Give metadata of every sample of "
            "the dataset, or an order that stays inside it."
        )
        with pytest.raises(RemoteRankError, match=re.escape(message)):
            next(loader)


def test_a_start_of_another_stream_is_refused() -> None:
    other = TokenBudgetSampler(LENGTHS, rows_per_step=8, seq_len=64, seed=6).start()
    with pytest.raises(StateMismatch, match="the state was saved with seed=6, this loader has seed=5"):
        build_loader(DATA, None, CONFIG, sampler=sampler(), start=other)


def test_a_start_that_does_not_know_its_stream_becomes_one_of_it() -> None:
    first = sampler().step_at(sampler().start())
    assert first is not None
    start = Cursor(consumed_samples=first.next_cursor.consumed_samples, step=1)
    with build_loader(DATA, None, CONFIG, sampler=sampler()) as whole:
        batches = list(whole)
    with build_loader(DATA, None, CONFIG, sampler=sampler(), start=start) as rest:
        assert {key: rest.state_dict()[key] for key in ("seed", "order", "dataset_size")} == {
            "seed": 5,
            "order": "shuffled",
            "dataset_size": 200,
        }
        assert_same(list(rest), [batch for batch in batches if batch["info"].step > 0])


def test_a_start_inside_a_step_of_another_layout_begins_that_step_again() -> None:
    config = LoaderConfig(
        seq_len=64, micro_batch_size=1, balance_window=1, resume="micro_batch", host_prefetch=0
    )
    order = StepSampler(len(DATA), global_batch_size=8, order="sequential")

    def stop_inside(plane: DataPlane) -> dict[str, Any]:
        with build_loader(DATA, plane, config, sampler=order) as loader:
            next(loader)
            next(loader)
            return loader.state_dict()

    start = Cursor.from_dict(SimulatedWorld(2).run(stop_inside)[0])
    assert (start.step, start.micro_batch) == (0, 2)
    with build_loader(DATA, None, config, sampler=order) as loader:
        whole = list(loader)
    with pytest.warns(
        UserWarning, match="^the state stands after micro-batch 2 of step 0, but was taken in another"
    ):
        again = build_loader(DATA, None, config, sampler=order, start=start)
    with again:
        assert_same(list(again), whole)


def test_a_position_beyond_the_epoch_or_the_step_is_refused() -> None:
    with build_loader(DATA, None, CONFIG, sampler=sampler()) as loader:
        next(loader)
        state = loader.state_dict()
        message = re.escape(
            "cursor['consumed_samples'] is 500, but an epoch of this sampler has 200 samples: "
        )
        with pytest.raises(ValueError, match="^" + message):
            loader.load_state_dict({**state, "consumed_samples": 500})
    config = LoaderConfig(seq_len=64, balance_window=2, resume="micro_batch")
    with build_loader(DATA, None, config, sampler=sampler()) as loader:
        loader.load_state_dict({**state, "micro_batch": 8})
        message = re.escape("cursor['micro_batch'] is 8, but a step of this layout has 8 micro-batches: ")
        with pytest.raises(ValueError, match="^" + message):
            next(loader)
