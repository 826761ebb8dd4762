"""Directives for the pages of the API.

`entries` makes a table of some public names, and then an entry of each, with the
members that it does not have from another public class:

    .. entries:: jaxstrategy

       MirroredStrategy
       get_strategy

`module` shows the docstring of a module:

    .. module-text:: jaxstrategy.checkpoint
"""

from __future__ import annotations

import ast
import enum
import inspect
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

from docstring_markup import as_rst
from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("entries", Entries)
    app.add_directive("module-text", ModuleText)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


class Entries(SphinxDirective):
    """Names of one module, one a line."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        module = import_module(self.arguments[0])
        names = [line.strip() for line in self.content if line.strip()]
        pages = Path(self.env.srcdir) / "api"
        public = [getattr(import_module(home), name) for home, name in listed(pages)]
        others = aliases(pages)
        lines = [f".. currentmodule:: {module.__name__}", "", *summary(names)]
        for name in names:
            value = getattr(module, name)
            lines += entry(name, value, public)
            also = [each for each, same in others if same is value]
            lines += also_called([a for a in also if a != f"{module.__name__}.{name}"])
        return self.parse_text_to_nodes(StringList(lines, source=self.env.docname))


class ModuleText(SphinxDirective):
    """What a module says of itself."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        name = self.arguments[0]
        text = inspect.getdoc(import_module(name)) or ""
        lines = [f".. py:module:: {name}", "", *as_rst(text.splitlines())]
        return self.parse_text_to_nodes(StringList(lines, source=self.env.docname))


def listed(pages: Path) -> list[tuple[str, str]]:
    """The modules and names of all entries."""
    found = sorted(pages.glob("*.rst"))
    return [entry for page in found for entry in entries_of(page.read_text())]


def aliases(pages: Path) -> list[tuple[str, object]]:
    """All public names of the modules that have entries, with what they stand for."""
    modules = map(import_module, sorted({module for module, _ in listed(pages)}))
    return [
        (f"{module.__name__}.{name}", getattr(module, name))
        for module in modules
        for name in exported(module)
    ]


def exported(module: ModuleType) -> Iterator[str]:
    """What a module defines, and what it imports as `X as X`."""
    for node in ast.parse(inspect.getsource(module)).body:
        match node:
            case ast.ImportFrom():
                names = [each.name for each in node.names if each.asname == each.name]
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names = [name]
            case ast.Assign(targets=[ast.Name(id=name)]):
                names = [name]
            case _:
                names = []
        yield from (name for name in names if not name.startswith("_"))


def entries_of(page: str) -> list[tuple[str, str]]:
    """The modules and names of the entries on a page.

    >>> entries_of(".. entries:: math\\n\\n   pi\\n   tau\\n\\nText.\\n")
    [('math', 'pi'), ('math', 'tau')]
    """
    found, module = [], None
    for line in page.splitlines():
        if line.startswith(".. entries:: "):
            module = line.removeprefix(".. entries:: ").strip()
        elif line.strip() and not line.startswith(" "):
            module = None
        elif line.strip() and module:
            found.append((module, line.strip()))
    return found


def summary(names: list[str]) -> list[str]:
    """The lines of a table with the first sentence of each."""
    head = [".. autosummary::", "   :nosignatures:", ""]
    return [*head, *(f"   {name}" for name in names), ""]


def entry(name: str, value: object, public: list[object]) -> list[str]:
    """The lines that tell all of one name."""
    if not isinstance(value, type):
        return [f".. auto{'function' if callable(value) else 'data'}:: {name}", ""]
    kind = "exception" if issubclass(value, BaseException) else "class"
    members = own_members(value, [each for each in public if inspect.isclass(each)])
    lines = [f".. auto{kind}:: {name}"]
    if members:
        lines.append(f"   :members: {', '.join(members)}")
    if issubclass(value, enum.Enum):
        lines.append("   :undoc-members:")
    return [*lines, ""]


def also_called(names: list[str]) -> list[str]:
    """The content of an entry that says its other names."""
    short = (name.replace("jaxstrategy.", "js.", 1) for name in names)
    text = ", ".join(f"``{name}``" for name in short)
    return [f"   Also called {text}.", ""] if names else []


def own_members(cls: type, public: list[type]) -> list[str]:
    """Its public methods, properties and enum members that no other entry tells of."""
    elsewhere = {
        base
        for owner in public
        if owner is not cls and issubclass(cls, owner)
        for base in owner.__mro__
    }
    found: dict[str, None] = {}
    for base in cls.__mro__:
        if base.__module__.startswith("jaxstrategy") and base not in elsewhere:
            found.update((name, None) for name in vars(base) if is_told(base, name))
    return list(found)


def is_told(cls: type, name: str) -> bool:
    """Whether a member of a class is public and says what it is."""
    member = inspect.getattr_static(cls, name)
    if name.startswith("_") or type(member).__name__ == "_tuplegetter":
        return False
    if issubclass(cls, enum.Enum) and name in cls.__members__:
        return True
    text = getattr(member, "__doc__", None)
    return bool(text) and not isinstance(member, type) and text != type(member).__doc__
