"""What torchdata's own nodes and `Loader` put around a cursor, and how it is taken out again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchdata.nodes import BaseNode

from evenstep.nodes.stage import upstream

__all__ = ["bare", "changes_count", "reads_ahead", "wrapped_like"]

# Nodes of torchdata that give one item for each that they take.
_ONE_FOR_ONE = ("Mapper", "ParallelMapper", "_ParallelMapperIter", "PinMemory", "Prefetcher")


def changes_count(node: object) -> bool:
    """Whether ``node`` is a stock one that may give another number of items than it takes."""
    return _is_stock(node) and type(node).__name__ not in _ONE_FOR_ONE


def reads_ahead(node: object) -> bool:
    """Whether ``node`` is a stock one whose thread takes items before anybody asks: its source hears only of those."""
    if not _is_stock(node):
        return False
    name = type(node).__name__
    # A stock Mapper is a ParallelMapper without workers.
    return name in ("PinMemory", "Prefetcher") or (
        name == "ParallelMapper" and getattr(node, "num_workers", 1) > 0
    )


def bare(state: Any) -> Any:
    """The cursor of a state that is nothing more; else the state as it is, but for what the stock Loader puts around it."""
    inner, whole = state, state
    while isinstance(inner, Mapping):
        if set(inner) == {"root", "num_yielded"}:
            whole = inner["root"]
        if (below := _transparent(inner)) is None:
            break
        inner = below
    return dict(inner if isinstance(inner, Mapping) and "consumed_samples" in inner else whole)


def wrapped_like(root: BaseNode[Any], state: dict[str, Any]) -> dict[str, Any]:
    """``state`` in the shape of the root's own: the stock nodes put something around it."""
    if "consumed_samples" not in state:
        return state  # of a node that has more to say than its cursor
    if not any(_is_stock(node) for node in upstream(root)):
        return state
    wrapped: dict[str, Any] = _replace_cursor(root.state_dict(), state)
    return wrapped


def _is_stock(node: object) -> bool:
    return type(node).__module__.startswith("torchdata.")


def _transparent(state: Mapping[str, Any]) -> Any:
    """What the stock Loader, Mapper or Prefetcher wraps; None for a node with a state of its own."""
    for key in ("source", "it_state"):
        if set(state) == {key}:
            return state[key]
    if set(state) == {"root", "num_yielded"}:
        return state["root"]
    if set(state) == {"snapshot", "steps_since_snapshot"} and not state["steps_since_snapshot"]:
        return state["snapshot"]
    return None


def _replace_cursor(shape: Any, cursor: dict[str, Any]) -> Any:
    if "consumed_samples" in shape:
        return cursor
    wrapped = {key: _replace_cursor(v, cursor) if isinstance(v, Mapping) else v for key, v in shape.items()}
    return {**wrapped, "steps_since_snapshot": 0} if "steps_since_snapshot" in wrapped else wrapped
