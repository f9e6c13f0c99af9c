"""What ``MODULE:NAME`` on a command line names, or where it was sought and what to do."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["named"]


def named(words: str) -> Any:
    """The object that ``MODULE:NAME`` (or ``MODULE.NAME``) or ``FILE.py:NAME`` names.

    Modules in the working directory are found too.

    Raises:
        ValueError: ``words`` are of another form.
        FileNotFoundError: There is no such file.
        ImportError: There is no such module, or one that it imports is missing.
        AttributeError: The module has no such name.
    """
    module, colon, name = words.rpartition(":" if ":" in words or words.endswith(".py") else ".")
    if not colon or not module or not name:
        raise ValueError(
            f"{words!r} names nothing; expected MODULE:NAME, for example my_project.data:train_set, or FILE.py:NAME"
        )
    found: Any = _module(words, module)
    for attribute in name.split("."):
        if not hasattr(found, attribute):
            raise AttributeError(f"{words}: {module} has no {name!r}{_beside(found)}")
        found = getattr(found, attribute)
    return found


def _module(words: str, module: str) -> ModuleType:
    folder = ""
    if module.endswith(".py"):
        file = Path(module)
        if not file.is_file():
            raise FileNotFoundError(f"{words}: there is no file {file} in {Path.cwd()}")
        folder, module = str(file.parent.resolve()), file.stem
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or f"{module}.".startswith(f"{error.name}."):
            raise ModuleNotFoundError(
                f"{words}: no module {error.name or module!r} in {Path.cwd()}, nor elsewhere on Python's path; change to the "
                f"folder that it lies in, name the file (FOLDER/{(error.name or module).replace('.', '/')}.py:NAME), or set "
                "PYTHONPATH=FOLDER",
                name=error.name,
            ) from None
        raise ModuleNotFoundError(
            f"{words}: {module} was found, but imports {error.name!r}, which is not installed here",
            name=error.name,
        ) from error


def _beside(found: Any) -> str:
    """The names that a module has itself, a few of them."""
    if not isinstance(found, ModuleType):
        return ""
    own = [
        name
        for name, value in vars(found).items()
        if not (name.startswith("_") or isinstance(value, ModuleType))
    ]
    return f"; it has {', '.join(own[:8])}{', ...' if len(own) > 8 else ''}" if own else ""
