"""Errors cross processes and are copied without losing what they tell."""

from __future__ import annotations

import copy
import pickle

import pytest

from evenstep import ConfigMismatch, Infeasible, RemoteRankError, SampleError, StateMismatch, WireFormatError

ERRORS: list[Exception] = [
    RemoteRankError("rank 3 failed", rank=3, error_type="OSError", error_message="no disk", sample=7),
    SampleError("sample 7: no disk", 7, rank=3, error_type="OSError", error_message="no disk"),
    ConfigMismatch("seed differs"),
    Infeasible("too long"),
    StateMismatch("another seed"),
    WireFormatError("bad magic"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_survives_pickling_and_copying(error: Exception) -> None:
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(twin) is type(error)
        assert str(twin) == str(error)
        assert vars(twin) == vars(error)


def test_a_cause_that_is_left_behind_is_still_named() -> None:
    error = SampleError("sample 7: OSError: no disk", 7)
    error.__cause__ = OSError("no disk")
    twin = pickle.loads(pickle.dumps(error))
    assert (twin.error_type, twin.error_message, twin.__cause__) == ("OSError", "no disk", None)
    assert error.error_type == ""
    error.__cause__ = TimeoutError()
    told = SampleError("sample 7: no disk", 7, rank=3, error_type="OSError", error_message="no disk")
    told.__cause__ = error
    assert vars(pickle.loads(pickle.dumps(told))) == vars(told)
