"""Every field of a configuration is checked where it is written, whatever the mesh."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import numpy as np
import pytest

from evenstep import LoaderConfig


@pytest.mark.parametrize(
    ("field", "value", "error", "message"),
    [
        ("seq_len", 0, ValueError, "seq_len=0, expected at least 1"),
        ("micro_batch_size", True, TypeError, "micro_batch_size=True (bool), expected an integer"),
        ("host_prefetch", -1, ValueError, "host_prefetch=-1, expected at least 0"),
        ("oversized", "cut", ValueError, "oversized='cut', expected one of ['error', 'single', 'truncate']"),
        ("backend", 3, ValueError, "backend=3, expected one of ['gloo', 'nccl', 'hccl']"),
        (
            "payload_backend",
            "mpi",
            ValueError,
            "payload_backend='mpi', expected one of ['gloo', 'nccl', 'hccl']",
        ),
        (
            "reader_ranks",
            "some",
            TypeError,
            "reader_ranks='some', expected None, 'all' or a tuple of global ranks",
        ),
        (
            "reader_ranks",
            (0, True),
            TypeError,
            "reader_ranks=(0, True), expected None, 'all' or a tuple of global ranks",
        ),
        ("planner_rank", "0", TypeError, "planner_rank='0' (str), expected a global rank or None"),
        ("balance_group_size", 0, ValueError, "balance_group_size=0, expected at least 1"),
        ("cpu_fields", "labels", TypeError, "cpu_fields='labels', expected a tuple of names"),
        ("dp_dims", "dp", TypeError, "dp_dims='dp', expected a tuple of names"),
        ("pin_memory", "no", TypeError, "pin_memory='no', expected True or False"),
        ("broadcast_plan", 1, TypeError, "broadcast_plan=1, expected True or False"),
        ("min_balance_gain", 1.5, ValueError, "min_balance_gain=1.5, expected a fraction in [0, 1]"),
        ("timeout", 5, ValueError, "timeout=5, expected a positive datetime.timedelta"),
        ("objective", "step", TypeError, "objective='step', expected an evenstep.Objective"),
        ("payload_backend", "", ValueError, "payload_backend='', expected one of ['gloo', 'nccl', 'hccl']"),
        ("cpu_fields", None, TypeError, "cpu_fields=None, expected a tuple of names"),
        (
            "reader_ranks",
            np.array([0, 1]),
            TypeError,
            "reader_ranks=array([0, 1]), expected None, 'all' or a tuple of global ranks",
        ),
        (
            "budgets",
            ["p"],
            TypeError,
            "budgets is ['p']: expected a limit for each feature, such as {'patches': 16384}, or None",
        ),
        (
            "budgets",
            "ab",
            TypeError,
            "budgets is 'ab': expected a limit for each feature, such as {'patches': 16384}, or None",
        ),
        (
            "budgets",
            {1: 5},
            TypeError,
            "budgets has the key 1: expected names of features, such as 'patches'",
        ),
        ("budgets", {"p": True}, TypeError, "budgets['p'] is True (bool), expected a number"),
    ],
)
def test_a_field_that_does_not_fit_is_named(
    field: str, value: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        LoaderConfig(**{"seq_len": 8, field: value})


def test_a_window_of_its_own_is_refused_where_only_the_plan_tells_how_many_there_are() -> None:
    message = (
        "balance_window=2 with accumulation_steps='auto': the number of micro-batches is only known once the whole step is "
        "planned. Leave balance_window at None."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        LoaderConfig(seq_len=8, accumulation_steps="auto", balance_window=2)


def test_every_default_is_valid_and_comparable() -> None:
    one, two = LoaderConfig(seq_len=8), LoaderConfig(seq_len=8)
    assert one == two
    assert one.to_dict() == two.to_dict()
    assert one.constraints().seq_len == 8


def test_budgets_are_copied_and_compared_by_what_they_say() -> None:
    budgets: dict[str, Any] = {"patches": 4, "seconds": np.float32(2)}
    one = LoaderConfig(seq_len=8, budgets=budgets)
    budgets["patches"] = 9
    two = LoaderConfig(seq_len=8, budgets={"seconds": 2.0, "patches": 4.0})
    assert one == two
    assert one.to_dict() == two.to_dict()
    assert copy.deepcopy(one) == pickle.loads(pickle.dumps(one)) == one


def test_numbers_of_numpy_and_sets_become_plain_values_that_ranks_can_compare() -> None:
    odd: dict[str, Any] = {
        "seq_len": np.int64(8),
        "micro_batch_size": np.int32(2),
        "accumulation_steps": np.uint16(4),
        "max_segments": np.int64(3),
        "min_balance_gain": np.float32(0.5),
        "planner_rank": np.int64(0),
        "reader_ranks": {np.int64(2), 0},
        "dp_dims": ["dp"],
        "cpu_fields": {"labels", "cu_seqlens", "names"},
    }
    plain = LoaderConfig(
        seq_len=8,
        micro_batch_size=2,
        accumulation_steps=4,
        max_segments=3,
        min_balance_gain=0.5,
        planner_rank=0,
        reader_ranks=(0, 2),
        dp_dims=("dp",),
        cpu_fields=("cu_seqlens", "labels", "names"),
    )
    assert LoaderConfig(**odd).to_dict() == plain.to_dict()
    assert repr(LoaderConfig(**odd).constraints()) == repr(plain.constraints())
