"""Whether two values are the same, bit for bit: what batches and states are compared by."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from evenstep.comm.batch_layout import bytes_of

__all__ = ["assert_same"]


def assert_same(actual: Any, expected: Any, path: str = "value") -> None:
    """Compare nested values: types, dtypes, shapes, bytes.

    Args:
        actual: What came out.
        expected: What should have.
        path: How to name the value in a message.

    Raises:
        AssertionError: They differ; the message names the place.
    """
    if type(actual) is not type(expected):
        raise AssertionError(f"{path} is {_brief(actual)}, expected {_brief(expected)}")
    if isinstance(expected, torch.Tensor):
        _same_arrays(actual, expected, path, actual.dtype == expected.dtype and _equal(actual, expected))
    elif isinstance(expected, np.ndarray):
        same = actual.dtype == expected.dtype and np.array_equal(
            actual, expected, equal_nan=_is_float(expected)
        )
        _same_arrays(actual, expected, path, same)
    elif dataclasses.is_dataclass(expected) and not isinstance(expected, type):
        for field in dataclasses.fields(expected):
            assert_same(getattr(actual, field.name), getattr(expected, field.name), f"{path}.{field.name}")
    elif isinstance(expected, Mapping):
        if list(actual) != list(expected):
            raise AssertionError(f"{path} has the keys {list(actual)}, expected {list(expected)}")
        for key in expected:
            assert_same(actual[key], expected[key], f"{path}[{key!r}]")
    elif isinstance(expected, Sequence) and not isinstance(expected, (str, bytes, bytearray)):
        if len(actual) != len(expected):
            raise AssertionError(f"{path} has {len(actual)} entries, expected {len(expected)}")
        for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
            assert_same(a, b, f"{path}[{i}]")
    elif actual != expected and not (actual != actual and expected != expected):  # NaN is itself
        raise AssertionError(f"{path} is {_brief(actual)}, expected {_brief(expected)}")


def _equal(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    if actual.shape != expected.shape:
        return False
    return torch.equal(bytes_of(actual.detach().cpu()), bytes_of(expected.detach().cpu()))


def _is_float(array: Any) -> bool:
    return bool(array.dtype.kind in "fc")


def _same_arrays(actual: Any, expected: Any, path: str, same: bool) -> None:
    if not same:
        raise AssertionError(f"{path} is {_brief(actual)}, expected {_brief(expected)}")


def _brief(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 200 else text[:200] + ' ...'}"
