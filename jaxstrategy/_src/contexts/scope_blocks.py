"""`with` blocks that each scope enters too: for libraries with state of their own.

They are named by their modules, which the first scope imports: nothing else of this
package need be, before a program makes a strategy.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

_modules: list[str] = []


def add(module: str) -> None:
    """Have each scope enter `block(strategy)` of that module."""
    _modules.append(module)


def entered(strategy: Any) -> contextlib.ExitStack:
    """The blocks of all modules, entered for the scope of `strategy`."""
    with contextlib.ExitStack() as blocks:
        for module in _modules:
            blocks.enter_context(importlib.import_module(module).block(strategy))
        return blocks.pop_all()
