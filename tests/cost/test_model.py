"""Cost models: their values, their contract, and what they say about bad input."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.cost import (
    DEFAULT_COST,
    CostModel,
    FeatureCost,
    LinearQuadraticCost,
    MarginalCost,
    StageCost,
    TransformerCost,
    checked_costs,
    describe_cost,
    padding_cost,
)
from evenstep.samples import MetadataTable, SampleMetadata

BRANCHING = TransformerCost(64, 2, 96, 100, window=5, padded=True)
MODELS: list[CostModel] = [
    DEFAULT_COST,
    LinearQuadraticCost(3, 0.5, padding=2),
    FeatureCost("patches"),
    FeatureCost("patches", BRANCHING, group=7),
    BRANCHING,
    MarginalCost(BRANCHING),
    StageCost({"llm": DEFAULT_COST, "encoder": FeatureCost("patches", group=4)}),
    MarginalCost(StageCost({"llm": LinearQuadraticCost(2, 1, padding=2), "encoder": FeatureCost("patches")})),
]

documents = st.lists(st.integers(0, 5000), min_size=1, max_size=4)
samples = st.builds(
    lambda docs, patches: SampleMetadata(
        sum(docs), {} if patches is None else {"patches": patches}, documents=docs
    ),
    documents,
    st.one_of(st.none(), st.integers(0, 2000)),
)


@dataclass(frozen=True)
class Broken:
    """Returns whatever it was told to, against the contract."""

    result: Any

    @property
    def stages(self) -> tuple[str, ...]:
        return ("llm",)

    def cost(self, table: MetadataTable) -> npt.NDArray[np.float64]:
        del table
        return np.array(self.result, dtype=np.float64)


@pytest.mark.parametrize("model", MODELS, ids=describe_cost)
@given(records=st.lists(samples, max_size=6), data=st.data())
def test_a_cost_is_a_pure_function_of_each_sample(
    model: CostModel, records: list[SampleMetadata], data: st.DataObject
) -> None:
    table = MetadataTable.from_samples(records)
    costs = checked_costs(model, table)
    assert costs.dtype == np.float64
    assert costs.shape == ((len(records),) if len(model.stages) == 1 else (len(records), len(model.stages)))
    order = data.draw(st.permutations(range(len(records))))
    index = np.array(order, dtype=np.int64)
    np.testing.assert_allclose(checked_costs(model, table.take(index)), costs[index], rtol=1e-12)


@pytest.mark.parametrize("model", MODELS, ids=describe_cost)
@given(record=samples, more=st.integers(1, 1000))
def test_a_longer_document_never_costs_less(model: CostModel, record: SampleMetadata, more: int) -> None:
    longer = SampleMetadata(
        record.tokens + more,
        record.features,
        documents=[*(record.documents or ())[:-1], record.tokens + more],
    )
    short, long = checked_costs(model, MetadataTable.from_samples([record, longer]))
    assert (np.asarray(short) <= np.asarray(long)).all()


@pytest.mark.parametrize("model", MODELS, ids=describe_cost)
def test_repr_names_everything(model: CostModel) -> None:
    assert eval(describe_cost(model)) == model


@given(st.lists(documents, max_size=6), st.floats(0, 1e6), st.floats(0, 10))
def test_linear_quadratic_is_its_formula(parts: list[list[int]], a: float, b: float) -> None:
    table = MetadataTable.from_samples([SampleMetadata(sum(docs), documents=docs) for docs in parts])
    expected = [a * sum(docs) + b * sum(d * d for d in docs) for docs in parts]
    np.testing.assert_allclose(LinearQuadraticCost(a, b).cost(table), expected, rtol=1e-12)


def test_the_default_is_a_dense_transformer_of_width_4096() -> None:
    assert LinearQuadraticCost(a=6 * 4096, b=1.0) == DEFAULT_COST
    dense = TransformerCost(4096, 1, 4 * 4096, 0, gated=False, causal=False, attention="eager")
    assert dense.per_token / dense.per_pair == DEFAULT_COST.a / DEFAULT_COST.b


@given(st.integers(0, 500), st.integers(1, 60))
def test_feature_groups_are_documents_of_their_own(patches: int, group: int) -> None:
    model = FeatureCost("patches", LinearQuadraticCost(3.0, 2.0), group=group)
    groups = [group] * (patches // group) + [patches % group]
    table = MetadataTable.from_samples([SampleMetadata(9), SampleMetadata(9, {"patches": patches})])
    assert model.cost(table).tolist() == [0.0, 3.0 * patches + 2.0 * sum(g * g for g in groups)]


def test_a_window_of_text_costs_the_encoder_nothing() -> None:
    model = StageCost({"llm": LinearQuadraticCost(1, 0), "encoder": FeatureCost("patches")})
    assert model.stages == ("llm", "encoder")
    assert model.cost(MetadataTable.from_tokens([5, 0])).tolist() == [[5, 0], [0, 0]]


def test_one_stage_is_a_vector() -> None:
    assert StageCost({"llm": LinearQuadraticCost(1, 0)}).cost(MetadataTable.from_tokens([5])).tolist() == [5]


def test_stages_do_not_follow_a_changed_mapping() -> None:
    given_models: dict[str, CostModel] = {"llm": DEFAULT_COST}
    model = StageCost(given_models)
    given_models["encoder"] = FeatureCost("patches")
    assert model.stages == ("llm",)


@given(st.lists(st.integers(0, 300), max_size=6), st.integers(1800, 4000))
def test_marginal_costs_and_a_row_of_padding_make_the_row(lengths: list[int], seq_len: int) -> None:
    model = LinearQuadraticCost(5.0, 2.0, padding=4.0)
    table = MetadataTable.from_tokens(lengths)
    row = model.cost(table).sum() + 4.0 * (seq_len - sum(lengths))
    marginal = MarginalCost(model).cost(table).sum() + 4.0 * seq_len
    assert marginal == pytest.approx(row, rel=1e-12)


def test_padding_costs() -> None:
    stages = StageCost({"llm": LinearQuadraticCost(2, 1, padding=1.5), "encoder": FeatureCost("patches")})
    assert padding_cost(stages).tolist() == [1.5, 0.0]
    assert padding_cost(Broken(0)).tolist() == [0.0]
    assert padding_cost(BRANCHING).tolist() == [BRANCHING.per_token]
    assert padding_cost(TransformerCost(64, 2, 96, 100)).tolist() == [0.0]


def test_describe_cost_is_the_same_in_every_process() -> None:
    class Plain:
        stages = ("llm",)

        def cost(self, table: MetadataTable) -> npt.NDArray[np.float64]:
            return table.tokens.astype(np.float64)

    assert describe_cost(Plain()) == describe_cost(Plain())


def test_a_model_of_cost_alone_has_the_stages_that_it_returns() -> None:
    class Bare:
        def __init__(self, columns: int) -> None:
            self.columns = columns

        def cost(self, table: MetadataTable) -> npt.NDArray[np.float64]:
            column = table.tokens.astype(np.float64)
            return column if self.columns == 1 else np.column_stack([column] * self.columns)

    table = MetadataTable.from_tokens([3, 5])
    one: Any = Bare(1)
    assert checked_costs(one, table).tolist() == [3.0, 5.0]
    two: Any = Bare(2)
    assert checked_costs(two, table).tolist() == [[3.0, 3.0], [5.0, 5.0]]
    assert padding_cost(one).tolist() == [0.0]
    assert StageCost({"llm": one, "encoder": one}).cost(table).shape == (2, 2)


BAD: list[tuple[Callable[[], object], type[Exception], str]] = [
    (
        lambda: LinearQuadraticCost(-1.0),
        ValueError,
        "a is -1.0: samples would get a cost that cannot be balanced; "
        "give a finite number that is not negative",
    ),
    (lambda: LinearQuadraticCost(1, b=True), TypeError, "b is True (bool), expected a number"),
    (
        lambda: LinearQuadraticCost(1, 1, padding=float("nan")),
        ValueError,
        "padding is nan: samples would get a cost that cannot be balanced; "
        "give a finite number that is not negative",
    ),
    (lambda: FeatureCost(3), TypeError, "feature is 3, expected the name of a feature column"),  # type: ignore[arg-type]
    (
        lambda: FeatureCost(""),
        ValueError,
        "feature is '': no column has that name; give the name that metadata_fn uses",
    ),
    (lambda: FeatureCost("p", group=0), ValueError, "group is 0, expected an integer of at least 1"),
    (
        lambda: FeatureCost("p", "flops"),  # type: ignore[arg-type]
        TypeError,
        "model is 'flops', expected a cost model: an object with cost(table), such as LinearQuadraticCost()",
    ),
    (
        lambda: StageCost([("llm", DEFAULT_COST)]),  # type: ignore[arg-type]
        TypeError,
        "models is [('llm', LinearQuadraticCost(a=24576.0, b=1.0, padding=0.0))], expected a mapping of stage "
        'names to cost models, such as {"llm": LinearQuadraticCost()}',
    ),
    (
        lambda: StageCost({}),
        ValueError,
        "models is empty: nothing would be balanced; give at least one stage",
    ),
    (lambda: StageCost({"": DEFAULT_COST}), TypeError, "stage name '' is not a non-empty string"),
    (
        lambda: StageCost({"llm": LinearQuadraticCost}),  # type: ignore[dict-item]
        TypeError,
        "the model of stage 'llm' is <class 'evenstep.cost.model.LinearQuadraticCost'>, expected a cost model: "
        "an object with cost(table), such as LinearQuadraticCost()",
    ),
    (
        lambda: StageCost({"all": StageCost({"a": DEFAULT_COST, "b": DEFAULT_COST})}),
        ValueError,
        "the model of stage 'all' has the stages ('a', 'b'): stages cannot be nested; "
        "give each of them a name of its own",
    ),
    (
        lambda: MarginalCost(LinearQuadraticCost(2, 1)),
        ValueError,
        "padding costs nothing under LinearQuadraticCost(a=2.0, b=1.0, padding=0.0), so the marginal cost of a "
        "sample is its cost; use the model itself, or tell it what a padding token costs",
    ),
    (
        lambda: FeatureCost("p").cost(MetadataTable.from_samples([SampleMetadata(1, {"p": -2.0})])),
        ValueError,
        "feature 'p' of sample 0 of the table is -2.0: it has no cost; "
        "metadata_fn must return finite numbers that are not negative",
    ),
    (
        lambda: checked_costs(Broken(np.ones((2, 2))), MetadataTable.from_tokens([1, 2])),
        ValueError,
        "Broken(result=array([[1., 1.],\n       [1., 1.]])) returned costs of shape (2, 2), 2 for each sample, but its "
        "stages are ('llm',): return one column for each of its 1 stages",
    ),
    (
        lambda: checked_costs(Broken([1.0]), MetadataTable.from_tokens([1, 2])),
        ValueError,
        "Broken(result=[1.0]) returned costs of shape (1,) for 2 samples, expected [2] or [2, stages]: "
        "one cost (or one per stage) for every sample",
    ),
    (
        lambda: checked_costs(Broken([1.0, float("inf")]), MetadataTable.from_tokens([1, 2])),
        ValueError,
        "Broken(result=[1.0, inf]) gives sample 1 of the table (2 tokens) the cost inf: "
        "it cannot be balanced; costs are finite and not negative",
    ),
    (
        lambda: checked_costs(Broken([[1.0, 1.0], [0.0, -1.0]]), MetadataTable.from_tokens([1, 2])),
        ValueError,
        "Broken(result=[[1.0, 1.0], [0.0, -1.0]]) gives sample 1 of the table (2 tokens) the cost [0.0, -1.0]: "
        "it cannot be balanced; costs are finite and not negative",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), BAD, ids=[message[:32] for _, _, message in BAD])
def test_bad_input_names_value_and_remedy(
    call: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        call()
