"""Public names whose modules are imported when a program first asks for them.

A public module lists its names in a block of `if TYPE_CHECKING`, as imports, which type
checkers follow; programs get the same list, read from the source, but import a module
only when they use one of its names. So a launcher reads ten modules of the package, and
a step on one machine no coordinator, no parameter servers and no older generations.

Threads may ask for different names at once, so one of them imports at a time: the
modules of JAX import each other in circles, which other threads would see half made
(0.10 and 0.12). For the same reason no public module imports modules of the package
when it is imported itself.
"""

from __future__ import annotations

import ast
import importlib
import sys
import threading
from collections.abc import Callable
from typing import Any

_importing = threading.RLock()


def of(
    package: str, *, extra: tuple[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a public module, with what it lists as names.

    The names raise an `AttributeError` that says what to use instead if TensorFlow has
    one that is not here, and a `MissingExtraError` if the library is not installed.
    """
    listed = _listed(package)

    def find(name: str) -> Any:
        if name == "__all__":  # which `from jaxstrategy import *` asks for
            return [each for each in listed if not each.startswith("_")]
        if name not in listed:
            from jaxstrategy._src.text import absent

            raise absent.missing(package, name)
        home, defined = listed[name]
        try:
            with _importing:
                module = importlib.import_module(home)
        except ModuleNotFoundError as missing:
            if extra is None or (missing.name or "").partition(".")[0] != extra[0]:
                raise
            raise _missing_extra(f"{package}.{name}", *extra) from missing
        found = getattr(module, defined) if defined else module
        setattr(sys.modules[package], name, found)  # asked for once
        return found

    def names() -> list[str]:
        own = vars(sys.modules[package])
        return sorted({*listed, *(each for each in own if each.startswith("_"))})

    return find, names


def _listed(package: str) -> dict[str, tuple[str, str]]:
    """For each name its module, and what it is called there; of a module nothing."""
    spec = sys.modules[package].__spec__
    get_source = getattr(spec and spec.loader, "get_source", lambda name: None)
    if (source := get_source(package)) is None:
        raise ImportError(f"`{package}` needs its source file, which lists its names.")
    (block,) = (node for node in ast.parse(source).body if isinstance(node, ast.If))
    found: dict[str, tuple[str, str]] = {}
    hidden: dict[str, tuple[str, str]] = {}
    for node in block.body:
        match node:
            case ast.ImportFrom(module=str(home), names=aliases):
                for alias in aliases:
                    is_public = alias.asname == alias.name
                    is_module = "._src" not in home
                    place = (
                        (f"{home}.{alias.name}", "")
                        if is_module
                        else (home, alias.name)
                    )
                    (found if is_public else hidden)[alias.name] = place
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Name(id=value)):
                found[name] = hidden.get(value) or found[value]
    return found


def _missing_extra(name: str, library: str, title: str) -> ImportError:
    from jaxstrategy._src.errors import MissingExtraError

    return MissingExtraError(
        f"`{name}` needs {title}, which is not installed. Install the extra: pip "
        f"install 'jaxstrategy[{library}]'"
    )
