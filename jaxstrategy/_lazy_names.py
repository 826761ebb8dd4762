"""Public names whose modules are imported when a program first asks for them.

A package gives a table of its names and of the modules that define them; what it
imports `if TYPE_CHECKING` says the same to type checkers. So a program waits only for
the modules that it uses: of the 780 files of the package a launcher reads ten, and a
step on one machine no coordinator, no parameter servers and no older generations.

Threads may ask for different names at once, so one of them imports at a time: the
modules of JAX import each other in circles, which other threads would see half made
(0.10 and 0.12). For the same reason no package with such a table imports modules of its
own when it is imported itself.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

_importing = threading.RLock()


def of(
    package: str,
    table: Mapping[str, str],
    *,
    modules: Iterable[str] = (),
    extra: tuple[str, str] | None = None,
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package, or of a module, with lazy names.

    Args:
      package: its `__name__`.
      table: defining modules, without the leading "jaxstrategy.", and the names that
        each defines, between spaces; `name=other` if it is called otherwise there.
      modules: whole modules that are public names, in the same way.
      extra: the library that some of the modules import, and its name in sentences.

    The names raise an `AttributeError` that says what to use instead if TensorFlow has
    one that is not here, and a `MissingExtraError` if the library is not installed.
    """
    places = {path.rpartition(".")[2]: (path, "") for path in modules}
    for path, several in table.items():
        for name in several.split():
            public, _, defined = name.partition("=")
            places[public] = (path, defined or public)

    def find(name: str) -> Any:
        if name == "__all__":  # which `from jaxstrategy import *` asks for
            return [each for each in places if not each.startswith("_")]
        if name not in places:
            from jaxstrategy.text import _absent

            raise _absent.missing(package, name)
        path, defined = places[name]
        try:
            with _importing:
                module = importlib.import_module(f"jaxstrategy.{path}")
        except ModuleNotFoundError as missing:
            if extra is None or (missing.name or "").partition(".")[0] != extra[0]:
                raise
            raise _missing_extra(f"{package}.{name}", *extra) from missing
        found = getattr(module, defined) if defined else module
        setattr(sys.modules[package], name, found)  # asked for once
        return found

    def names() -> list[str]:
        own = vars(sys.modules[package])
        return sorted({*places, *(each for each in own if each.startswith("_"))})

    return find, names


def _missing_extra(name: str, library: str, title: str) -> ImportError:
    from jaxstrategy._errors import MissingExtraError

    return MissingExtraError(
        f"`{name}` needs {title}, which is not installed. Install the extra: pip "
        f"install 'jaxstrategy[{library}]'"
    )
