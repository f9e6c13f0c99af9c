"""Named tuples and dataclasses across ranks by name, without importing or running what the wire names."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import sys
import types
from functools import lru_cache
from typing import Any

from evenstep.errors import WireFormatError

__all__ = ["is_dataclass_type", "is_named_tuple_type", "lookup", "record_fields"]


_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made by a class statement


def is_named_tuple_type(kind: type) -> bool:
    """Whether ``kind`` was made by `typing.NamedTuple` or `collections.namedtuple` (or derives from one)."""
    names = getattr(kind, "_fields", None)
    return (
        issubclass(kind, tuple)
        and isinstance(names, tuple)
        and all(isinstance(name, str) for name in names)
        and hasattr(kind, "_make")
    )


def is_dataclass_type(kind: type) -> bool:
    """Whether instances of ``kind`` are plain objects with dataclass fields, and nothing else."""
    # Their __new__ and layout are object's: such an instance is made without running any code of the class.
    return dataclasses.is_dataclass(kind) and _is_plain(kind)


def _is_plain(kind: type) -> bool:
    built_in = [base for base in kind.__mro__ if base is not object and not base.__flags__ & _HEAP_TYPE]
    return not built_in and not inspect.isabstract(kind) and not isinstance(kind, enum.EnumMeta)


@lru_cache(maxsize=1024)
def record_fields(kind: type) -> tuple[str, ...] | None:
    """Names of the fields of a named tuple or dataclass type, in order; None for any other type."""
    if is_named_tuple_type(kind):
        return tuple(kind._fields)  # type: ignore[attr-defined]  # a named tuple has it
    if is_dataclass_type(kind):
        return tuple(f.name for f in dataclasses.fields(kind))
    return None


def _find(module: str, qualname: str) -> Any:
    found: Any = sys.modules.get(module)
    if not isinstance(found, types.ModuleType):
        return None
    # Namespaces are read directly: getattr would run a module's or a metaclass's __getattr__, which may import.
    namespace: Any = types.ModuleType.__getattribute__(found, "__dict__")
    for part in qualname.split("."):
        found = namespace.get(part)
        namespace = type.__getattribute__(found, "__dict__") if isinstance(found, type) else {}
    return found


def lookup(module: str, qualname: str, names: tuple[str, ...]) -> type:
    """The class of that name, if this process has imported it and its fields are ``names``.

    Raises:
        WireFormatError: If it is not imported, is no named tuple or dataclass, or has other fields.
    """
    found = _find(module, qualname)
    if not isinstance(found, type):
        raise WireFormatError(
            f"a sample holds {module}.{qualname}, which this rank has not imported; import it on every rank "
            "before the loader is built"
        )
    have = record_fields(found)
    if have is None:
        raise WireFormatError(
            f"a sample names {module}.{qualname}, which is no named tuple or dataclass here"
        )
    if have != names:
        raise WireFormatError(
            f"a sample holds {module}.{qualname} with fields {list(names)}; on this rank it has {list(have)}; "
            "run the same code on every rank"
        )
    return found


def is_reachable(kind: type) -> bool:
    """Whether other ranks can find ``kind`` by its module and qualified name."""
    return _find(kind.__module__, kind.__qualname__) is kind
