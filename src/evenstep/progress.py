"""A progress bar where there is a terminal to show it, and nothing elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from typing import Any

__all__ = ["Progress", "no_progress", "terminal_progress"]

Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""``with progress("reading", total) as advance: advance(amount)``."""


@contextmanager
def no_progress(description: str, total: int, done: int = 0) -> Iterator[Callable[[int], None]]:  # noqa: ARG001 - the signature of a progress bar
    """Shows nothing."""
    yield lambda _: None


@contextmanager
def terminal_progress(description: str, total: int, done: int = 0) -> Iterator[Callable[[int], None]]:
    """A tqdm bar on stderr that begins at ``done``, if that is a terminal and tqdm is installed."""
    try:
        tqdm: Any = import_module("tqdm").tqdm
    except ImportError:
        with no_progress(description, total) as advance:
            yield advance
        return
    with tqdm(
        desc=description,
        total=total,
        initial=done,
        unit_scale=True,
        leave=False,
        disable=not sys.stderr.isatty(),
    ) as bar:
        yield lambda amount: bar.update(amount) and None
