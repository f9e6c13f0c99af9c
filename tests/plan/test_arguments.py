"""What plan_window refuses: arguments and windows, named with their consequence."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from evenstep.errors import Infeasible
from evenstep.plan import PackingConstraints, Plan


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"dp_size": 0}, ValueError, "dp_size is 0, expected a positive integer"),
        ({"rows": 1.0}, TypeError, "rows is 1.0 (float), expected a positive integer"),
        ({"micro_batches": True}, TypeError, "micro_batches is True (bool), expected a positive integer"),
        (
            {"algorithm": "best"},
            ValueError,
            "algorithm='best' is unknown; use one of 'auto', 'lpt', 'levels', 'refine'",
        ),
        (
            {"min_gain": -0.1},
            ValueError,
            "min_gain is -0.1, expected a share of the original score >= 0, like 0.02",
        ),
        ({"min_gain": "1"}, TypeError, "min_gain is '1' (str), expected a number"),
        (
            {"reference": [0, 1, 4]},
            ValueError,
            "reference[2] is row 4, but the window has only micro_batches * dp_size * rows = 2 * 2 * 1 rows; pass flat "
            "rows (micro_batch * dp_size + dp_rank) * rows + row",
        ),
        (
            {"reference": [0, 1]},
            ValueError,
            "reference has 2 entries for 3 samples; they must be as many",
        ),
        (
            {"holders": [0, 2, 1]},
            ValueError,
            "holders[1] is 2, but there are only 2 data-parallel ranks; pass dp ranks in [0, 2)",
        ),
        (
            {"costs": [1.0, float("inf"), 1.0]},
            ValueError,
            "costs[1] is inf, expected a finite number >= 0",
        ),
        (
            {"costs": [[1.0, 2.0], [1.0, -2.0], [0.0, 0.0]]},
            ValueError,
            "costs[1, 1] is -2.0, expected a finite number >= 0",
        ),
        (
            {"costs": ["a", "b", "c"]},
            TypeError,
            "costs is <U1 of shape (3,), expected numbers of shape [n] or [n, stages]",
        ),
        (
            {"costs": np.zeros((3, 0))},
            ValueError,
            "costs has no stages (shape (3, 0)), expected at least one",
        ),
        (
            {"tokens": [1, -2, 3]},
            ValueError,
            "tokens[1] is -2, expected an integer >= 0",
        ),
        (
            {"constraints": None},
            TypeError,
            "constraints is None, expected evenstep.PackingConstraints(seq_len, ...)",
        ),
        (
            {"objective": "step"},
            TypeError,
            "objective is 'step', expected an evenstep.Objective, or None for the default",
        ),
        (
            {"tokens": [1.5, 2.0, 3.0]},
            TypeError,
            "tokens is float64 of shape (3,), expected integers of shape [n]",
        ),
    ],
)
def test_a_bad_argument_is_named(
    changes: dict[str, Any], error: type[Exception], message: str, make_plan: Callable[..., Plan]
) -> None:
    arguments = {"tokens": [1, 2, 3], "costs": [1.0, 2.0, 3.0]} | changes
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        make_plan(**arguments)


def test_too_many_tokens_name_the_constraint(make_plan: Callable[..., Plan]) -> None:
    message = (
        "5 samples need 4,500 tokens and the 4 rows of this window hold 4,000: no packing exists. Plan fewer samples "
        "(global_batch_size), or more micro-batches (accumulation_steps; 'auto' takes as many as are needed) or rows "
        "(micro_batch_size), or longer rows (seq_len)"
    )
    with pytest.raises(Infeasible, match=f"^{re.escape(message)}$"):
        make_plan([900] * 5, constraints=PackingConstraints(1000))


def test_no_packing_names_the_sample_and_the_constraint(make_plan: Callable[..., Plan]) -> None:
    message = (
        "no packing was found for 5 samples in 4 rows: they fill seq_len to 65.0%, and sample 1 alone takes 56 of 100 "
        "(levels: 1 samples found no row with room; lpt: 1 samples found no row with room). Plan more micro-batches or "
        "rows, or raise the limit"
    )
    with pytest.raises(Infeasible, match=f"^{re.escape(message)}$"):
        make_plan([51, 56, 51, 51, 51])


def test_what_does_not_fit_a_budget_is_told_in_its_own_unit(make_plan: Callable[..., Plan]) -> None:
    limits = PackingConstraints(100, budgets={"share": 1.0})
    message = (
        "5 samples need 5 of share and the 4 rows of this window hold 4: no packing exists. Plan fewer samples "
        "(global_batch_size), or more micro-batches (accumulation_steps; 'auto' takes as many as are needed) or rows "
        "(micro_batch_size), or raise the limit of share"
    )
    with pytest.raises(Infeasible, match=f"^{re.escape(message)}$"):
        make_plan([1] * 5, constraints=limits, features={"share": [1.0] * 5})
    message = "they fill share to 75.0%, and sample 0 alone takes 0.6 of 1 ("
    with pytest.raises(Infeasible, match=re.escape(message)):
        make_plan([1] * 5, constraints=limits, features={"share": [0.6] * 5})


@pytest.mark.parametrize("algorithm", ["auto", "lpt", "levels", "refine"])
def test_no_packing_under_several_limits_is_an_error(make_plan: Callable[..., Plan], algorithm: str) -> None:
    limits = PackingConstraints(100, max_segments=3)
    with pytest.raises(
        Infeasible, match=r"^no packing was found for 5 samples in 4 rows: they fill seq_len to 65.0%"
    ):
        make_plan([51, 56, 51, 51, 51], constraints=limits, algorithm=algorithm, holders=[0, 1, 0, 1, 0])
