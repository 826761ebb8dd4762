"""A trace of a few calls, for XProf, TensorBoard or Perfetto."""

from __future__ import annotations

import contextlib
import os

import jax

# The first call compiles, the second one is made on idle devices.
_CALLS = range(2, 5)


class Tracing:
    """The trace of one loop, on process 0.

    Args:
      directory: where to write it; None for no trace.
    """

    def __init__(self, directory: str | os.PathLike[str] | None) -> None:
        self._directory = directory
        self._is_on = False

    def wants(self, call: int) -> bool:
        """Whether a call is to be in the trace."""
        return self._directory is not None and call in _CALLS

    def is_first(self, call: int) -> bool:
        """Whether the trace begins with a call."""
        return self._directory is not None and call == _CALLS[0]

    def is_last(self, call: int) -> bool:
        """Whether it ends with a call."""
        return self._directory is not None and call == _CALLS[-1]

    def call(self, name: str, call: int) -> contextlib.AbstractContextManager[object]:
        """A block in which a call is made, in the trace if it is to be."""
        if not self.wants(call):
            return contextlib.nullcontext()
        if not self._is_on and jax.process_index() == 0:
            assert self._directory is not None
            jax.profiler.start_trace(os.fspath(self._directory))
            self._is_on = True
        return jax.profiler.StepTraceAnnotation(name, step_num=call)

    def stop(self) -> None:
        """Write it, if it was begun."""
        if self._is_on:
            self._is_on = False
            jax.profiler.stop_trace()
