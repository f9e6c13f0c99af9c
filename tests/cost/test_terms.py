"""Sums over documents agree with the plain loops they replace."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from evenstep.cost.terms import document_pairs, per_sample
from evenstep.samples import MetadataTable, SampleMetadata


@given(length=st.integers(0, 40), causal=st.booleans(), window=st.one_of(st.none(), st.integers(1, 45)))
def test_pairs_are_those_the_mask_lets_through(length: int, causal: bool, window: int | None) -> None:
    reach = length if window is None else window
    allowed = sum(
        abs(query - key) < reach and (key <= query or not causal)
        for query in range(length)
        for key in range(length)
    )
    assert document_pairs(np.array([length]), causal=causal, window=window).tolist() == [allowed]


@given(st.lists(st.lists(st.integers(0, 100), max_size=4), max_size=8))
def test_documents_are_summed_into_their_sample(samples: list[list[int]]) -> None:
    table = MetadataTable.from_samples([SampleMetadata(sum(docs), documents=docs) for docs in samples])
    sums = per_sample(table, table.documents.astype(np.float64))
    assert sums.dtype == np.float64
    assert sums.tolist() == [sum(docs) for docs in samples]
