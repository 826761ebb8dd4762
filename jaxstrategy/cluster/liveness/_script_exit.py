"""Tells a script that ended by `SystemExit` from one that came to its end.

Python says neither to `sys.excepthook` nor to `atexit`.
"""

from __future__ import annotations

import sys
import threading
from types import CodeType
from typing import NoReturn

_uncaught: object = None


def watch() -> None:
    """Take note of an uncaught `SystemExit` from now on, however it is raised.

    On Python 3.11, of `sys.exit`, `exit` and `quit` only.
    """
    if sys.version_info >= (3, 12) and _watch_unwinding():
        return
    if sys.exit is not _exit:
        import builtins

        sys.exit = _exit
        builtins.exit = builtins.quit = _exit  # type: ignore[assignment]


def code() -> object:
    """With what the script was ended: None or 0 if all went well."""
    return _uncaught


if sys.version_info >= (3, 12):
    # Those that no kind of tool claims; Python names 0 to 2 and 5.
    _TOOLS = 3, 4
    _NAME = "jaxstrategy"

    def _watch_unwinding() -> bool:
        """Be called when an exception leaves a frame; False if others took all ids."""
        monitoring = sys.monitoring
        taken = {tool: monitoring.get_tool(tool) for tool in _TOOLS}
        if _NAME in taken.values():
            return True
        tool = next((tool for tool, name in taken.items() if name is None), None)
        if tool is None:
            return False
        event = monitoring.events.PY_UNWIND
        monitoring.use_tool_id(tool, _NAME)
        monitoring.register_callback(tool, event, _unwound)
        monitoring.set_events(tool, event)
        return True

    def _unwound(code: CodeType, offset: int, error: BaseException) -> None:
        global _uncaught
        if isinstance(error, SystemExit) and _is_last(sys._getframe(1).f_back):
            _uncaught = error.code


class _Exit(SystemExit):
    """An exit that notes, when Python deletes it, whether code has caught it."""

    def __del__(self) -> None:
        global _uncaught
        # Who catches it still runs when it goes; after all code has ended, none does.
        if _is_last(sys._getframe().f_back):
            _uncaught = self.code


def _is_last(caller: object) -> bool:
    """Whether a frame with this caller is the script's own."""
    is_main = threading.current_thread() is threading.main_thread()
    return is_main and caller is None


def _exit(status: object = None, /) -> NoReturn:
    raise _Exit(status)
