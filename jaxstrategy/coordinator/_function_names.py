"""What the user's functions are called, and where they stand."""

from __future__ import annotations

import inspect
from typing import Any

from jaxstrategy.text._user_code import Line


def function_name(fn: Any) -> str:
    """The name of a function, or of what was made of one."""
    name = getattr(fn, "__name__", None)
    return name if isinstance(name, str) else type(fn).__name__


def function_line(fn: Any) -> Line | None:
    """Where a function, or what it was made of, is defined."""
    code = getattr(inspect.unwrap(fn), "__code__", None)
    return None if code is None else Line(code.co_filename, code.co_firstlineno)
