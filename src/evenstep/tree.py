"""Walk nested batches and rebuild them with the types they came with."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

__all__ = ["flatten", "map_leaves", "unflatten"]

Opaque = Callable[[Any], bool]


def map_leaves(fn: Callable[[str, Any], Any], tree: Any, *, opaque: Opaque | None = None) -> Any:
    """``tree`` with ``fn(path, leaf)`` in place of every leaf.

    Containers are mappings (dict and its subclasses, UserDict, ...), lists, tuples, NamedTuples and dataclass
    instances (frozen and slotted ones too); all else is a leaf. A rebuilt container has the type, and where
    it can be copied the other attributes, of the original, and no constructor of a dataclass runs again. A
    container in which no leaf changed is returned itself, not a copy.

    Args:
        fn: Called once per leaf, in the order of the containers, with the keys, positions and field names
            that lead to it, joined by dots (empty for a bare leaf).
        tree: A batch.
        opaque: Tells which containers to treat as leaves; never asked about plain dicts, lists and tuples.
    """
    return _map(fn, tree, "", opaque)


def flatten(tree: Any, *, opaque: Opaque | None = None) -> list[tuple[str, Any]]:
    """The ``(path, leaf)`` pairs of ``tree`` in the order of `map_leaves`."""
    found: list[tuple[str, Any]] = []

    def collect(path: str, leaf: Any) -> Any:
        found.append((path, leaf))
        return leaf

    _map(collect, tree, "", opaque)
    return found


def unflatten(tree: Any, leaves: Iterable[Any], *, opaque: Opaque | None = None) -> Any:
    """``tree`` with its leaves replaced by ``leaves``, in the order of `flatten`.

    Raises:
        ValueError: There are not as many leaves as ``tree`` has.
    """
    given = list(leaves)
    rest = iter(given)
    missing = 0

    def take(_path: str, _leaf: Any) -> Any:
        nonlocal missing
        for leaf in rest:
            return leaf
        missing += 1
        return None

    result = _map(take, tree, "", opaque)
    surplus = sum(1 for _ in rest)
    if missing or surplus:
        raise ValueError(
            f"the tree has {len(given) + missing - surplus} leaves, got {len(given)}: no leaf would know its "
            "place; pass as many leaves as flatten(tree) returns"
        )
    return result


def _map(fn: Callable[[str, Any], Any], value: Any, path: str, opaque: Opaque | None) -> Any:
    kind = type(value)
    plain = kind is dict or kind is list or kind is tuple
    if not plain and (not _is_container(value) or (opaque is not None and opaque(value))):
        return fn(path, value)
    old = list(_children(value))
    new = [_map(fn, child, f"{path}.{name}" if path else str(name), opaque) for name, child in old]
    if all(a is b for (_, a), b in zip(old, new, strict=True)):
        return value
    return _rebuild(value, [name for name, _ in old], new)


def _is_container(value: Any) -> bool:
    return isinstance(value, (Mapping, list, tuple)) or (
        dataclasses.is_dataclass(value) and not isinstance(value, type)
    )


def _children(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return iter(value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return zip(value._fields, value, strict=True)
    if isinstance(value, (list, tuple)):
        return iter(enumerate(value))
    # A field without a default may be unset where __init__ did not run to its end or init=False.
    names = (field.name for field in dataclasses.fields(value))
    return ((name, getattr(value, name)) for name in names if hasattr(value, name))


def _rebuild(value: Any, names: list[Any], children: list[Any]) -> Any:
    kind = type(value)
    if kind is dict:
        return dict(zip(names, children, strict=True))
    if isinstance(value, Mapping):
        return _rebuild_mapping(value, dict(zip(names, children, strict=True)))
    if kind is list:
        return children
    if kind is tuple:
        return tuple(children)
    if isinstance(value, list):
        twin = copy.copy(value)
        twin[:] = children
        return twin
    if isinstance(value, tuple):
        return kind._make(children) if hasattr(kind, "_make") else kind(children)
    twin = copy.copy(value)
    for name, child in zip(names, children, strict=True):
        object.__setattr__(twin, name, child)  # frozen dataclasses refuse setattr
    return twin


def _rebuild_mapping(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """A copy keeps what a subclass knows beside its items (a default factory, encodings, ...)."""
    if isinstance(value, (dict, UserDict, MutableMapping)):
        twin = copy.copy(value)
        for key, child in items.items():
            twin[key] = child
        return twin
    try:
        return type(value)(items)  # type: ignore[call-arg]  # many mappings can be made of one
    except TypeError:
        return items  # a read-only view, such as a mapping proxy of another kind
