"""What holds for the project as a whole: imports, names, versions, and what its files may say."""

from __future__ import annotations

import ast
import importlib
import os
import pkgutil
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest

import evenstep

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
OPTIONAL = ("matplotlib", "tokenizers", "torch_npu", "tqdm")
HEAVY = (*OPTIONAL, "hypothesis", "pytest", "scipy", "sklearn", "torch.testing", "transformers")


def test_import_needs_nothing_optional_and_warns_of_nothing() -> None:
    program = f"""
        import sys

        class Blocker:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] in {OPTIONAL}:
                    raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
                return None

        sys.meta_path.insert(0, Blocker())
        import torch, torchdata.nodes
        before = set(sys.modules)
        import evenstep
        for name in evenstep.__all__:
            getattr(evenstep, name)
        print(*sorted(set(sys.modules) - before))
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=False,
        env=_environment(),
    )
    assert (done.returncode, done.stderr) == (0, "")
    loaded = done.stdout.split()
    assert "evenstep" in loaded
    assert [name for name in loaded if name in HEAVY] == []


def test_the_names_that_are_imported_late_are_those_that_checkers_see() -> None:
    """What type checkers read is what runs: each name from the same room, and nothing else."""
    tree = ast.parse((ROOT / "src" / "evenstep" / "__init__.py").read_text())
    [guarded] = [node for node in tree.body if isinstance(node, ast.If) and isinstance(node.test, ast.Name)]
    seen = {
        alias.name: node.module
        for node in guarded.body
        if isinstance(node, ast.ImportFrom) and node.module is not None
        for alias in node.names
    }
    assert sorted(seen) == evenstep.__all__
    for name, module in seen.items():
        assert getattr(evenstep, name) is getattr(importlib.import_module(module), name)
    assert set(evenstep.__all__) <= set(dir(evenstep))


def test_import_waits_for_no_torch_and_finds_rooms_later() -> None:
    program = """
        import sys
        import evenstep
        assert "torch" not in sys.modules
        assert evenstep.LinearQuadraticCost(1, 0) and "torch" not in sys.modules
        assert evenstep.nodes.Planner and "torch" in sys.modules
        from evenstep import *
        assert build_loader is evenstep.build.build_loader
        evenstep.nosuch
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=False,
        env=_environment(),
    )
    assert done.stderr.splitlines()[-1] == "AttributeError: module 'evenstep' has no attribute 'nosuch'"


def test_the_version_is_told_once_and_the_same_everywhere() -> None:
    match = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert match is not None
    assert evenstep.__version__ == match[1]


def _modules() -> list[ModuleType]:
    found = pkgutil.walk_packages(evenstep.__path__, "evenstep.")
    return [
        evenstep,
        *(importlib.import_module(one.name) for one in found if not one.name.endswith("__main__")),
    ]


def test_every_exported_name_exists_once() -> None:
    for module in _modules():
        names = getattr(module, "__all__", [])
        missing = [name for name in names if not hasattr(module, name)]
        assert (module.__name__, missing) == (module.__name__, [])
        assert (module.__name__, len(set(names))) == (module.__name__, len(names))


def test_every_package_of_the_sources_is_a_regular_one() -> None:
    folders = {path.parent for path in SOURCES} - {ROOT / "src"}
    assert [str(folder) for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


def test_every_file_says_why_it_exists() -> None:
    silent = [str(path.relative_to(ROOT)) for path in SOURCES if not path.read_text().startswith('"""')]
    assert silent == []


def test_nothing_unpickles_what_comes_over_the_wire() -> None:
    """`PickleCodec` is asked for by name; readers and the test harness talk to their own children.

    The benchmark measures pickling beside us, and the demo's loop gathers its own figures as any loop may.
    """
    allowed = re.compile(
        r"src/evenstep/(comm/codec|testing/rank|nodes/worker_message|bench/(exchange|gather|payload)|demo/train)"
    )
    unpickles = re.compile(
        r"\b(import|from) c?pickle\b|\b(all_gather_object|broadcast_object_list|gather_object|recv_object_list"
        r"|scatter_object_list)\b|\bpickle\.loads?\b|\ballow_pickle=True\b|\bweights_only=False\b"
    )
    users = [str(path.relative_to(ROOT)) for path in SOURCES if unpickles.search(path.read_text())]
    assert users != []
    assert [path for path in users if not allowed.match(path)] == []


def test_the_readme_and_ci_run_the_same_command() -> None:
    block = re.compile(r"^```bash\n(.*?)\n```$", re.MULTILINE | re.DOTALL)
    commands = [
        command for command in block.findall((ROOT / "README.md").read_text()) if "pip install" in command
    ]
    assert len(commands) == 2
    assert "evenstep demo" in commands[0]
    assert (ROOT / ".ci" / "run").read_text().splitlines()[-1] == commands[1]


@pytest.mark.parametrize("name", ["tests", "docs", "notebooks", "src"])
def test_no_file_names_the_machine_it_was_written_on(name: str) -> None:
    private = re.compile(r"/(root|home|work)/\w")
    suffixes = {".py", ".md", ".ipynb", ".toml", ".json", ".txt"}
    files = [path for path in (ROOT / name).rglob("*") if path.suffix in suffixes]
    assert [str(path) for path in files if path != Path(__file__) and private.search(path.read_text())] == []


def _environment() -> dict[str, str]:
    """The environment of a person who works here, with the package where the tests found it."""
    return dict(os.environ, PYTHONPATH=str(Path(evenstep.__file__).parents[1]))
