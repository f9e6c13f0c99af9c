"""What a user's ``metadata_fn`` says of a sample is checked where it is said."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from evenstep import LoaderConfig, SampleMetadata
from evenstep.nodes.describe import EMPTY, Describer

SAMPLE = {"input_ids": torch.arange(6)}


@pytest.mark.parametrize("told", [6, np.int32(6), SampleMetadata(6), SampleMetadata(6, documents=[4, 2])])
def test_a_number_and_a_record_say_the_same(told: Any) -> None:
    assert Describer(LoaderConfig(seq_len=8), lambda _: told, None).tokens(SAMPLE) == 6


@pytest.mark.parametrize(
    ("told", "error", "message"),
    [
        (
            "6",
            TypeError,
            "metadata_fn returned '6' (str), expected the number of tokens (int) or a SampleMetadata",
        ),
        (
            True,
            TypeError,
            "metadata_fn returned True (bool), expected the number of tokens (int) or a SampleMetadata",
        ),
        (SampleMetadata(-1), TypeError, "metadata_fn returned tokens=-1 (int), expected an int >= 0"),
        (SampleMetadata(1.5), TypeError, "metadata_fn returned tokens=1.5 (float), expected an int >= 0"),  # type: ignore[arg-type]
        (SampleMetadata(True), TypeError, "metadata_fn returned tokens=True (bool), expected an int >= 0"),
        (
            SampleMetadata(6, documents=[4, -1, 3]),
            ValueError,
            "metadata_fn returned documents=[4, -1, 3], expected lengths that are not negative",
        ),
        (
            SampleMetadata(6, documents=[4, 1]),
            ValueError,
            "metadata_fn returned documents of 5 tokens in a sample of 6 tokens",
        ),
    ],
)
def test_what_it_may_not_say(told: Any, error: type[Exception], message: str) -> None:
    describer = Describer(LoaderConfig(seq_len=8), lambda _: told, None)
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        describer.tokens(SAMPLE)


def test_a_sample_without_tokens_may_be_an_error() -> None:
    assert Describer(LoaderConfig(seq_len=8), lambda _: 0, None).tokens(SAMPLE) == 0
    with pytest.raises(ValueError, match=f"^{re.escape(EMPTY)}$"):
        Describer(LoaderConfig(seq_len=8, empty="error"), lambda _: 0, None).tokens(SAMPLE)
