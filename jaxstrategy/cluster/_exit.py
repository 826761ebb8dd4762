"""Tells a script that ended by `sys.exit(3)` from one that came to its end.

Python says neither to `sys.excepthook` nor to `atexit`.
"""

from __future__ import annotations

import sys
import threading
from typing import NoReturn

_uncaught: object = None


class _Exit(SystemExit):
    """Notes, when Python lets go of it, whether anybody had caught it."""

    def __del__(self) -> None:
        global _uncaught
        is_main = threading.current_thread() is threading.main_thread()
        # Who catches it still runs when it goes; after all code has ended, none does.
        if is_main and sys._getframe().f_back is None:
            _uncaught = self.code


def watch() -> None:
    """Take note of `sys.exit` from now on."""
    if sys.exit is not _exit:
        sys.exit = _exit


def code() -> object:
    """With what `sys.exit` ended the script: None or 0 if all went well."""
    return _uncaught


def _exit(status: object = None, /) -> NoReturn:
    raise _Exit(status)
