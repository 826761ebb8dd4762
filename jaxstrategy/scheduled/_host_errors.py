"""What Python code in a program raised, where JAX has only a text of it."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, final

import jax

_LOGGER = logging.getLogger("jax")


@final
class _Heard(logging.Handler):
    """The errors of callbacks that JAX logs, which it raises as texts (0.10, 0.12)."""

    def __init__(self) -> None:
        super().__init__()
        self._errors: deque[BaseException] = deque(maxlen=64)
        self._count = 0
        self._lock_of_count = threading.Lock()

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the error; who called the program hears of it."""
        if record.exc_info and record.exc_info[1] is not None:
            self._errors.append(record.exc_info[1])

    def take(self, text: str) -> BaseException | None:
        """The latest error that the text of another one is about."""
        for error in reversed(self._errors):
            if f"{type(error).__name__}: {error}" in text:
                self._errors.remove(error)
                return error
        return None

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """For a `with` block; those of several threads may overlap."""
        with self._lock_of_count:
            self._count += 1
            _LOGGER.addHandler(self)
        try:
            yield
        finally:
            with self._lock_of_count:
                self._count -= 1
                if not self._count:
                    _LOGGER.removeHandler(self)
                    self._errors.clear()


_heard = _Heard()


def with_errors_of_python(main: Callable[..., Any]) -> Callable[..., Any]:
    """A program that raises what its callbacks raise, and waits for its results."""

    def called(*given: Any) -> Any:
        with _heard.listening():
            try:
                return jax.block_until_ready(main(*given))
            except Exception as error:  # a JaxRuntimeError, or a ValueError
                original = _heard.take(str(error))
                if original is None:
                    raise
                raise original from error

    return called
