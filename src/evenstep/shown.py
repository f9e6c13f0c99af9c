"""Wrong values in error messages: a whole dataset there would bury what was expected."""

from __future__ import annotations

import reprlib
from types import FunctionType
from typing import Any

__all__ = ["shown"]

_LONGEST = 80  # characters

_short = reprlib.Repr()
_short.maxlevel = 3
_short.maxdict = _short.maxlist = _short.maxtuple = _short.maxset = 3
_short.maxstring = _short.maxother = _LONGEST


def shown(value: Any) -> str:
    """``repr(value)`` on one line of at most 80 characters; functions and classes by name, without an address."""
    if isinstance(value, (FunctionType, type)):
        kind = "class" if isinstance(value, type) else "function"
        return f"the {kind} {value.__qualname__}"
    text = " ".join(_short.repr(value).split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
