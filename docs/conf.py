"""How the documentation is built: offline, every reference checked, nothing written twice."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "src"))

import evenstep  # noqa: E402

project = "evenstep"
author = copyright = "The evenstep authors"
version = release = evenstep.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "recipes/README.md"]
myst_enable_extensions = ["colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = "evenstep"
html_static_path = ["_static"]
html_show_sphinx = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#14505c", "color-brand-content": "#1f7886"},
    "dark_css_variables": {"color-brand-primary": "#7fc8d3", "color-brand-content": "#7fc8d3"},
    "footer_icons": [],
}

# The words of the docstrings: `Name` is code, and a link where Name is public (see `_link`).
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False

nitpicky = True
nitpick_ignore_regex = [
    # No remote inventories, so that the build needs no network: names of Python and other packages are text.
    (
        r"py:.*",
        r"(collections|contextlib|dataclasses|datetime|functools|np|npt|numpy|os|pathlib|st|hypothesis)\..*",
    ),
    (r"py:.*", r"(tn|torch|torchdata|types|typing|concurrent|argparse|multiprocessing|threading)\..*"),
    (
        r"py:.*",
        r"(Any|Callable|Collection|Generic|Hashable|Iterable|Iterator|Literal|Mapping|MutableMapping|Path|Protocol)",
    ),
    (
        r"py:.*",
        r"(Sequence|Sized|TypeVar|timedelta|TracebackType|DeviceMesh|BaseNode|nullcontext|Module|Tensor)",
    ),
    (r"py:.*", r"(bool|bytes|dict|float|int|list|object|str|tuple|type|None|Ellipsis|self|self\..*)"),
    (
        r"py:.*",
        r"(AssertionError|BaseException|Exception|ImportError|IndexError|KeyError|OSError|OverflowError)",
    ),
    (r"py:.*", r"(RuntimeError|StopIteration|TimeoutError|TypeError|ValueError|NotImplementedError)"),
    # Halves of a type in a string that is split at its comma.
    (r"py:class", r"(.* )?tuple\[\w+"),
    # Several exceptions with one reason: the docstring names them together.
    (r"py:exc", r".*, .*"),
    # Type variables and private aliases say nothing that the text does not.
    (
        r"py:.*",
        r"(.*\.)?(T|In|Out|_\w+|Int|Float|Array|Loads|Sample|Pack|Collate|Build|MicroBatch|Oversized|Remainder)",
    ),
    (r"py:.*", r"(.*\.)?(DeviceLike|Ints|LossCounter|SearchStrategy|DrawFn|T_co|NDArray|ArrayLike)"),
    # Parts between the stages, which users meet as values and never build.
    (
        r"py:.*",
        r"(.*\.)?(Columns|Rounds|Groups|Communicator|Launcher|LaunchDesk|Pending|KnownMetadata|SeedKey)",
    ),
    (r"py:.*", r"(.*\.)?(BufferPool|ModelPlane|Padding|Watcher|WindowReader|Simulated\w+|StepPicture)"),
    (
        r"py:.*",
        r"(.*\.)?(RowStatistics|LocalStream|LocalRows|Layout|RowLimits|RowNeeds|Stamp|Pool|Moves|Exchange)",
    ),
]

MODULES = [
    "evenstep.build",
    "evenstep.config",
    "evenstep.loader",
    "evenstep.timeline",
    "evenstep.cursor",
    "evenstep.samples",
    "evenstep.errors",
    "evenstep.sampling",
    "evenstep.datasets",
    "evenstep.plan",
    "evenstep.cost",
    "evenstep.packing",
    "evenstep.nodes",
    "evenstep.nodes.balance",
    "evenstep.comm",
    "evenstep.comm.codec",
    "evenstep.comm.batch_spec",
    "evenstep.topology",
    "evenstep.device",
    "evenstep.lengths",
    "evenstep.simulate",
    "evenstep.trace",
    "evenstep.testing",
]


def _homes() -> dict[str, str]:
    """Where each public name is documented: in the first module of the list that exports it."""
    homes: dict[str, str] = {}
    for module in MODULES:
        for name in importlib.import_module(module).__all__:
            homes.setdefault(name, f"{module}.{name}")
    return homes


HOMES = _homes()
_COLON = "\N{RATIO}"  # stands in for a colon while napoleon looks
_CODE = re.compile(r"(?<![`:\w])`([A-Za-z_][\w.]*)(\(\))?`(?!`)")


def _plain_property(_app: Any, what: str, _name: str, _object: Any, _options: Any, lines: list[str]) -> None:
    """A property's first line is prose: napoleon would take what stands before a colon for its type."""
    if what in ("property", "attribute"):
        lines[:] = [line.replace(":", _COLON) for line in lines]


def _plain_map(_app: Any, what: str, _name: str, _object: Any, _options: Any, lines: list[str]) -> None:
    """What a module's docstring draws or tabulates is shown as it is written, from its first such line on."""
    drawn = [k for k, line in enumerate(lines) if line.startswith(("|", "    ")) or " -> " in line]
    if what == "module" and drawn:
        lines[drawn[0] :] = ["::", "", *(f"    {line}" for line in lines[drawn[0] :]), ""]


def _link(_app: Any, what: str, _name: str, _object: Any, _options: Any, lines: list[str]) -> None:
    """`Name` in a docstring becomes a link if Name is public, else code."""

    def replace(match: re.Match[str]) -> str:
        said = match[1]
        name = said.rsplit(".", 1)[-1] if said.startswith("evenstep.") else said
        home = HOMES.get(name)
        return f"``{said}``" if home is None else f":py:obj:`{name} <{home}>`"

    for k, line in enumerate(lines):
        if what != "module" or not line.startswith("    "):  # else it is drawn
            lines[k] = _CODE.sub(replace, line.replace(_COLON, ":"))


def _at_home(app: Any, env: Any, node: Any, contnode: Any) -> Any:
    """An annotation names the module where a class is written; link to where it is documented."""
    if node.get("refdomain") != "py":
        return None
    name = node["reftarget"].rsplit(".", 1)[-1]
    home = HOMES.get(name)
    if home is None or home == node["reftarget"]:
        return None
    domain = env.get_domain("py")
    return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", home, node, contnode)


def _first_home_only(_app: Any, what: str, name: str, obj: Any, skip: bool, _options: Any) -> bool | None:
    """A name that two modules export is documented once; type aliases have nothing to say."""
    if what != "module" or name not in HOMES:
        return None
    documenting = _app.env.temp_data.get("autodoc:module") or _app.env.ref_context.get("py:module")
    if documenting in MODULES and HOMES[name] != f"{documenting}.{name}":
        return True
    return None if inspect.isclass(obj) or callable(obj) else skip


def setup(app: Any) -> None:
    """Connect the hooks above."""
    app.connect("autodoc-process-docstring", _plain_property, priority=100)  # before napoleon
    app.connect("autodoc-process-docstring", _plain_map, priority=850)  # before _link
    app.connect("autodoc-process-docstring", _link, priority=900)  # behind napoleon
    app.connect("autodoc-skip-member", _first_home_only)
    app.connect("missing-reference", _at_home)
