"""An error that came from a process of its rank is told in the words of its cause, not as the text of a traceback."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from concurrent.futures.process import _ExceptionWithTraceback
from multiprocessing.pool import ExceptionWithTraceback  # type: ignore[attr-defined]
from typing import Any

import pytest

from evenstep.comm.remote_errors import describe_error, remote_error
from evenstep.errors import SampleError


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except BaseException as caught:
        return caught


def from_a_future(error: Any) -> Any:
    return pickle.loads(pickle.dumps(_ExceptionWithTraceback(error, error.__traceback__)))


def from_a_pool(error: Any) -> Any:
    return pickle.loads(pickle.dumps(ExceptionWithTraceback(error, error.__traceback__)))


@pytest.mark.parametrize(
    "through", [from_a_future, from_a_pool, lambda error: from_a_pool(from_a_future(error))]
)
@pytest.mark.parametrize("facts", [{}, {"rank": 4, "error_type": "OSError", "error_message": "disk on fire"}])
def test_a_sample_error_of_another_process_is_told_in_the_words_of_its_cause(
    through: Callable[[Any], Any], facts: dict[str, Any]
) -> None:
    error = SampleError("sample 7: OSError: disk on fire", 7, **facts)
    here = through(raised(error, raised(OSError("disk on fire"))))
    assert type(here.__cause__).__name__.endswith("RemoteTraceback")
    told = remote_error(describe_error(here, 2))
    rank = facts.get("rank", 2)
    assert (told.rank, told.error_type, told.error_message, told.sample) == (
        rank,
        "OSError",
        "disk on fire",
        7,
    )
    assert str(told) == (
        f"rank {rank} failed at sample 7: OSError: disk on fire (every rank stops here; the traceback is on rank {rank})"
    )


def test_a_sample_error_without_a_cause_is_told_as_it_is() -> None:
    here = from_a_future(raised(SampleError("sample 7 has no tokens", 7)))
    told = remote_error(describe_error(here, 2))
    assert (told.error_type, told.error_message, told.sample) == ("SampleError", "sample 7 has no tokens", 7)
