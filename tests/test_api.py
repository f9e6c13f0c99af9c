"""The public names and their signatures are those of api.txt; ``python tests/test_api.py`` writes it anew."""

from __future__ import annotations

import difflib
import enum
import importlib
import inspect
import re
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
FROZEN = Path(__file__).with_name("api.txt")
WIDTH = 110


def public_modules() -> list[ModuleType]:
    """The modules of the API reference, those below others last."""
    pages = "".join(path.read_text() for path in sorted((ROOT / "docs" / "api").glob("*.md")))
    names = sorted(set(re.findall(r"automodule:: (\S+)", pages)))
    return [importlib.import_module(name) for name in ["evenstep", *names]]


def lines() -> Iterator[str]:
    """Everything public, a module after the other; what two modules export is described in the last of them."""
    modules = public_modules()
    homes = {id(getattr(module, name)): module for module in modules for name in module.__all__}
    for module in modules:
        yield f"\n[{module.__name__}]"
        for name in sorted(module.__all__):
            value = getattr(module, name)
            home = homes[id(value)]
            if home is module:
                yield from described(name, value)
            else:
                yield f"{name} = {home.__name__}.{name}"


def described(name: str, value: Any) -> Iterator[str]:
    if inspect.isclass(value):
        yield from described_class(name, value)
    elif inspect.isroutine(value):
        yield from signature(f"def {name}", value)
    else:
        yield f"{name}: {type(value).__name__}"


def described_class(name: str, kind: type) -> Iterator[str]:
    bases = ", ".join(base.__name__ for base in kind.__bases__ if base is not object)
    yield f"class {name}" + (f"({bases})" if bases else "")
    is_called = not getattr(kind, "_is_protocol", False) and not issubclass(kind, enum.Enum)
    if is_called and any("__init__" in vars(base) for base in ours(kind)):
        yield from signature("    def __init__", kind)
    members = {
        member: value
        for base in reversed(ours(kind))
        for member, value in vars(base).items()
        if not member.startswith("_")
    }
    for member, value in sorted(members.items()):
        if isinstance(value, property):
            assert value.fget is not None
            returns = inspect.signature(value.fget).return_annotation
            yield f"    {member}: {written(returns)}"
        elif isinstance(value, (classmethod, staticmethod)):
            kind_of = type(value).__name__
            yield from signature(f"    {kind_of} {member}", value.__func__)
        elif inspect.isfunction(value):
            yield from signature(f"    def {member}", value)


def ours(kind: type) -> list[type]:
    """The classes that ``kind`` has its members from, other packages' left out: theirs differ by version."""
    return [base for base in kind.__mro__ if base.__module__.partition(".")[0] == "evenstep"]


def signature(head: str, function: Any) -> Iterator[str]:
    """On one line, or a line for each parameter."""
    found = inspect.signature(function)
    parts: list[str] = []
    before: Any = None
    for parameter in found.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and before not in (
            parameter.KEYWORD_ONLY,
            parameter.VAR_POSITIONAL,
        ):
            parts.append("*")
        before = parameter.kind
        stars = "*" * (parameter.kind is parameter.VAR_POSITIONAL) + "**" * (
            parameter.kind is parameter.VAR_KEYWORD
        )
        text = stars + parameter.name
        if parameter.annotation is not parameter.empty:
            text += f": {written(parameter.annotation)}"
        if parameter.default is not parameter.empty:
            text += f" = {default(parameter.default)}"
        parts.append(text)
    end = ")"
    if found.return_annotation not in (found.empty, None, "None"):
        end += f" -> {written(found.return_annotation)}"
    line = f"{head}({', '.join(parts)}{end}"
    if len(line) <= WIDTH:
        yield line
        return
    margin = " " * (len(head) - len(head.lstrip()))
    yield f"{head}("
    yield from (f"{margin}        {part}," for part in parts)
    yield f"{margin}    {end}"


def written(annotation: Any) -> str:
    if isinstance(annotation, str):
        return annotation
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)


def default(value: Any) -> str:
    """As the caller knows it: without the address that another run has elsewhere."""
    if inspect.isroutine(value) or inspect.isclass(value):
        return str(value.__name__)
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def text() -> str:
    return "\n".join(lines()).strip() + "\n"


def test_the_public_api_is_what_is_written_down() -> None:
    changes = difflib.unified_diff(
        FROZEN.read_text().splitlines(), text().splitlines(), "tests/api.txt", "now", lineterm="", n=1
    )
    told = "\n".join(changes)
    assert not told, (
        "the public API has changed; if that is meant, run `python tests/test_api.py` and say so in CHANGELOG.md:\n"
        f"{told}"
    )


def test_a_changed_default_would_be_seen() -> None:
    def function(a: int, *rest: str, b: float = 1.5, **more: Any) -> int:
        return a

    assert list(signature("def f", function)) == [
        "def f(a: int, *rest: str, b: float = 1.5, **more: Any) -> int"
    ]
    frozen = FROZEN.read_text()
    assert "            seq_len: int,\n            micro_batch_size: int = 1,\n" in frozen
    assert "[evenstep.packing]" in frozen


def callables(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """What of a module is called: functions, classes for their fields, methods and properties."""
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isroutine(value) or inspect.isclass(value):
            yield name, value
        if inspect.isclass(value):
            for base in ours(value):
                for member, held in vars(base).items():
                    function = held.fget if isinstance(held, property) else getattr(held, "__func__", held)
                    if inspect.isfunction(function):
                        yield f"{name}.{member}", function


def unresolved(value: Any) -> str | None:
    """Why the annotations of ``value`` cannot be read while the program runs, as validators and injectors do."""
    try:
        typing.get_type_hints(value)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


@pytest.mark.parametrize("module", public_modules(), ids=lambda module: module.__name__)
def test_type_hints_can_be_read_at_run_time(module: ModuleType) -> None:
    # Strategies made by hypothesis' `composite` are functions of its own module, where our names are not known.
    named = [
        (name, value)
        for name, value in callables(module)
        if value.__module__ != "evenstep.testing.strategies"
    ]
    assert named
    told = {name: problem for name, value in named if (problem := unresolved(value)) is not None}
    assert not told


def test_a_type_hint_that_is_imported_for_checkers_alone_would_be_seen() -> None:
    def function(mesh: "DeviceMesh") -> None:  # type: ignore[name-defined]  # noqa: F821, UP037
        pass

    assert unresolved(function) == "NameError: name 'DeviceMesh' is not defined"


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "src"))
    FROZEN.write_text(text())
