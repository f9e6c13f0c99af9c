"""The threads of torchdata's nodes that read ahead: how they are known, and how they end."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

__all__ = ["end_threads", "is_stock_thread"]


def is_stock_thread(thread: threading.Thread) -> bool:
    """Whether ``thread`` reads ahead for a node of torchdata."""
    run = getattr(thread, "_target", None)  # gone when it has ended
    return str(getattr(run, "__module__", "")).startswith("torchdata.")


def end_threads(node: Any) -> None:
    """End the threads of a stock ``node``, which else read until it is collected; they must not be inside its source."""
    inner = getattr(node, "_it", None)
    for _ in range(
        3
    ):  # a ParallelMapper has an iterator inside a node, or inside two where it works on batches
        shutdown = getattr(inner, "_shutdown", None)
        if shutdown is not None:
            with suppress(Exception):  # without it they end later
                shutdown()
            return
        inner = getattr(inner, "_it", getattr(inner, "source", None))
