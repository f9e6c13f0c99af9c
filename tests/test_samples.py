"""Columns say what the records said, in any order of rows; what a batch tells is plain."""

from __future__ import annotations

import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from evenstep import BatchInfo, MetadataTable, SampleMetadata
from evenstep.testing import assert_same

records = st.lists(
    st.lists(st.integers(0, 9), max_size=3).flatmap(
        lambda documents: st.builds(
            SampleMetadata,
            st.just(sum(documents)),
            st.dictionaries(st.sampled_from(["patches", "frames"]), st.floats(0, 99)),
            st.none() | st.integers(0, sum(documents)),
            st.none() | st.just(documents),
        )
    ),
    max_size=6,
)


def rows_of(table: MetadataTable) -> list[SampleMetadata]:
    """The records that a table was made of, with a 0 for each feature that one does not have."""
    return [
        SampleMetadata(
            int(table.tokens[k]),
            {name: float(column[k]) for name, column in table.features.items()},
            None if table.loss_tokens[k] < 0 else int(table.loss_tokens[k]),
            table.documents[table.document_offsets[k] : table.document_offsets[k + 1]].tolist(),
        )
        for k in range(len(table))
    ]


@given(records)
def test_columns_say_what_the_records_said(samples: list[SampleMetadata]) -> None:
    table = MetadataTable.from_samples(samples)
    names = sorted({name for sample in samples for name in sample.features})
    assert rows_of(table) == [
        SampleMetadata(
            sample.tokens,
            {name: sample.features.get(name, 0.0) for name in names},
            sample.loss_tokens,
            [sample.tokens] if sample.documents is None else list(sample.documents),
        )
        for sample in samples
    ]
    assert [column.dtype for column in (table.tokens, table.loss_tokens, table.documents)] == [np.int64] * 3
    assert {column.dtype for column in table.features.values()} <= {np.dtype(np.float64)}


@given(records, st.data())
def test_rows_are_taken_in_any_order_and_more_than_once(
    samples: list[SampleMetadata], data: st.DataObject
) -> None:
    table = MetadataTable.from_samples(samples)
    index = data.draw(st.lists(st.integers(0, len(samples) - 1), max_size=8)) if samples else []
    rows = rows_of(table)
    assert rows_of(table.take(np.array(index, dtype=np.int64))) == [rows[k] for k in index]


@given(st.lists(st.integers(0, 99), max_size=6))
def test_bare_lengths_are_records_of_which_nothing_else_is_known(tokens: list[int]) -> None:
    assert_same(
        MetadataTable.from_tokens(tokens), MetadataTable.from_samples([SampleMetadata(n) for n in tokens])
    )


def test_what_a_batch_tells_is_plain_and_stays_on_the_host() -> None:
    info = BatchInfo(3, 1, 4, False, 5, 60, 4, None, 200)
    assert BatchInfo(**json.loads(json.dumps(info.to_dict()))) == info
    assert info.to("cuda", non_blocking=True) is info
