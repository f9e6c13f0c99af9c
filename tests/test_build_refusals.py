"""What cannot be built is refused while it is built, on every rank, with a word on what to do."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from evenstep import (
    ConfigMismatch,
    DataPlane,
    LoaderConfig,
    RemoteRankError,
    StepSampler,
    TokenBudgetSampler,
    build_loader,
)
from evenstep.testing import SimulatedWorld
from evenstep.testing.ranks import run_ranks_outcomes

LENGTHS = [(7 * i) % 61 for i in range(200)]
DATA = [{"input_ids": torch.arange(i, i + n)} for i, n in enumerate(LENGTHS)]
CONFIG = LoaderConfig(seq_len=64, micro_batch_size=1, balance_window=2)


def sampler() -> TokenBudgetSampler:
    return TokenBudgetSampler(LENGTHS, rows_per_step=8, seq_len=64, seed=5)


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
    ("config", "samples", "options", "message"),
    [
        (
            {"accumulation_steps": "auto"},
            1,
            {},
            "the sampler makes steps of 1 samples for 2 data-parallel ranks: some would train on nothing. Use a larger "
            "global_batch_size or fewer ranks.",
        ),
        (
            {"accumulation_steps": 3},
            8,
            {},
            "accumulation_steps=3, but 8 rows a step are 4 micro-batches of 1 rows on 2 ranks. Leave it at None to derive it.",
        ),
        (
            {"accumulation_steps": "auto"},
            8,
            {"balance_group_size": 1},
            "balance_group_size=1 makes 2 groups with plans of their own, which neither accumulation_steps='auto' nor "
            "resume='micro_batch' can follow; leave it at None",
        ),
        (
            {"resume": "micro_batch"},
            8,
            {"balance_group_size": 1},
            "balance_group_size=1 makes 2 groups with plans of their own, which neither accumulation_steps='auto' nor "
            "resume='micro_batch' can follow; leave it at None",
        ),
    ],
)
def test_a_layout_that_no_step_fits_is_refused_on_every_rank(
    config: dict[str, Any], samples: int, options: dict[str, Any], message: str
) -> None:
    def build(plane: DataPlane) -> None:
        order = StepSampler(200, global_batch_size=samples)
        build_loader(DATA, plane, LoaderConfig(seq_len=64, **config), sampler=order)

    for outcome in SimulatedWorld(2, **options).outcomes(build):
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
            "metadata column 'tokens' has shape (200,) and dtype float64, expected one integer per sample: pass "
            ".astype(np.int64)",
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
        message = (
            f"{field} differs between ranks: rank 0 has {values[0]}, ranks [1] have {values[1]}: their plans and "
            f"collectives would not fit together. Give every rank the same {field}."
        )
        derived = " Other fields that differ: sampler.rows_per_step (ranks [1])."
        assert str(outcome) in (message, message + derived)


def build_without_mesh(rank: int) -> None:
    build_loader(DATA, None, CONFIG, sampler=sampler())


@pytest.mark.gloo
def test_no_mesh_is_refused_where_there_are_several_ranks() -> None:
    for outcome in run_ranks_outcomes(build_without_mesh, 2):
        assert isinstance(outcome.error, ValueError)
        assert str(outcome.error) == (
            "mesh=None means one process, but torch.distributed runs 2 ranks: each would train on the same samples. Pass "
            "the device mesh, e.g. init_device_mesh('cpu', (world_size,), mesh_dim_names=('dp',))."
        )


def test_an_argument_that_is_wrong_on_one_rank_is_told_on_all() -> None:
    def build(plane: DataPlane) -> None:
        build_loader(DATA if plane.topology.rank else None, plane, CONFIG, sampler=sampler())

    first, second = SimulatedWorld(2).outcomes(build)
    assert str(first) == "dataset=None, but rank 0 reads samples; pass the dataset here"
    assert isinstance(second, RemoteRankError)
    assert str(second) == f"rank 0 could not build its loader: ValueError: {first}"


def test_a_plane_that_was_closed_with_its_loader_is_refused() -> None:
    def build_twice(plane: DataPlane) -> None:
        for _ in range(2):
            with build_loader(DATA, plane, CONFIG, sampler=sampler()) as loader:
                next(loader)

    message = (
        "this data plane has been closed, with the loader that used it: its groups are not used again. Pass the mesh, "
        "or make a plane for each loader with DataPlane.from_mesh(mesh)."
    )
    for outcome in SimulatedWorld(2).outcomes(build_twice):
        assert isinstance(outcome, RuntimeError)
        assert str(outcome) == message
    build_twice(DataPlane.single())  # nobody else has seen it close
